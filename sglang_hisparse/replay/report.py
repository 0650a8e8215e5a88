"""How a finished replay is shown: tables for people, one JSON object for machines.

Called by command.py. It computes shares and units from the counts of figures.py and keeps no count of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from sglang_hisparse.replay.figures import Counts, ReplayReport

MIB = 1 << 20


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _selected(counts: Counts) -> int:
    return counts.rows_resident + counts.rows_hot + counts.rows_fetched


def _mean(request_steps: int, counts: Counts) -> str:
    return f"{request_steps / counts.steps:.1f}" if counts.steps else "-"


#: (section, label, value) of each line of the phase table.
_LINES: list[tuple[str, str, Callable[[Counts], str]]] = [
    ("requests", "steps", lambda c: f"{c.steps:,}"),
    ("requests", "arrived / finished / retracted", lambda c: f"{c.arrived} / {c.finished} / {c.retracted}"),
    ("requests", "begun over a host-only prefix", lambda c: f"{c.started_on_host}"),
    ("residency", "full, mean running", lambda c: _mean(c.request_steps_full, c)),
    ("residency", "mixed", lambda c: _mean(c.request_steps_mixed, c)),
    ("residency", "none", lambda c: _mean(c.request_steps_none, c)),
    ("selected rows", "number", lambda c: f"{_selected(c):,}"),
    ("selected rows", "resident", lambda c: _share(c.rows_resident, _selected(c))),
    ("selected rows", "hot", lambda c: _share(c.rows_hot, _selected(c))),
    ("selected rows", "fetched from the host", lambda c: _share(c.rows_fetched, _selected(c))),
    ("pages", "mirrored", lambda c: f"{c.pages_mirrored:,}"),
    ("pages", "spilled", lambda c: f"{c.pages_spilled:,}"),
    ("pages", "promoted", lambda c: f"{c.pages_promoted:,}"),
    ("traffic", "MiB to the host", lambda c: f"{c.bytes_to_host / MIB:.1f}"),
    ("traffic", "MiB to the device", lambda c: f"{c.bytes_to_device / MIB:.1f}"),
    ("check", "rows compared", lambda c: f"{c.rows_checked:,}"),
    ("check", "mismatches", lambda c: f"{c.mismatches:,}"),
    ("check", "seconds", lambda c: f"{c.seconds:.1f}"),
]


def phase_table(report: ReplayReport) -> Table:
    table = Table(title="sglang-hisparse replay")
    table.add_column("")
    for phase in report.phases:
        table.add_column(phase.name, justify="right", no_wrap=True)
    table.add_column("total", justify="right", style="bold", no_wrap=True)
    columns = [phase.counts for phase in report.phases] + [report.total]
    section = ""
    for name, label, value in _LINES:
        if name != section:
            table.add_section()
            table.add_row(f"[bold]{name}[/]")
            section = name
        table.add_row(f"  {label}", *(value(counts) for counts in columns))
    return table


def profile_table(report: ReplayReport) -> Table:
    table = Table(title="by locality profile of the stream")
    for name in ("profile", "selected rows", "resident", "hot", "fetched", "fetched, of rows not resident"):
        table.add_column(name, justify="left" if name == "profile" else "right")
    for item in report.profiles:
        table.add_row(
            item.name,
            f"{item.rows:,}",
            _share(item.rows_resident, item.rows),
            _share(item.rows_hot, item.rows),
            _share(item.rows_fetched, item.rows),
            _share(item.rows_fetched, item.rows_hot + item.rows_fetched),
        )
    return table


def summary(report: ReplayReport) -> str:
    """One line: the verdict and the residency modes that the run has shown."""
    total = report.total
    return (
        f"{'ok' if report.ok else 'FAILED'}: {total.mismatches:,} mismatches in {total.rows_checked:,} rows compared, "
        f"{total.resolver_errors:,} resolver errors; request steps by residency: full {total.request_steps_full:,}, "
        f"mixed {total.request_steps_mixed:,}, none {total.request_steps_none:,}; {total.seconds:.1f} s"
    )


def show(report: ReplayReport, console: Console) -> None:
    console.print(phase_table(report))
    console.print(profile_table(report))
    for problem in report.problems:
        console.print(f"[bold red]problem:[/] {problem}")
    console.print(f"[bold {'green' if report.ok else 'red'}]{summary(report)}[/]", highlight=False, soft_wrap=True)


def write_json(report: ReplayReport, path: Path) -> None:
    """The whole report, and `ok`, as one JSON object."""
    fields = {"ok": report.ok, **msgspec.to_builtins(report)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n")
