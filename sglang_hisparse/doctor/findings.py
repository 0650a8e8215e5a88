"""One line of a check: what was looked at, what was found, what to do about it.

Made by the modules of checks, shown and written by the command. Holds no knowledge of what is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from rich.table import Table


class Status(str, Enum):
    """ERROR: the server would not start or could not work. WARNING: it works worse, or this was not looked at."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """remedy is empty where there is nothing to do."""

    check: str
    status: Status
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Status.WARNING, found, remedy)


def error(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Status.ERROR, found, remedy)


def no_gpu(check: str) -> Finding:
    """What could not be looked at for want of a GPU."""
    return warning(check, "no GPU: skipped", "run this on the machine that will serve")


def is_good(findings: Iterable[Finding]) -> bool:
    """Whether no line is an error."""
    return all(finding.status is not Status.ERROR for finding in findings)


_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "bold red"}


def table_of(findings: Iterable[Finding]) -> Table:
    """All lines, in the order in which they were made."""
    table = Table(title="sglang-hisparse check")
    for name in ("check", "status", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        status = f"[{_COLOURS[finding.status]}]{finding.status.value}[/]"
        table.add_row(finding.check, status, finding.found.replace("[", "\\["), finding.remedy.replace("[", "\\["))
    return table


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """The same as plain values."""
    lines = [{**asdict(finding), "status": finding.status.value} for finding in findings]
    return {"ok": all(line["status"] != Status.ERROR.value for line in lines), "checks": lines}
