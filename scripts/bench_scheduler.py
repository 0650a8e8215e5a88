#!/usr/bin/env python3
"""The scheduler's thread in a decode step: SGLang's own scheduler, plain and with this package, without a GPU.

Drives the harness of tests/harness: real Scheduler, pools, allocator, radix tree, coordinator; the model's forward and the attention
backend cost next to nothing, so an iteration is what the CPU has to do for it but for calls of the CUDA driver. Left out for all alike: the
harness's judgement of rows and SGLang's leak check after each step. Not in it, since a CPU pool has none: the admission gate, whose look comes
every 32 decode steps, events of copies, and the counter samples' launches. Requests begin their pages in different steps, evenly spread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from child_process import measure_apart
from serving.results import current_commit, versions, write_json

CONFIG = {"top_k": 128, "device_buffer_size": 256, "host_to_device_ratio": 4}
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ours": CONFIG,
    "ours_elastic": CONFIG | {"elastic_border": True},
}
PROMPT_TOKENS, WARM_UP = 500, 160


def measure(system: str, num_requests: int, iterations: int) -> dict[str, float]:
    """Microseconds of an iteration in which `num_requests` requests decode, and nothing else happens: median and mean; the share of
    decode steps in which the package looked at nothing (0 for plain)."""
    import numpy as np
    import torch
    from harness.engine import make_scheduler
    from harness.hisparse import PAGE, small_chunks
    from sglang.srt.environ import envs
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    pages = num_requests * (PROMPT_TOKENS + PAGE + WARM_UP + iterations) // PAGE * 2 + 64
    sizes = {"device_tokens": PAGE * pages, "max_running_requests": 64, "num_layers": 8, "index_topk_freq": 8}
    chunks = small_chunks if system == "ours_elastic" else contextlib.nullcontext
    with chunks(), make_scheduler(SYSTEMS[system], overlap=True, context_length=32768, **sizes) as engine:
        logits = torch.zeros(num_requests, engine.config.vocab_size)
        logits[:, 7] = 1.0
        answer = LogitsProcessorOutput(next_token_logits=logits)
        engine._check_device_tables = engine._follow_refusals = lambda *args: None
        engine._device_tables = dict
        engine.model.check_launched_reads = lambda: None
        rng = np.random.default_rng(0)
        for number in range(num_requests):
            length = PROMPT_TOKENS + PAGE * number // num_requests
            engine.submit(rng.integers(10, 1000, length).tolist(), WARM_UP + 2 * iterations)
        with envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.override(0):
            engine.run_until(lambda: engine.num_running() == num_requests)
            engine.model.forward = lambda *args: answer
            seconds, quiet = [], 0
            for _ in range(WARM_UP + iterations):
                began = time.perf_counter()
                engine._one_iteration()
                seconds.append(time.perf_counter() - began)
                quiet += engine.coordinator is not None and engine.coordinator.decode_steps.is_quiet
            if engine.num_running() != num_requests:
                raise RuntimeError(f"{engine.num_running()} of {num_requests} requests still decode")
        timed = seconds[WARM_UP:]
        return {
            "median_us": 1e6 * statistics.median(timed),
            "mean_us": 1e6 * statistics.fmean(timed),
            "quiet_share": quiet / len(seconds),
        }


def table(rows: list[dict[str, Any]]) -> Any:
    """Medians and means, and what they are of plain's."""
    from rich.table import Table

    systems = [system for system in SYSTEMS if any(row["system"] == system for row in rows)]
    shown = Table("requests", "", *systems, title="microseconds of an iteration of the scheduler, a decode step each")
    for count in dict.fromkeys(row["requests"] for row in rows):
        of = {row["system"]: row for row in rows if row["requests"] == count}
        for kind in ("median_us", "mean_us"):
            plain = of.get("plain", {}).get(kind)
            cells = [f"{of[name][kind]:.0f}" + (f" ({of[name][kind] / plain:.2f})" if plain else "") for name in systems]
            shown.add_row(str(count), kind[:-3], *cells)
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="requests that decode at once")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, one system after the other; the least counts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    from rich.console import Console

    measured: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for count in args.requests:
            for system in args.systems:
                measured.setdefault((count, system), []).append(measure_apart("bench_scheduler", system, count, args.iterations))
    rows = [
        {"requests": count, "system": system}
        | {kind: round(min(run[kind] for run in runs), 1) for kind in ("median_us", "mean_us")}
        | {"quiet_share": round(runs[0]["quiet_share"], 3), "runs_median_us": [round(run["median_us"], 1) for run in runs]}
        for (count, system), runs in measured.items()
    ]
    Console().print(table(rows))
    if args.json:
        import sglang

        command = f"python3 scripts/bench_scheduler.py {shlex.join(argv or sys.argv[1:])}"
        head = {"commit": current_commit(), "command": command, "cpus": os.cpu_count(), "iterations": args.iterations}
        write_json(args.json, head | {"versions": versions(str(Path(sglang.__path__[0]).parent)), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
