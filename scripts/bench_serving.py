#!/usr/bin/env python3
"""Measure plain SGLang, SGLang's own HiSparse and sglang-hisparse side by side, on one GPU.

Starts each system once, sends the same random-token prompts at every concurrency, and adds rows to serving_h200.json:
output tok/s, tok/s of decode alone (after a wave's last first token), TTFT and ITL. All systems get the same device
pool. A prompt is never sent twice to a server, so that no prefix is cached.
"""

import argparse
import pathlib
import shlex
import sys
import time
from dataclasses import dataclass

from serving.client import Reply, Timing, random_prompts, send, summarise
from serving.fidelity import growth, settled_counters
from serving.results import SERVING_IDENTITY, SERVING_KEYS, current_commit, update, versions
from serving.server import Limits, Paths, Server, ServerError, ServerSpec, running

# SGLang's own HiSparse refuses to run with the prefix cache.
SYSTEMS = {
    "plain": ServerSpec("bench-plain"),
    "builtin": ServerSpec("bench-builtin", hisparse=True, radix=False),
    "ours": ServerSpec("bench-ours", hisparse=True, plugin=True),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of `context` prompt and `output` tokens, `concurrency` at a time, in `waves` waves of that size."""

    concurrency: int
    waves: int
    context: int
    output: int


def loads(args: argparse.Namespace) -> list[Load]:
    """The loads of one run, smallest concurrency first; a single stream is repeated to average over prompts."""
    return [
        Load(concurrency, 4 if concurrency == 1 else 1, args.context, args.output)
        for concurrency in sorted(args.concurrency)
    ]


def measure(server: Server, load: Load, seed: int, timeout_s: float) -> tuple[Timing, dict[str, int]]:
    """Send one load; return its figures and what the plugin's counters gained. Raises ValueError on a failure."""
    prompts = random_prompts(seed * 1000 + load.concurrency, [load.context] * (load.concurrency * load.waves))
    before = settled_counters(server)
    waves: list[list[Reply]] = []
    for first in range(0, len(prompts), load.concurrency):
        wave = prompts[first : first + load.concurrency]
        waves.append(send(server.url, wave, load.output, load.concurrency, timeout_s))
    return summarise(waves), growth(before, settled_counters(server))


def result_row(
    args: argparse.Namespace, system: str, load: Load, timing: Timing, counts: dict[str, int]
) -> dict[str, object]:
    """One row of the result file."""
    return {
        "model": args.model_name,
        "dtype": args.kv_dtype,
        "context": load.context,
        "output": load.output,
        "concurrency": load.concurrency,
        "pool_tokens": args.pool_tokens,
        "system": system,
        "output_tok_s": round(timing.output_tok_s, 1),
        "decode_tok_s": round(timing.decode_tok_s, 1),
        "ttft_s": round(timing.ttft_s, 3),
        "itl_ms": round(timing.itl_ms, 3),
        "pages_spilled": counts["pages_spilled"],
        "rows_fetched": counts["rows_fetched"],
    }


def run_system(args: argparse.Namespace, system: str, paths: Paths, limits: Limits) -> None:
    """Start one system and measure every load; rows are written as they come. Raises ServerError, ValueError."""
    head = {"commit": args.commit, "versions": versions(args.site), "command": args.command}
    with running(SYSTEMS[system], paths, limits, args.port, args.start_timeout) as server:
        # The longest prefill chunk and every batch size compile or warm up before the clock runs.
        send(server.url, random_prompts(-1, [args.context] * 2), 16, 2, args.request_timeout)
        server.flush()
        for load in loads(args):
            timing, counts = measure(server, load, args.seed, args.request_timeout)
            server.check_alive()
            row = result_row(args, system, load, timing, counts)
            update(args.out / "serving_h200.json", args.base, [row], SERVING_KEYS, SERVING_IDENTITY, head)
            print(f"[{system}] {load.concurrency} at once: {timing.output_tok_s:.1f} output tok/s, "
                  f"{timing.decode_tok_s:.1f} decode tok/s, TTFT {timing.ttft_s:.2f} s, ITL {timing.itl_ms:.2f} ms, "
                  f"{counts}", flush=True)  # fmt: skip
            server.flush()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="checkpoint folder of make_tiny_dsa.py")
    parser.add_argument("--model-name", default="tiny-dsa-8l", help="name in the result rows")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for serving_h200.json")
    parser.add_argument(
        "--logs", type=pathlib.Path, default=pathlib.Path("/tmp/sglang-logs"), help="server logs, counters"
    )
    parser.add_argument("--base", type=pathlib.Path, default=pathlib.Path("scripts/results/serving_h200.json"),
                        help="result file whose rows are carried over")  # fmt: skip
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated, run in the order given")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 48])
    parser.add_argument("--context", type=int, default=16_000, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens to generate")
    parser.add_argument("--pool-tokens", type=int, default=200_000)
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--commit", default=current_commit(), help="default: HEAD of this repository")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument(
        "--budget", type=float, default=570.0, help="seconds; a system is not started with under 130 left"
    )
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--request-timeout", type=float, default=150.0)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--site", default="/opt/site", help="folder with SGLang")
    parser.add_argument("--plugin", default="/opt/plugin", help="folder with sglang-hisparse installed")
    parser.add_argument("--cache", default="/opt/cache", help="folder of compiled kernels")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python3", "scripts/bench_serving.py", *(sys.argv[1:] if argv is None else argv)])
    unknown = [system for system in args.systems.split(",") if system not in SYSTEMS]
    if unknown:
        parser.error(f"unknown systems {unknown}; known: {', '.join(SYSTEMS)}")
    if not args.commit:
        parser.error("--commit is needed outside a repository")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 when a system failed or was left out."""
    args = parse_arguments(argv)
    paths = Paths(args.model, args.logs, args.site, args.plugin, args.cache)
    limits = Limits(pool_tokens=args.pool_tokens, kv_dtype=args.kv_dtype)
    start, failed = time.monotonic(), []
    for system in args.systems.split(","):
        if args.budget - (time.monotonic() - start) < 130:
            print(f"[{system}] left out: too little of the budget is left", flush=True)
            failed.append(system)
            continue
        try:
            run_system(args, system, paths, limits)
        except (ServerError, ValueError) as error:
            print(f"[{system}] FAILED: {error}", flush=True)
            failed.append(system)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
