"""Check and time the kernels on one GPU: build, fuzz against the oracle, graph replay, page copies, sanitizer, timings.

    python3 scripts/gpu_kernel_check.py                 # everything, about four minutes
    python3 scripts/gpu_kernel_check.py --fuzz 10000    # the long fuzz
    python3 scripts/gpu_kernel_check.py --sanitize-case # what runs under compute-sanitizer

Needs torch with CUDA, apache-tvm-ffi and nvcc. Prints a summary last; writes kernel_check.json into $OUT if that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import bench_resolver
import kernel_checks as checks
import resolver_workload

SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck")


def run_check(name: str, check: Callable[[], object], results: dict[str, object]) -> bool:
    began = time.time()
    try:
        detail = check()
        results[name] = {"ok": True, "seconds": round(time.time() - began, 1), "detail": detail}
    except Exception as error:  # noqa: BLE001 - every check runs, whatever fails
        traceback.print_exc()
        results[name] = {
            "ok": False,
            "seconds": round(time.time() - began, 1),
            "detail": f"{type(error).__name__}: {error}"[:600],
        }
    shown = results[name]["detail"] if name != "timings" else "below"
    print(f"{'ok  ' if results[name]['ok'] else 'FAIL'} {name}: {shown} ({results[name]['seconds']} s)", flush=True)
    return bool(results[name]["ok"])


def sanitize() -> dict[str, str]:
    """compute-sanitizer's tools on a small fuzz; each must report no error."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return {"skipped": "compute-sanitizer not found"}
    outcome = {}
    for tool in SANITIZER_TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=hisparse"]
        command += [sys.executable, __file__, "--sanitize-case"]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
        except subprocess.TimeoutExpired:
            outcome[tool] = "timed out"
            continue
        summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
        outcome[tool] = summary[-1].strip("= ") if summary else (done.stdout + done.stderr)[-300:]
        if done.returncode:
            print(done.stdout[:4000])
            raise AssertionError(f"{tool}: {outcome[tool]}")
    return outcome


COLUMNS = ("row_bytes", "batch", "misses", "ours", "best", "no_copy", "gather", "resident", "wrong", "variant")
POINTS = [(1, 0), (1, 102), (1, 307), (1, 614), (8, 102), (8, 614), (32, 0), (32, 102), (64, 102), (64, 614)]


def timings(row_sizes: list[int]) -> list[dict[str, object]]:
    """The table of points, our variants beside it, and the all-resident batch; microseconds."""
    rows = []
    for row_bytes in row_sizes:
        for batch, misses in POINTS:
            case = resolver_workload.Case(row_bytes, 2048, 4096, batch, misses)
            tried = bench_resolver.variants(case)
            fetching = [row for row in tried if not str(row["variant"]).startswith("none")]
            right = [row for row in fetching if row["correct"]]
            work = resolver_workload.Workload(case)
            automatic, automatic_right = resolver_workload.time_ours(work)
            row: dict[str, object] = {"row_bytes": row_bytes, "batch": batch, "misses": misses}
            row["ours"] = round(automatic, 1) if automatic_right else "WRONG"
            row["best"] = min((row["us"] for row in right), default=None)
            row["variant"] = next((row["variant"] for row in right if row["us"] == min(r["us"] for r in right)), None)
            row["no_copy"] = min(row["us"] for row in tried if str(row["variant"]).startswith("none"))
            row["gather"] = round(work.gather_us(), 1)
            if misses == 0:
                resident = [resolver_workload.time_resident(work, overlap) for overlap in (False, True)]
                row["resident"] = "/".join(f"{took:.1f}" if ok else "WRONG" for took, ok in resident)
            row["wrong"] = len(fetching) - len(right)
            row["all"] = {str(each["variant"]): each["us"] for each in tried}
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuzz", type=int, default=300, help="random steps to check against the oracle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitize-case", action="store_true", help="only a tiny fuzz, to be run under a tool")
    parser.add_argument("--no-sanitizer", action="store_true")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[1152, 656])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device is visible", file=sys.stderr)
        return 2
    if arguments.sanitize_case:
        checks.tiny("cuda")
        return 0
    results: dict[str, object] = {}
    if run_check("build", checks.build, results):
        for name, check in checks.all_checks("cuda", arguments.fuzz, arguments.seed).items():
            run_check(name, check, results)
        if not arguments.no_sanitizer:
            run_check("sanitizer", sanitize, results)
        if not arguments.no_timing:
            run_check("timings", lambda: timings(arguments.row_bytes), results)
    print("\n--- summary ---")
    for name, result in results.items():
        if name == "timings" and result["ok"]:
            bench_resolver.print_table([{key: row.get(key) for key in COLUMNS} for row in result["detail"]])
        else:
            print(f"{'ok  ' if result['ok'] else 'FAIL'} {name}: {result['detail']}")
    if out := os.environ.get("OUT"):
        Path(out, "kernel_check.json").write_text(
            json.dumps({**bench_resolver.environment(), "results": results}, indent=1) + "\n"
        )
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
