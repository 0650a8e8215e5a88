#!/usr/bin/env python3
"""Prompts longer than the device pool, and next turns over prefixes that lie on the host, against plain SGLang, on one GPU.

It starts two servers side by side: plain SGLang with a pool that holds every prompt, and ours with a pool that does not. Plain
answers every prompt --plain-runs times: where it does not agree with itself (ties among index scores are broken by chance, and
there are more of them the longer the prompt), nothing can be said of ours; tokens of all other prompts must be identical. What
streaming costs is set beside the link's floor. Writes streaming_h200.json into --out.

  long       one prompt of --long tokens by itself, three times the pool
  together   the same and two more of that length with short ones, all at once
  short      next turns of histories that no longer fit the device together: few new tokens over a prefix on the host
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from serving.client import Reply, random_prompts, send
from serving.fidelity import compare, settled_counters
from serving.fleet import FLEET_MEM_FRACTION, Member, fleet
from serving.results import current_commit, versions, write_json
from serving.server import Limits, Paths, Server, ServerError, ServerSpec, add_place_arguments

LINK_GBPS = 50.0  # what a large copy reaches on the links that the figures are meant for


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. Times in ms are means over the streamed extends of the case; the floor is their host bytes over the link."""

    case: str
    prompts: int
    identical: int
    plain_with_itself: int
    differing_where_plain_agrees: int
    ttft_s: float
    plain_ttft_s: float
    cached_tokens: int
    streamed_extends: int
    streamed_windows: int
    streamed_unions: int
    host_gb: float
    floor_ms: float
    link_ms: float
    forward_ms: float
    pages_promoted: int
    pages_spilled: int
    errors: int
    mismatches: int


class Comparison:
    """Both servers, and the cases so far."""

    def __init__(self, servers: dict[str, Server], args: argparse.Namespace) -> None:
        self.plain, self.ours = servers["plain"], servers["ours"]
        self.args = args
        self.cases: list[Case] = []
        self.ok = True
        self._counts: dict[str, int] = {}

    def warm(self) -> None:
        """Kernels that are still to be compiled; then both caches are empty."""
        for server in (self.plain, self.ours):
            send(server.url, random_prompts("warm", [3000]), 4, 1, self.args.request_timeout)
            server.flush()
        self._counts = settled_counters(self.ours)

    def run(self, case: str, prompts: Sequence[list[int]], concurrency: int) -> list[Reply]:
        """Plain one at a time, several times over, ours `concurrency` at a time; returns ours."""
        args = self.args
        expected = send(self.plain.url, prompts, args.output, 1, args.request_timeout)
        agrees = [True] * len(prompts)
        for _ in range(args.plain_runs - 1):
            self.plain.flush()
            again = compare([reply.tokens for reply in expected], send(self.plain.url, prompts, args.output, 1, args.request_timeout))
            agrees = [held and place is None for held, place in zip(agrees, again.first_difference, strict=True)]
        replies = send(self.ours.url, prompts, args.output, concurrency, args.request_timeout)
        for server in (self.plain, self.ours):
            server.check_alive()
        before, self._counts = self._counts, settled_counters(self.ours)
        gained = {name: count - before.get(name, 0) for name, count in self._counts.items()}
        result = compare([reply.tokens for reply in expected], replies)
        wrong = sum(held and place is not None for held, place in zip(agrees, result.first_difference, strict=True))
        answered = [reply for reply in replies if reply.arrivals]
        extends = max(gained.get("streamed_extends", 0), 1)
        host_gb = gained.get("streamed_host_bytes", 0) / 1e9
        done = Case(
            case=case,
            prompts=result.prompts,
            identical=result.identical,
            plain_with_itself=sum(agrees),
            differing_where_plain_agrees=wrong,
            ttft_s=round(sum(reply.ttft_s for reply in answered) / max(len(answered), 1), 4),
            plain_ttft_s=round(sum(r.ttft_s for r in expected if r.arrivals) / len(expected), 4),
            cached_tokens=sum(reply.cached_tokens for reply in replies),
            streamed_extends=gained.get("streamed_extends", 0),
            streamed_windows=gained.get("streamed_windows", 0),
            streamed_unions=gained.get("streamed_unions", 0),
            host_gb=round(host_gb, 3),
            floor_ms=round(1e3 * host_gb / LINK_GBPS / extends, 3),
            link_ms=round(gained.get("streamed_link_us", 0) / 1e3 / extends, 3),
            forward_ms=round(gained.get("streamed_forward_us", 0) / 1e3 / extends, 3),
            pages_promoted=gained.get("pages_promoted", 0),
            pages_spilled=gained.get("pages_spilled", 0),
            errors=gained.get("errors", 0),
            mismatches=gained.get("mismatches", 0),
        )
        self.cases.append(done)
        print(f"[{case}] {result.text()}; {asdict(done)}", flush=True)
        self.demand(not wrong and not result.failures, f"{case}: tokens as plain's, where plain agrees with itself ({sum(agrees)})")
        self.demand(not done.errors and not done.mismatches, f"{case}: no row refused or wrong")
        return replies

    def demand(self, holds: bool, what: str) -> None:
        """Print and remember a condition."""
        print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)
        self.ok &= holds


def run_cases(comparison: Comparison, args: argparse.Namespace) -> None:
    """Those that were asked for, in the order of the module's text; caches are empty before each."""
    comparison.warm()
    for name, case in CASES.items():
        if name in args.cases:
            case(comparison, args)
            for server in (comparison.plain, comparison.ours):
                server.flush()


def run_long(comparison: Comparison, args: argparse.Namespace) -> None:
    """A prompt of three pools, and its next turn."""
    long = random_prompts("long", [args.long])
    replies = comparison.run("long", long, 1)
    streamed = comparison.cases[-1].streamed_extends
    comparison.demand(streamed > 0, f"{streamed} extends were streamed")
    turn = [[*long[0], *replies[0].tokens, *random_prompts("turn", [args.turn])[0]]]
    comparison.run("long, its next turn", turn, 1)
    comparison.demand(comparison.cases[-1].cached_tokens >= args.long // 64 * 64, "its history was found")


def run_together(comparison: Comparison, args: argparse.Namespace) -> None:
    """Three prompts of three pools and short ones, all at once."""
    more = random_prompts("more", [args.long, 2000, args.long - 777, 3000, 4000, 2500])
    comparison.run("together", [*random_prompts("long", [args.long]), *more], 7)


def run_short(comparison: Comparison, args: argparse.Namespace) -> None:
    """Next turns, one at a time and all at once."""
    histories = random_prompts("history", [args.history + 100 * number for number in range(args.histories)])
    replies = comparison.run("histories", histories, 1)
    tails = random_prompts("tails", [args.turn] * len(histories))
    turns = [[*h, *reply.tokens, *t] for h, reply, t in zip(histories, replies, tails, strict=True)]
    for at_once in (1, len(turns)):
        comparison.run(f"short, {at_once} at once", turns, at_once)
        turns = [[*turn[: -args.turn], *tail] for turn, tail in zip(turns, random_prompts("other tails", [args.turn] * len(turns)), strict=True)]  # fmt: skip


CASES = {"long": run_long, "together": run_together, "short": run_short}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="checkpoint folder of make_tiny_dsa.py")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the result")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp/sglang-logs"))
    parser.add_argument("--pool-tokens", type=int, default=40_000, help="device pool of ours")
    parser.add_argument("--plain-tokens", type=int, default=200_000, help="pool of plain, which holds each prompt")
    parser.add_argument("--plain-runs", type=int, default=3, help="times that plain answers each prompt")
    parser.add_argument("--long", type=int, default=120_000)
    parser.add_argument("--history", type=int, default=15_000)
    parser.add_argument("--histories", type=int, default=6)
    parser.add_argument("--turn", type=int, default=500, help="new tokens of a next turn")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help="comma-separated")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=["bfloat16", "fp8_e4m3"], help="of both servers")
    parser.add_argument("--config", type=json.loads, default={}, help="further keys of the config of ours, as JSON")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--request-timeout", type=float, default=200.0)
    add_place_arguments(parser)
    parser.add_argument("--commit", default=current_commit())
    args = parser.parse_args(argv)
    if unknown := [case for case in args.cases if case not in CASES]:
        parser.error(f"unknown cases {unknown}; known: {', '.join(CASES)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """0 when everything held, 1 when not."""
    args = parse_arguments(argv)
    paths = Paths(args.model, args.logs, args.site, args.plugin, args.cache)
    config = {"prefill_scratch_tokens": -(-(args.long + 2048) // 64) * 64} | args.config
    ours = ServerSpec("ours", hisparse=True, plugin=True, config=config, env={"SGLANG_HISPARSE_AUDIT": "1"})
    shape = {"kv_dtype": args.kv_dtype, "mem_fraction": FLEET_MEM_FRACTION}
    members = {
        "plain": Member(ServerSpec("plain"), Limits(pool_tokens=args.plain_tokens, **shape)),
        "ours": Member(ours, Limits(pool_tokens=args.pool_tokens, **shape)),
    }
    try:
        with fleet(members, paths, args.port, args.start_timeout, complete=True) as servers:
            comparison = Comparison(servers, args)
            run_cases(comparison, args)
            errors = comparison.ours.errors()
            comparison.demand(not errors, f"log of ours without failures {errors[:2]}")
    except ServerError as error:
        print(f"NOT ALL HELD; {error}", flush=True)
        return 1
    document = {
        "commit": args.commit,
        "versions": versions(args.site),
        "pool_tokens": args.pool_tokens,
        "turn_tokens": args.turn,
        "config": args.config,
        "kv_dtype": args.kv_dtype,
        "link_gbps_of_the_floor": LINK_GBPS,
        "rows": [asdict(case) for case in comparison.cases],
    }
    write_json(args.out / "streaming_h200.json", document)
    print("all held" if comparison.ok else "NOT ALL HELD", flush=True)
    return 0 if comparison.ok else 1


if __name__ == "__main__":
    sys.exit(main())
