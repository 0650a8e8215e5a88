#!/usr/bin/env python3
"""Where the GPU's time goes in a prefill: plain SGLang and sglang-hisparse side by side, by SGLang's own profiler, on one GPU.

Servers as in bench_serving.py: equal GPU memory, all started at once. One after another each is warmed up, sent --prompts
prompts of --context tokens with one output token, one at a time, without the profiler (`ttft_s`), and as many under it. A
prompt is never sent twice. With --decode N, N more prompts then decode at once, and --steps of their decode steps are profiled
(the pool of plain SGLang, 12.5 contexts, must hold them).

The result file (`prefill_profile.json`) has for each system, per prompt or per decode step: busy time of every stream; count and
time of every kernel, the forward's stream apart; `gap_us`, time between the first and the last launch of the forward's stream in
which none of it ran, pauses between prompts left out (`between_units_us`); and in `overlap` what runs beside copies of pages,
each kernel's mean time beside them (`inside_us`), without them (`outside_us`), and that of the same launches of plain
(`plain_us`: the same name, the same place in the same prompt). `lost_us` is what the first takes longer than the last.
`differences` has ours minus plain, kernel by kernel, for each system that is not plain.

--read-only reads the traces of an earlier call again and starts nothing. A trace is one rank's, the first.
The profiler itself costs host time, so gaps of an 8-layer model are wider under it: compare `profiled_ttft_s` with `ttft_s`.
"""

import argparse
import dataclasses
import json
import pathlib
import shlex
import statistics
import sys
import time
from typing import Any

from bench_serving import SYSTEMS, Run, add_server_arguments, check_systems, members_of, pool_of, warm_up
from rich.console import Console
from rich.table import Table
from serving.client import random_prompts, send
from serving.fleet import Member, dry_run, fleet
from serving.results import versions, write_json
from serving.server import Paths, Server, ServerError
from serving.traces import Profile, differences, read_launches

FILE = "prefill_profile.json"
SHOWN = 25  # rows of a printed table; the file has all
STOP_SECONDS, TRACE_SECONDS = 60.0, 30.0  # to end a profile; to find its trace afterwards


@dataclasses.dataclass(slots=True)
class Measured:
    """One system: what it was sent, and its traces by phase ("prefill", "decode")."""

    ttft_s: list[float] = dataclasses.field(default_factory=list)
    profiled_ttft_s: list[float] = dataclasses.field(default_factory=list)
    traces: dict[str, pathlib.Path] = dataclasses.field(default_factory=dict)


def members(args: argparse.Namespace) -> dict[str, Member]:
    """The servers, by "system@context". SGLang profiles decode steps of a whole batch only where its environment says so."""
    env = {"SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS": str(args.decode)} if args.decode else {}
    return {
        key: dataclasses.replace(one, spec=dataclasses.replace(one.spec, env=one.spec.env | env))
        for key, one in members_of(args, args.context).items()
    }


def start_profile(server: Server, args: argparse.Namespace, system: str, phase: str) -> str:
    """Ask for a profile; returns the id in its trace's name. Raises ValueError when the server refuses.

    Without a number of steps it runs until `stop_profile`; decode steps are profiled by stage: SGLang begins when the batch is
    whole and ends by itself.
    """
    profile_id = f"{system}-{phase}"
    for old in traces_of(args, profile_id):
        old.unlink()
    args.traces.mkdir(parents=True, exist_ok=True)
    body: dict[str, Any] = {
        "output_dir": str(args.traces.resolve()),
        "activities": args.activities,
        "with_stack": False,
        "record_shapes": False,
        "profile_id": profile_id,
    }
    if phase == "decode":
        body |= {"profile_by_stage": True, "num_steps": args.steps}
    if server.get("/start_profile", timeout_s=STOP_SECONDS, method="POST", body=body) is None:
        raise ValueError(f"the profiler did not start; the log of the server says why: {server.log}")
    return profile_id


def traces_of(args: argparse.Namespace, profile_id: str) -> list[pathlib.Path]:
    """Traces with that id, ranks in order; of a profile by stage, that of decode steps."""
    found = sorted(args.traces.glob(f"{profile_id}-*.trace.json.gz"))
    return [path for path in found if ("-DECODE" in path.name) == profile_id.endswith("-decode")]


def trace_of(args: argparse.Namespace, profile_id: str) -> pathlib.Path:
    """The first rank's trace, once it is whole. Raises ValueError when there is none."""
    deadline, before = time.monotonic() + args.trace_timeout, -1
    while time.monotonic() < deadline:
        if found := traces_of(args, profile_id):
            size = found[0].stat().st_size
            if size and size == before:
                return found[0]
            before = size
        time.sleep(0.2)
    raise ValueError(f"no trace {profile_id} in {args.traces} after {args.trace_timeout:.0f} s")


def send_prompts(run: Run, server: Server, what: str) -> list[float]:
    """Seconds to the first token of each prompt, one at a time. Raises ValueError on a failure."""
    args = run.args
    prompts = random_prompts(f"{args.seed}/{what}", [args.context[0]] * args.prompts)
    replies = send(server.url, prompts, 1, 1, min(args.request_timeout, max(1.0, run.left_s())))
    if failed := [reply.error for reply in replies if reply.error]:
        raise ValueError(f"{len(failed)} of {len(replies)} prompts failed, the first with: {failed[0]}")
    server.flush()
    return [round(reply.ttft_s, 4) for reply in replies]


def profile_prefill(run: Run, server: Server, system: str, measured: Measured) -> None:
    """Prompts without the profiler, then others under it. Raises ValueError on a failure."""
    measured.ttft_s = send_prompts(run, server, "timed")
    profile_id = start_profile(server, run.args, system, "prefill")
    try:
        measured.profiled_ttft_s = send_prompts(run, server, "profiled")
    finally:
        stopped = server.get("/stop_profile", timeout_s=STOP_SECONDS, method="POST")
    if stopped is None:
        raise ValueError(f"the profiler did not stop; {server.log}")
    measured.traces["prefill"] = trace_of(run.args, profile_id)


def profile_decode(run: Run, server: Server, system: str, measured: Measured) -> None:
    """A batch of prompts that decodes; SGLang profiles some of its steps. Raises ValueError on a failure."""
    args = run.args
    prompts = random_prompts(f"{args.seed}/decode", [args.context[0]] * args.decode)
    profile_id = start_profile(server, args, system, "decode")
    replies = send(server.url, prompts, args.output, args.decode, min(args.request_timeout, max(1.0, run.left_s())))
    server.flush()
    if failed := [reply.error for reply in replies if reply.error]:
        raise ValueError(f"{len(failed)} of {args.decode} requests failed, the first with: {failed[0]}")
    measured.traces["decode"] = trace_of(args, profile_id)


def measure(run: Run, servers: dict[str, Server]) -> dict[str, Measured]:
    """Every system that runs, one after another; what fails is named and left out."""
    found: dict[str, Measured] = {}
    for system in run.args.systems:
        server = servers.get(f"{system}@{run.args.context[0]}")
        if server is None:
            continue
        measured = found[system] = Measured()
        for phase, profile in (("prefill", profile_prefill), ("decode", profile_decode)):
            if phase == "decode" and not run.args.decode:
                continue
            try:
                profile(run, server, system, measured)
                server.check_alive()
            except (ServerError, ValueError) as error:
                run.miss(f"[{system}] {phase}: {error}")
                break
            print(f"[{system}] {phase}: {measured.traces[phase]}, TTFT {measured.ttft_s}, profiled {measured.profiled_ttft_s}",
                  flush=True)  # fmt: skip
    return found


def known_traces(args: argparse.Namespace) -> dict[str, Measured]:
    """Of an earlier call: the traces that are there, and the times that its result file has."""
    path = args.out / FILE
    before = json.loads(path.read_text())["systems"] if path.exists() else {}
    found = {}
    for system in args.systems:
        times = {key: before.get(system, {}).get(key, []) for key in ("ttft_s", "profiled_ttft_s")}
        measured = found[system] = Measured(**times)
        for phase in ("prefill", "decode"):
            if paths := traces_of(args, f"{system}-{phase}"):
                measured.traces[phase] = paths[0]
    return found


# -- what the traces say --------------------------------------------------------------------------------------------------


def profiles(run: Run, found: dict[str, Measured], phase: str) -> dict[str, Profile]:
    """The traces of a phase, read; one that cannot be is named and left out."""
    args = run.args
    known = {}
    for system, measured in found.items():
        if phase not in measured.traces:
            continue
        units = args.prompts if phase == "prefill" else args.steps
        try:
            known[system] = Profile(read_launches(measured.traces[phase]), units, separate=phase == "prefill")
        except (OSError, ValueError) as error:
            run.miss(f"[{system}] {phase}: {error}")
    return known


def document_of(run: Run, found: dict[str, Measured]) -> dict[str, Any]:
    """The result file."""
    args = run.args
    document: dict[str, Any] = {"commit": args.commit, "versions": versions(args.site), "command": args.command}
    document |= {"model": args.model_name, "dtype": args.kv_dtype, "context": args.context[0], "prompts": args.prompts}
    document |= {"decode": args.decode, "steps": args.steps if args.decode else 0, "config": args.config}
    systems: dict[str, dict[str, Any]] = {
        system: {"pool": pool_of(args, system, args.context[0]).as_json(), "ttft_s": one.ttft_s, "profiled_ttft_s": one.profiled_ttft_s}
        for system, one in found.items()
    }  # fmt: skip
    apart: dict[str, dict[str, Any]] = {}
    for phase in ("prefill", "decode"):
        known = profiles(run, found, phase)
        plain = known.get("plain")
        for system, profile in known.items():
            report = systems[system][phase] = profile.report(plain if system != "plain" else None)
            if plain and system != "plain":
                apart.setdefault(system, {})[phase] = differences(report["kernels"], plain.kernels())
    return document | {"systems": systems, "differences": apart}


def show(document: dict[str, Any], console: Console) -> None:
    """Tables of the longest rows."""
    for phase, unit in (("prefill", "prompt"), ("decode", "step")):
        reports = {system: one[phase] for system, one in document["systems"].items() if phase in one}
        if not reports:
            continue
        table = _table(f"{phase}: us a {unit}", "system", "TTFT s (profiled)", "span", "forward busy", "gaps", "number",
                       "longest", "streams (busy)", "page copies", "beside forward")  # fmt: skip
        for system, one in reports.items():
            times = document["systems"][system]
            forward = sum(row["busy_us"] for row in one["streams"] if row["forward"])
            others = ", ".join(f"{row['stream']}: {row['busy_us']:,.0f}" for row in one["streams"] if not row["forward"])
            table.add_row(
                system, f"{_middle(times['ttft_s'])} ({_middle(times['profiled_ttft_s'])})",
                *(f"{value:,.0f}" for value in (one["span_us"], forward, one["gap_us"], one["gaps"], one["longest_us"])),
                others or "-", f"{one['overlap']['copy_us']:,.0f}", f"{one['overlap']['overlapped_us']:,.0f}",
            )  # fmt: skip
        console.print(table)
        for system in reports:
            _show_differences(document["differences"].get(system, {}).get(phase, []), f"{phase}: {system} - plain", console)
            _show_overlap(reports[system]["overlap"], f"{phase}: {system}, beside page copies", console)


def _show_differences(rows: list[dict[str, Any]], title: str, console: Console) -> None:
    if rows:
        table = _table(title, "kernel", "stream", "launches", "of plain", "us", "of plain", "difference")
        for row in rows[:SHOWN]:
            numbers = (row["count"], row["plain_count"], row["us"], row["plain_us"])
            table.add_row(row["kernel"], "forward" if row["forward"] else "other", *(f"{one:,.1f}" for one in numbers),
                          f"{row['difference_us']:+,.1f}")  # fmt: skip
        console.print(table)


def _show_overlap(overlap: dict[str, Any], title: str, console: Console) -> None:
    if overlap["kernels"]:
        table = _table(title, "kernel", "launches beside", "mean us", "without", "the same in plain", "lost")
        for row in overlap["kernels"][:SHOWN]:
            numbers = (row["inside"], row["inside_us"], row["outside_us"], row["plain_us"], row["lost_us"])
            table.add_row(row["kernel"], *("-" if one is None else f"{one:,.1f}" for one in numbers))
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    return table


def _middle(values: list[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else "-"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line; which servers are started is said as to bench_serving.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="checkpoint folder of make_tiny_dsa.py")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the result file")
    add_server_arguments(parser)
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp/sglang-logs"), help="server logs, counters")
    parser.add_argument("--traces", type=pathlib.Path, help="folder for the traces; default: `traces` in --out")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=["plain", "ours"],
                        help=f"comma-separated; known: {', '.join(SYSTEMS)}")  # fmt: skip
    parser.add_argument("--context", type=lambda text: [int(text)], default=[64_000], help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=4, help="prompts under the profiler, and as many before it")
    parser.add_argument("--decode", type=int, default=0, help="requests that decode at once; 0: none")
    parser.add_argument("--steps", type=int, default=32, help="decode steps under the profiler")
    parser.add_argument("--output", type=int, default=96, help="tokens that each of them generates")
    parser.add_argument("--activities", type=lambda text: text.split(","), default=["GPU"],
                        help="of SGLang's profiler; CPU,GPU shows host steps in the trace and slows them down")  # fmt: skip
    parser.add_argument("--config", type=json.loads, default={}, help="further keys of the config of ours, as JSON")
    parser.add_argument("--equal", choices=["tokens", "bytes"], default="bytes", help="what is equal between the systems")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for the whole call, starts included")
    parser.add_argument("--start-timeout", type=float, default=120.0)
    parser.add_argument("--request-timeout", type=float, default=60.0)
    parser.add_argument("--trace-timeout", type=float, default=TRACE_SECONDS)
    parser.add_argument("--read-only", action="store_true", help="read the traces of an earlier call, start nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the servers' commands, start nothing")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python3", "scripts/profile_prefill.py", *(sys.argv[1:] if argv is None else argv)])
    args.traces, args.stream_interval = args.traces or args.out / "traces", 1
    check_systems(parser, args)
    if min(args.prompts, args.steps, args.context[0]) < 1 or args.decode < 0:
        parser.error("--prompts, --steps and --context are at least 1, --decode at least 0")
    if args.decode and args.output <= args.steps + 1:
        parser.error(f"--output {args.output}: allowed: more than --steps {args.steps} and one")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 when something failed; what is known is written then too."""
    args = parse_arguments(argv)
    run, chosen = Run(args, time.monotonic() + args.budget), members(args)
    paths = Paths(args.model, args.logs, args.site, args.plugin, args.cache)
    if args.dry_run:
        print(dry_run(chosen, paths, args.port))
        return 0
    found: dict[str, Measured] = {}
    if args.read_only:
        found = known_traces(args)
    else:
        try:
            with fleet(chosen, paths, args.port, min(args.start_timeout, run.left_s())) as servers:
                warm_up(run, servers, args.context)
                found = measure(run, servers)
        except (ServerError, ValueError) as error:
            run.miss(f"FAILED: {error}")
    document = document_of(run, found)
    write_json(args.out / FILE, document)
    show(document, Console(width=180))
    for what in run.failures:
        print(f"missing: {what[:300]}", flush=True)
    return 1 if run.failures or not any(one.traces for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
