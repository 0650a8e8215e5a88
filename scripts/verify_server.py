#!/usr/bin/env python3
"""Compare the tokens of a server with sglang-hisparse with those of plain SGLang, on one GPU or (--tp) several.

It starts the servers itself, one after another; phases can be picked, have a time budget each and leave their results
behind as they go (results in --out). `plain` writes plain_outputs.json, which later calls reuse through --plain.

  plain     SGLang alone: every prompt by itself, then all at once; how varied its text is
  ours      hybrid residency, prefix cache on: by itself, all at once, refused and granted flush in between, again; short prompts of whole
            pages and one token, twice, so that one token is all that is new
  host      always_host: by itself and all at once, every old row comes from the host tier
  pressure  high watermarks, so that pages are spilled early; all at once, twice, the second time with cached prefixes
  elastic   the border between KV and index-K moves while they run: all at once, twice; it goes back while the server rests after a
            flush; once more
  noradix   --disable-radix-cache: all at once
  fault     1 % of the rows given to attention replaced: most texts must change, or the comparison proves nothing

With --tp N every server has N ranks, plain too, and the ranks of ours must have taken the same decisions (their counters).
--together starts the servers of all phases at once.
"""

import argparse
import dataclasses
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from serving.client import Reply, random_prompts, send, spread_lengths
from serving.fidelity import Comparison, PlainOutputs, compare, growth, settled_counters
from serving.fleet import FLEET_MEM_FRACTION, Member, fleet
from serving.ranks import disagreements
from serving.results import FIDELITY_IDENTITY, FIDELITY_KEYS, current_commit, update, versions
from serving.server import Limits, Paths, Server, ServerError, ServerSpec, add_place_arguments, running

AUDIT = {"SGLANG_HISPARSE_AUDIT": "1"}
SPECS = {
    "plain": ServerSpec("plain"),
    "ours": ServerSpec("ours", hisparse=True, plugin=True, env=AUDIT),
    "host": ServerSpec("host", hisparse=True, plugin=True, config={"residency": "always_host"}, env=AUDIT),
    "pressure": ServerSpec(
        "pressure", hisparse=True, plugin=True, config={"watermark_low": 0.3, "watermark_high": 0.5}, env=AUDIT
    ),
    "elastic": ServerSpec("elastic", hisparse=True, plugin=True, config={"elastic_border": True}, env=AUDIT),
    "noradix": ServerSpec("noradix", hisparse=True, plugin=True, radix=False, env=AUDIT),
    "fault": ServerSpec(
        "fault", hisparse=True, plugin=True, config={"residency": "always_host"},
        env={"SGLANG_HISPARSE_FAULT": "zero_rows:0.01"},
    ),
}  # fmt: skip


TAILS = (65, 129, 257, 513, 1025, 1985)
"""Tokens of short prompts that are sent twice: pages and one token, which alone is computed the second time. In such an extend SGLang's top-k
reads other tables than in longer ones, and up to 2,048 tokens it scores nothing."""


@dataclass(slots=True)
class Run:
    """One call: its arguments, prompts, the expected tokens, and whether everything held so far."""

    args: argparse.Namespace
    paths: Paths
    limits: Limits
    prompts: list[list[int]]
    plain: PlainOutputs
    ok: bool = True
    counts: dict[str, int] = field(default_factory=dict)
    started: Mapping[str, Server] = field(default_factory=dict)  # by phase, with --together

    @property
    def num_single(self) -> int:
        """Prompts that are also sent by themselves."""
        return self.args.prompts

    def single(self, server: Server, count: int) -> list[Reply]:
        """Send the first `count` prompts one at a time."""
        return self._send(server, self.prompts[:count], 1)

    def batch(self, server: Server) -> list[Reply]:
        """Send all prompts at once."""
        return self._send(server, self.prompts, len(self.prompts))

    def tails(self, server: Server) -> list[Reply]:
        """Send the short prompts one at a time, and once more over what is cached of them."""
        return self._send(server, random_prompts(f"{self.args.seed}/tails", TAILS) * 2, 1)

    def _send(self, server: Server, prompts: Sequence[list[int]], concurrency: int) -> list[Reply]:
        start = time.monotonic()
        replies = send(server.url, prompts, self.args.output, concurrency, self.args.request_timeout)
        server.check_alive()
        failed = sum(bool(reply.error) for reply in replies)
        print(f"[{server.spec.name}] {len(prompts)} requests, {concurrency} at once: "
              f"{time.monotonic() - start:.1f} s, {failed} failed", flush=True)  # fmt: skip
        return replies

    def record(self, case: str, result: Comparison, counts: dict[str, int], must_agree: bool = True) -> None:
        """Print a case, add its row to the result file, and remember whether it held."""
        print(f"[{case}] {result.text()} {counts if counts else ''}", flush=True)
        clean = not result.failures and not counts.get("mismatches", 0) and not counts.get("errors", 0)
        self.ok &= clean and (result.identical == result.prompts or not must_agree)
        if self.args.tp > 1:
            case = f"tp {self.args.tp}: {case}"
        if self.args.kv_dtype != "bfloat16":
            case = f"{self.args.kv_dtype}: {case}"
        row = {"case": case, "prompts": result.prompts, "identical": result.identical}
        self.add_rows([row | {key: counts.get(key, 0) for key in FIDELITY_KEYS[3:]}])

    def add_rows(self, rows: list[dict[str, object]], **head: object) -> None:
        """Write rows and head entries to the result file."""
        head = {"commit": self.args.commit, "versions": versions(self.paths.site)} | head
        update(self.args.out / "fidelity_h200.json", self.args.base, rows, FIDELITY_KEYS, FIDELITY_IDENTITY, head)

    def demand(self, holds: bool, what: str) -> None:
        """Print and remember a condition that is not a comparison of tokens."""
        print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)
        self.ok &= holds

    @contextmanager
    def server(self, phase: str) -> Iterator[Server]:
        """The phase's server; its log must be free of failures at the end."""
        with self._one(phase) as server:
            send(server.url, [self.prompts[0][:3000]], 4, 1, self.args.request_timeout)  # compiles what is still to be
            server.flush()
            self.counts = settled_counters(server)
            if server.spec.plugin:
                self.demand(bool(self.counts), f"{phase} runs the plugin and writes its counters")
            yield server
            if server.spec.plugin and self.args.tp > 1:
                found = disagreements(server)
                self.demand(not found, f"the {self.args.tp} ranks of {phase} have decided alike {found[:3]}")
            errors = server.errors()
        self.demand(not errors, f"log of {phase} without failures {errors[:2]}")

    def _one(self, phase: str) -> Any:
        """A context with the phase's server: started for it, or with those of all phases."""
        if not self.args.together:
            spec = spec_of(phase, self.args)
            return running(spec, self.paths, self.limits, self.args.port, self.args.start_timeout)
        if phase not in self.started:
            raise ServerError(f"server {phase} did not start")
        return nullcontext(self.started[phase])

    @contextmanager
    def counted(self, server: Server) -> Iterator[dict[str, int]]:
        """A dict that holds, after the block, what the counters gained since the last such block."""
        gained: dict[str, int] = {}
        yield gained
        if server.spec.plugin:
            before, self.counts = self.counts, settled_counters(server)
            gained.update(growth(before, self.counts))


def run_plain(run: Run) -> None:
    """Expected tokens, how varied they are, and what batching alone changes in SGLang."""
    with run.server("plain") as server:
        single = run.single(server, run.num_single)
        server.flush()
        batch = run.batch(server)
        run.plain.tails = [reply.tokens for reply in run.tails(server)]
    run.plain.single = [reply.tokens for reply in single]
    run.plain.batch = [reply.tokens for reply in batch]
    run.plain.save(run.args.out / "plain_outputs.json")
    distinct = sorted(len(set(reply.tokens)) for reply in single)
    enough = sum(count >= min(64, run.args.output) for count in distinct)
    run.demand(2 * enough > len(distinct), f"{enough} of {len(distinct)} texts hold 64 distinct tokens; {distinct}")
    run.record(
        "plain, all at once against one at a time", compare(run.plain.single, batch[: run.num_single]), {}, False
    )
    name = "checkpoint" if run.args.tp == 1 else f"checkpoint_tp{run.args.tp}"
    run.add_rows([], **{name: {"prompts": len(distinct), "texts_with_64_distinct_tokens": enough}})


def _against_plain(run: Run, server: Server, case: str, batches: int, singles: int) -> None:
    """One at a time (when singles > 0), then all at once `batches` times, each compared and counted."""
    if singles:
        with run.counted(server) as counts:
            replies = run.single(server, singles)
        run.record(f"{case}, one at a time", compare(run.plain.single[:singles], replies), counts)
        server.flush()
    for number in range(batches):
        with run.counted(server) as counts:
            replies = run.batch(server)
        again = ", again over its cached prefixes" if number else ""
        expected = run.plain.single + run.plain.batch[run.num_single :]
        run.record(f"{case}, {len(replies)} at once{again}", compare(expected, replies), counts)
        print(f"  against plain at once: {compare(run.plain.batch, replies).text()}", flush=True)


def run_ours(run: Run) -> None:
    """Hybrid residency with the prefix cache: the base case, with a flush asked for while requests run."""
    with run.server("ours") as server:
        _against_plain(run, server, "hybrid", 0, run.num_single)
        answers: list[bool] = []
        timer = threading.Timer(run.args.flush_after, lambda: answers.append(server.flush(patience_s=0)))
        timer.start()
        _against_plain(run, server, "hybrid, flush asked for mid-run", 1, 0)
        timer.join()
        print(f"  flush while running was {'granted' if answers[0] else 'refused'}", flush=True)
        with run.counted(server) as counts:
            replies = run.tails(server)
        run.record("hybrid, prompts of whole pages and one token, twice", compare(run.plain.tails, replies), counts)
        run.demand(server.flush(), "flush granted when idle")
        _against_plain(run, server, "hybrid after a flush", 0, min(8, run.num_single))


def run_host(run: Run) -> None:
    """Every sealed page lives on the host only: decode reads old rows through the hot buffer."""
    with run.server("host") as server:
        _against_plain(run, server, "always_host", 1, run.num_single)


def run_pressure(run: Run) -> None:
    """Spills forced by watermarks, then the same prompts again over prefixes that lie on the host."""
    with run.server("pressure") as server:
        _against_plain(run, server, "forced spills", 2, 0)


def run_elastic(run: Run) -> None:
    """Memory moves from KV to index-K as the prompts fill the cache, under captured graphs and host copies."""
    with run.server("elastic") as server:
        _against_plain(run, server, "elastic border", 2, 0)
        steps = settled_counters(server)["border_steps"]
        run.demand(steps > 0, f"the border has moved {steps} steps; lower --pool-tokens if it has not")
        run.demand(server.flush(), "flush granted when idle")
        time.sleep(REST_S)
        steps = settled_counters(server)["border_steps"]
        run.demand(steps == 0, f"the border is at its first place after {REST_S} s of rest with an empty cache, not {steps} steps on")
        _against_plain(run, server, "elastic border, from its first place again", 1, 0)
        steps = settled_counters(server)["border_steps"]
        run.demand(steps > 0, f"the border has moved {steps} steps again")


def run_noradix(run: Run) -> None:
    """Without the prefix cache."""
    with run.server("noradix") as server:
        _against_plain(run, server, "no prefix cache", 1, 0)


def run_fault(run: Run) -> None:
    """The test of the test: wrong rows must show in the text."""
    count = min(16, run.num_single)
    with run.server("fault") as server, run.counted(server) as counts:
        replies = run.single(server, count)
    result = compare(run.plain.single[:count], replies)
    run.record("fault: 1 % of rows zeroed, one at a time", result, counts, must_agree=False)
    changed = result.prompts - result.identical
    run.demand(2 * changed > result.prompts, f"zeroing 1 % of rows changes {changed} of {result.prompts} texts")


REST_S = 8.0  # of 2,000 idle iterations of the scheduler and more
# Phase, function, seconds it needs with warm kernel caches, of which START_S go by until its server is ready.
START_S = 90
PHASES: dict[str, tuple[Callable[[Run], None], int]] = {
    "plain": (run_plain, 180),
    "ours": (run_ours, 210),
    "host": (run_host, 210),
    "pressure": (run_pressure, 170),
    "elastic": (run_elastic, 230),
    "noradix": (run_noradix, 130),
    "fault": (run_fault, 120),
}


def spec_of(phase: str, args: argparse.Namespace) -> ServerSpec:
    """The phase's server, with the ratio that was asked for."""
    spec = SPECS[phase]
    if args.ratio is None or not spec.hisparse:
        return spec
    return dataclasses.replace(spec, config={**spec.config, "host_to_device_ratio": args.ratio})


@contextmanager
def started(run: Run, phases: Sequence[str]) -> Iterator[None]:
    """With --together, the servers of all phases, for as long as the block runs."""
    if not run.args.together:
        yield
        return
    limits = dataclasses.replace(run.limits, mem_fraction=FLEET_MEM_FRACTION)
    members = {phase: Member(spec_of(phase, run.args), limits) for phase in phases}
    with fleet(members, run.paths, run.args.port, run.args.start_timeout) as servers:
        run.started = servers
        yield


def run_phases(run: Run, phases: Sequence[str], budget_s: float) -> list[str]:
    """Run phases in order while time is left; return those left out. A phase that fails does not stop the next."""
    start, left_out = time.monotonic(), []
    for phase in phases:
        function, needs_s = PHASES[phase]
        needs_s -= START_S if run.args.together else 0
        left_s = budget_s - (time.monotonic() - start)
        if left_s < needs_s:
            print(f"phase {phase} left out: needs about {needs_s} s, {left_s:.0f} s are left", flush=True)
            left_out.append(phase)
            continue
        began = time.monotonic()
        try:
            function(run)
        except (ServerError, ValueError) as error:
            run.demand(False, f"phase {phase}: {error}")
            if phase == "plain":
                break
        print(f"phase {phase} took {time.monotonic() - began:.0f} s", flush=True)
    return left_out


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line; --help lists the phases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="checkpoint folder of make_tiny_dsa.py")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for results and plain_outputs.json")
    parser.add_argument(
        "--logs", type=pathlib.Path, default=pathlib.Path("/tmp/sglang-logs"), help="server logs, counters"
    )
    parser.add_argument("--phases", default=",".join(PHASES), help="comma-separated, run in the order given")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for the whole call")
    parser.add_argument("--plain", type=pathlib.Path, help="plain_outputs.json of an earlier call")
    parser.add_argument("--base", type=pathlib.Path, default=pathlib.Path("scripts/results/fidelity_h200.json"),
                        help="result file whose rows are carried over")  # fmt: skip
    parser.add_argument("--commit", default=current_commit(), help="default: HEAD of this repository")
    parser.add_argument("--prompts", type=int, default=32, help="prompts that are sent one at a time")
    parser.add_argument("--at-once", type=int, default=48, help="prompts of a batch; the first ones are the same")
    parser.add_argument("--shortest", type=int, default=4096, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=32768 - 512, help="tokens of the longest prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens to generate")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--pool-tokens", type=int, default=200_000)
    parser.add_argument("--ratio", type=float, help="host_to_device_ratio (default: 8); each rank pins a host tier")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of every server")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=["bfloat16", "fp8_e4m3"], help="of every server")
    parser.add_argument("--together", action="store_true", help="start the servers of all phases at once")
    parser.add_argument("--flush-after", type=float, default=3.0, help="seconds into the batch of phase `ours`")
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--request-timeout", type=float, default=180.0)
    parser.add_argument("--port", type=int, default=30000)
    add_place_arguments(parser)
    args = parser.parse_args(argv)
    unknown = [phase for phase in args.phases.split(",") if phase not in PHASES]
    if unknown:
        parser.error(f"unknown phases {unknown}; known: {', '.join(PHASES)}")
    if args.tp < 1:
        parser.error("--tp must be at least 1")
    if not 0 < args.prompts <= args.at_once:
        parser.error("--at-once must be at least --prompts")
    if not args.commit:
        parser.error("--commit is needed outside a repository")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all held, 1 something did not, 2 no expected tokens, 3 phases were left out for lack of time."""
    args = parse_arguments(argv)
    phases = args.phases.split(",")
    lengths = spread_lengths(args.at_once, args.shortest, args.longest)
    key = {"seed": args.seed, "lengths": lengths, "output": args.output, "prompts": args.prompts, "tails": list(TAILS)}
    if args.tp > 1:
        key["tp"] = args.tp  # the sum over ranks rounds otherwise than one rank does
    if args.kv_dtype != "bfloat16":
        key["kv_dtype"] = args.kv_dtype
    plain = PlainOutputs(key)
    if "plain" not in phases:
        try:
            plain = PlainOutputs.load(args.plain or args.out / "plain_outputs.json", key)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    paths = Paths(args.model, args.logs, args.site, args.plugin, args.cache)
    limits = Limits(pool_tokens=args.pool_tokens, kv_dtype=args.kv_dtype, tp=args.tp)
    run = Run(args, paths, limits, random_prompts(args.seed, lengths), plain)
    begin = time.monotonic()
    try:
        with started(run, phases):
            left_out = run_phases(run, phases, args.budget - (time.monotonic() - begin))
    except ServerError as error:
        print(f"NOT ALL HELD; {error}", flush=True)
        return 1
    print(f"{'all held' if run.ok else 'NOT ALL HELD'}; left out: {', '.join(left_out) or 'nothing'}", flush=True)
    return 1 if not run.ok else 3 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
