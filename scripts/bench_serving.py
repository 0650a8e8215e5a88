#!/usr/bin/env python3
"""Measure plain SGLang, SGLang's own HiSparse and sglang-hisparse side by side, on one GPU.

The pool of plain SGLang holds 12.5 contexts (--pool-contexts), so it grows with the context and there is one server per
context and system. All servers of a context start at once, those of several contexts too while --servers-at-once allows it;
then they are measured one after another, each point on every system before the next; with --repeats N all systems N times in
turn, before the next point. A prompt is never sent twice to a server, so that no prefix is cached. Rows are written as they
come.

--equal tokens: every system gets the same device pool, and HiSparse's index keys of all logical tokens come on top of it;
results in serving_h200.json. --equal bytes: KV rows and index keys together take the same GPU memory in every system;
results in serving_equal_memory_h200.json, where pool_tokens is the pool of plain SGLang.

ours_elastic is ours with elastic_border: it begins with the device tokens of plain SGLang, and has as many logical tokens as
ours; only with --equal bytes. ours_audit checks rows while it runs; ours_latency admits without a look at the throughput;
ours_unfused selects in decode steps as SGLang does under HiSparse, and not by plain SGLang's kernel; ours_on_pressure copies no page
to the host before pages run short; ours_engine copies by the copy engine where pages lie in runs; ours_table
translates the page table of a prefill once, not what each layer selects.
--output and --stream-interval: with 256 tokens prefill takes most of the time of a long prompt; longer outputs show decode; one
event a token makes the HTTP stream the bottleneck of small models. A result file holds rows of one stream interval
(`stream_interval`; a file without it: 1), of one --config (`config`) and one --link-load (`link_load`); a call with another one
ends before it starts a server, unless --base names a file that does not exist.
--link-load N: while it is measured, N processes copy host memory to the GPU without a pause, begun after the servers have timed
their link; `link_load_gb_s` is what they took.

Columns, of one run: output_tok_s from the first sending to the last token; decode_tok_s, tokens that arrive after a wave's last
first token over the time after it (an event's tokens count when it arrives); ttft_s and itl_ms, means over the requests;
pages_spilled and rows_fetched, the plugin's counts during the run, 0 for the others. With repeats a row is, in all columns, the
run with the median output_tok_s (of an even number the lower), and `repeats` has output_tok_s of every run, in order.
`ratios` compares ours with the better of the others, point by point.
"""

import argparse
import itertools
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from serving.client import Reply, Timing, random_prompts, send, summarise
from serving.fidelity import growth, settled_counters
from serving.fleet import Member, Pool, dry_run, fleet, hisparse_pool, member, plain_pool, with_options
from serving.link_load import link_load
from serving.results import SERVING_IDENTITY, SERVING_KEYS, current_commit, read_document, update, versions
from serving.server import Paths, Server, ServerError, ServerSpec, add_place_arguments

# SGLang's own HiSparse refuses to run with the prefix cache.
SYSTEMS = {
    "plain": ServerSpec("bench-plain"),
    "builtin": ServerSpec("bench-builtin", hisparse=True, radix=False),
    "ours": ServerSpec("bench-ours", hisparse=True, plugin=True),
    "ours_elastic": ServerSpec("bench-elastic", hisparse=True, plugin=True, config={"elastic_border": True}),
    "ours_audit": ServerSpec("bench-audit", hisparse=True, plugin=True, env={"SGLANG_HISPARSE_AUDIT": "1"}),
    "ours_unfused": ServerSpec("bench-unfused", hisparse=True, plugin=True, env={"SGLANG_HISPARSE_FUSED_TOP_K": "0"}),
    "ours_on_pressure": ServerSpec("bench-on-pressure", hisparse=True, plugin=True, config={"mirroring": "on_pressure"}),
    "ours_table": ServerSpec("bench-table", hisparse=True, plugin=True, env={"SGLANG_HISPARSE_EXTEND_TABLE": "1"}),
    "ours_engine": ServerSpec("bench-engine", hisparse=True, plugin=True, env={"SGLANG_HISPARSE_MIRROR_ENGINE": "1"}),
    "ours_latency": ServerSpec("bench-latency", hisparse=True, plugin=True, config={"admission": "latency"}),
}
DEFAULT_SYSTEMS = ["plain", "builtin", "ours"]
RESULTS = pathlib.Path("scripts/results")
FILES = {"tokens": "serving_h200.json", "bytes": "serving_equal_memory_h200.json"}
# Options that all rows of a result file have in common, and what a file without one of them was made with.
FILE_OPTIONS: dict[str, Any] = {"stream_interval": 1, "config": {}, "link_load": 0}
START_SECONDS, POINT_SECONDS = 90.0, 15.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of `context` prompt and `output` tokens, `concurrency` at a time, in `waves` waves of that size."""

    concurrency: int
    waves: int
    context: int
    output: int


@dataclass(slots=True)
class Run:
    """One call: its arguments, when it must be over, what failed or was left out."""

    args: argparse.Namespace
    ends: float
    failures: list[str] = field(default_factory=list)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    link_gb_s: list[list[float]] = field(default_factory=list)

    @property
    def path(self) -> pathlib.Path:
        """The result file."""
        return self.args.out / FILES[self.args.equal]

    def left_s(self) -> float:
        """Seconds until the call must be over."""
        return self.ends - time.monotonic()

    def miss(self, what: str) -> None:
        """Print and keep what is missing in the result."""
        print(what, flush=True)
        self.failures.append(what)

    @property
    def base(self) -> pathlib.Path:
        """The file whose rows are carried over: the result file itself where it exists."""
        return self.path if self.path.exists() else self.args.base or RESULTS / FILES[self.args.equal]

    def check_base(self) -> None:
        """Raises ValueError when rows made with other FILE_OPTIONS would be carried over."""
        document = read_document(self.base)
        for option, otherwise in FILE_OPTIONS.items():
            known, mine = document.get(option, otherwise), getattr(self.args, option)
            if self.base.exists() and known != mine:
                raise ValueError(f"{self.base} has rows of --{option.replace('_', '-')} {known}, this call has {mine}; "
                                 "another --out, and a --base that does not exist, begin a file of its own")  # fmt: skip

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """The link as the call wants it; what was taken from it is in the result file then. Raises ValueError."""
        with link_load(self.args.link_load) as taken:
            yield
        if taken and self.path.exists():
            self.link_gb_s.append(taken)
            update(self.path, self.path, [], SERVING_KEYS, SERVING_IDENTITY, {"link_load_gb_s": self.link_gb_s})

    def write(self, runs: Sequence[dict[str, Any]]) -> None:
        """Set the row of a point to its median run, and what follows from all rows."""
        args, row = self.args, median_run(runs)
        head = {"commit": args.commit, "versions": versions(args.site), "command": args.command}
        head |= {option: getattr(args, option) for option in FILE_OPTIONS}
        update(self.path, self.base, [row], SERVING_KEYS, SERVING_IDENTITY, head)
        known = read_document(self.path)
        tail: dict[str, Any] = {"ratios": ratios(known["rows"])}
        tail["repeats"] = repeats(known.get("repeats", []), runs)
        if args.equal == "bytes":
            tail["equal_memory"] = {"ratio": args.ratio, "pool_tokens": "of plain SGLang; the others get its bytes"}
        update(self.path, self.path, [], SERVING_KEYS, SERVING_IDENTITY, tail)


def pool_tokens(args: argparse.Namespace, context: int) -> int:
    """Pool of plain SGLang for a context."""
    return args.pool_tokens or round(args.pool_contexts * context)


def pool_of(args: argparse.Namespace, system: str, context: int) -> Pool:
    """Pool of a system for a context."""
    tokens = pool_tokens(args, context)
    if not SYSTEMS[system].hisparse:
        return plain_pool(tokens, args.layers, args.kv_dtype)
    return hisparse_pool(tokens, args.ratio, args.layers, args.kv_dtype, args.equal, SYSTEMS[system].elastic)


def points(args: argparse.Namespace) -> dict[int, list[tuple[int, int]]]:
    """(requests at once, output tokens) of every context that is to be measured, all in ascending order."""
    chosen = args.points or [(context, many, None) for context in args.context for many in args.concurrency]
    whole = {(context, many, out) for context, many, given in chosen for out in (args.output if given is None else [given])}
    grid: dict[int, list[tuple[int, int]]] = {}
    for context, many, output in sorted(whole):
        grid.setdefault(context, []).append((many, output))
    return grid


def groups(args: argparse.Namespace, contexts: Sequence[int]) -> list[list[int]]:
    """Contexts whose servers run at the same time."""
    size = max(1, args.servers_at_once // len(args.systems))
    return [list(contexts[first : first + size]) for first in range(0, len(contexts), size)]


def members_of(args: argparse.Namespace, contexts: Sequence[int]) -> dict[str, Member]:
    """The servers of some contexts, by "system@context"."""
    return {
        f"{system}@{context}": member(
            with_options(SYSTEMS[system], args.config, args.stream_interval),
            pool_of(args, system, context),
            ratio=args.ratio,
            max_running=64,
            kv_dtype=args.kv_dtype,
            name=f"{SYSTEMS[system].name}-{context}",
        )
        for context in contexts
        for system in args.systems
    }


def measure(server: Server, load: Load, seed: str, timeout_s: float) -> tuple[Timing, dict[str, int]]:
    """Send one load; return its figures and the plugin's counters after it. Raises ValueError on a failure."""
    prompts = random_prompts(seed, [load.context] * (load.concurrency * load.waves))
    waves: list[list[Reply]] = []
    for first in range(0, len(prompts), load.concurrency):
        wave = prompts[first : first + load.concurrency]
        waves.append(send(server.url, wave, load.output, load.concurrency, timeout_s))
    server.check_alive()
    return summarise(waves), settled_counters(server)


def result_row(
    args: argparse.Namespace, system: str, load: Load, timing: Timing, counts: dict[str, int]
) -> dict[str, Any]:
    """One row of the result file."""
    return {
        "model": args.model_name,
        "dtype": args.kv_dtype,
        "context": load.context,
        "output": load.output,
        "concurrency": load.concurrency,
        "pool_tokens": pool_tokens(args, load.context),
        "system": system,
        "output_tok_s": round(timing.output_tok_s, 1),
        "decode_tok_s": round(timing.decode_tok_s, 1),
        "ttft_s": round(timing.ttft_s, 3),
        "itl_ms": round(timing.itl_ms, 3),
        "pages_spilled": counts["pages_spilled"],
        "rows_fetched": counts["rows_fetched"],
    }


def median_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median output tok/s, the lower one of an even number."""
    return sorted(runs, key=lambda run: run["output_tok_s"])[(len(runs) - 1) // 2]


def repeats(known: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of rows that are medians, those of this point replaced: its identity, and output tok/s of each run."""
    point = {key: runs[0][key] for key in SERVING_IDENTITY}
    others = [one for one in known if {key: one[key] for key in SERVING_IDENTITY} != point]
    speeds = [run["output_tok_s"] for run in runs]
    return others + ([point | {"output_tok_s": speeds}] if len(runs) > 1 else [])


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over the better of the others, for every point that has ours and another system; output tok/s. With ours_elastic there
    is a second entry, with the key system; the other variants of ours are compared with ours alone."""
    keys = [key for key in SERVING_IDENTITY if key != "system"]
    entries = []
    for point in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        speed = {row["system"]: row["output_tok_s"] for row in rows if tuple(row[key] for key in keys) == point}
        others = {system: value for system, value in speed.items() if not system.startswith("ours")}
        for ours in ("ours", "ours_elastic"):
            if ours not in speed or not others:
                continue
            better = max(others, key=lambda system: others[system])
            entry = dict(zip(keys, point, strict=True)) | {"better": better, "others": len(others)}
            if ours != "ours":
                entry["system"] = ours
            entries.append(entry | {"ours_over_better": round(speed[ours] / others[better], 3)})
    return entries


def warm_up(run: Run, servers: dict[str, Server], contexts: Sequence[int]) -> None:
    """The longest prefill chunk and the batch sizes compile or warm up before the clock runs."""
    for context, system in itertools.product(contexts, run.args.systems):
        key = f"{system}@{context}"
        if key not in servers:
            run.miss(f"[{key}] did not start")
            continue
        server = servers[key]
        try:
            send(server.url, random_prompts(-1, [context] * 2), 16, 2, run.args.request_timeout)
            server.flush()
            server.freeze_gc()
            run.counters[key] = settled_counters(server)
        except (ServerError, ValueError) as error:
            run.miss(f"[{key}] did not warm up: {error}")
            del servers[key]


def measure_group(
    run: Run, servers: dict[str, Server], grid: dict[int, list[tuple[int, int]]], contexts: Sequence[int]
) -> None:
    """Every point of these contexts on every server that runs."""
    args = run.args
    for context in contexts:
        here = {system: servers.get(f"{system}@{context}") for system in args.systems}
        for concurrency, output in grid[context]:
            load = Load(concurrency, args.waves if concurrency == 1 else 1, context, output)
            runs: dict[str, list[dict[str, Any]]] = {}
            for repeat, (system, server) in itertools.product(range(args.repeats), here.items()):
                row = measure_point(run, system, server, load, repeat) if server else None
                if row:
                    runs.setdefault(system, []).append(row)
                    run.write(runs[system])


def measure_point(run: Run, system: str, server: Server, load: Load, repeat: int) -> dict[str, Any] | None:
    """One run as a row, or a line that says why there is none."""
    args, key = run.args, f"{system}@{load.context}"
    what = f"[{key}] {load.concurrency} at once, {load.output} out, run {repeat + 1} of {args.repeats}"
    if run.left_s() < POINT_SECONDS:
        run.miss(f"{what} left out: {run.left_s():.0f} s are left")
        return None
    timeout_s = min(args.request_timeout, run.left_s())
    # The same prompts for every system, others in every run.
    seed = f"{args.seed}/{load.concurrency}/{load.output}/{repeat}"
    try:
        timing, after = measure(server, load, seed, timeout_s)
    except (ServerError, ValueError) as error:
        run.miss(f"{what} FAILED: {error}")
        return None
    counts = growth(run.counters[key], after)
    run.counters[key] = after
    print(f"{what}: {timing.output_tok_s:.1f} output tok/s, {timing.decode_tok_s:.1f} decode tok/s, "
          f"TTFT {timing.ttft_s:.2f} s, ITL {timing.itl_ms:.2f} ms, {counts}", flush=True)  # fmt: skip
    if told := {name: value for name, value in after.items() if name.startswith(("admission_", "border_"))}:
        print(f"[{key}] at the end of it: {told}", flush=True)
    server.flush()
    return result_row(args, system, load, timing, counts)


def _point(text: str) -> tuple[int, int, int | None]:
    context, concurrency, output = (*(int(number) for number in text.split("x")), None)[:3]
    if text.count("x") not in (1, 2):
        raise ValueError(text)
    return context, concurrency, output


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """What says which servers are started for a context; `members_of` and `pool_of` read them, and `check_systems` what was said."""
    parser.add_argument("--model-name", default="tiny-dsa-8l", help="name in the result file")
    parser.add_argument("--layers", type=int, default=8, help="layers of the checkpoint")
    parser.add_argument("--ratio", type=int, default=6, help="logical tokens per device token of the HiSparse systems")
    parser.add_argument("--pool-contexts", type=float, default=12.5, help="contexts that plain SGLang's pool holds")
    parser.add_argument("--pool-tokens", type=int, help="plain SGLang's pool for every context, instead")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=["bfloat16", "fp8_e4m3"])
    parser.add_argument("--commit", default=current_commit(), help="default: HEAD of this repository")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--port", type=int, default=30000, help="of the first server; each takes ten")
    add_place_arguments(parser)


def check_systems(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the call where `--systems`, `--equal` or `--commit` cannot be used."""
    if unknown := [system for system in args.systems if system not in SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(SYSTEMS)}")
    if args.equal != "bytes" and "ours_elastic" in args.systems:
        parser.error("ours_elastic: --equal tokens says nothing about a border that moves; allowed: --equal bytes")
    if not args.commit:
        parser.error("--commit is needed outside a repository")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="checkpoint folder of make_tiny_dsa.py")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the result file")
    add_server_arguments(parser)
    parser.add_argument(
        "--logs", type=pathlib.Path, default=pathlib.Path("/tmp/sglang-logs"), help="server logs, counters"
    )
    parser.add_argument("--base", type=pathlib.Path,
                        help="result file whose rows are carried over; default: the committed one of the same name")  # fmt: skip
    parser.add_argument("--systems", type=lambda text: text.split(","), default=DEFAULT_SYSTEMS,
                        help=f"comma-separated; known: {', '.join(SYSTEMS)}")  # fmt: skip
    parser.add_argument("--context", type=numbers, default=[16_000], help="tokens of a prompt, comma-separated")
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 48])
    parser.add_argument("--points", type=lambda text: [_point(one) for one in text.split(",")],
                        help="these points only, instead of the whole grid: CONTEXTxCONCURRENCY[xOUTPUT], comma-separated")  # fmt: skip
    parser.add_argument("--output", type=numbers, default=[256], help="tokens to generate, comma-separated")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of an event, for every system")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every point; the row is the median run")
    parser.add_argument("--config", type=json.loads, default={},
                        help="further keys of the config of ours, as JSON; SGLang's own HiSparse gets those that it knows")  # fmt: skip
    parser.add_argument("--link-load", type=int, default=0, help="processes that copy to the GPU meanwhile")
    parser.add_argument("--waves", type=int, default=4, help="how often a single stream is repeated")
    parser.add_argument("--equal", choices=list(FILES), default="tokens", help="what is equal between the systems")
    parser.add_argument("--servers-at-once", type=int, default=6)
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for the whole call, starts included")
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--request-timeout", type=float, default=150.0)
    parser.add_argument("--dry-run", action="store_true", help="print the servers' commands and pools, start nothing")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python3", "scripts/bench_serving.py", *(sys.argv[1:] if argv is None else argv)])
    check_systems(parser, args)
    if min(args.repeats, args.stream_interval, *args.output) < 1:
        parser.error("--repeats, --stream-interval and --output are at least 1")
    if args.link_load < 0:
        parser.error(f"--link-load {args.link_load}: allowed: 0 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 when a point failed or was left out, 2 when known rows were made with other FILE_OPTIONS."""
    args = parse_arguments(argv)
    paths = Paths(args.model, args.logs, args.site, args.plugin, args.cache)
    run, grid = Run(args, time.monotonic() + args.budget), points(args)
    try:
        if not args.dry_run:  # which writes nothing
            run.check_base()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for contexts in groups(args, list(grid)):
        members = members_of(args, contexts)
        if args.dry_run:
            print(dry_run(members, paths, args.port))
            print({f"{name}@{context}": pool_of(args, name, context) for context in contexts for name in args.systems})
            continue
        if run.left_s() < START_SECONDS + POINT_SECONDS:
            run.miss(f"contexts {contexts} left out: {run.left_s():.0f} s are left")
            continue
        try:
            with fleet(members, paths, args.port, min(args.start_timeout, run.left_s())) as servers:
                warm_up(run, servers, contexts)
                with run.loaded():
                    measure_group(run, servers, grid, contexts)
        except (ServerError, ValueError) as error:
            run.miss(f"contexts {contexts} FAILED: {error}")
    for what in run.failures:
        print(f"missing: {what[:300]}", flush=True)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
