"""Read hardware counters of one resolve at a few points with Nsight Compute: occupancy, bytes over the link, L2 hits.

    python3 scripts/ncu_resolver.py --json ncu_h200.json        # about 40 seconds; needs ncu and the right to read counters
    python3 scripts/ncu_resolver.py --run                       # what runs under ncu

Where the counters cannot be read, ncu's own words are kept in the result and the exit status is 3; the bytes that must travel and the
time of a replay (bench_resolver.py) are then all that is known.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_resolver import environment
from resolver_workload import Case, Ours, Workload

# Batch, misses per request, all pages resident.
POINTS = ((1, 307, False), (32, 102, False), (64, 614, False), (32, 0, True))
WARM_STEPS = 3
METRICS = {
    "gpu__time_duration.sum": "duration_ns",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "achieved_occupancy_pct",
    "sm__maximum_warps_per_active_cycle_pct": "theoretical_occupancy_pct",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "blocks",
    "launch__shared_mem_per_block_dynamic": "dynamic_shared_bytes",
    "lts__t_sectors_aperture_sysmem_op_read.sum": "sysmem_read_sectors",
    "lts__t_sectors_op_read.sum": "l2_read_sectors",
    "lts__t_sector_hit_rate.pct": "l2_hit_pct",
    "pcie__read_bytes.sum": "pcie_read_bytes",
    "dram__bytes_write.sum": "dram_write_bytes",
    "dram__bytes_read.sum": "dram_read_bytes",
}


def run_points(row_bytes: int) -> None:
    """Resolve at every point; only the last call of each lies between the profiler's start and stop."""
    for batch, misses, resident in POINTS:
        ours = Ours(Workload(Case(row_bytes, 2048, 4096, batch, misses)), resident=resident)
        ours.prepare()
        for step in range(WARM_STEPS):
            ours.call(step)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        ours.call(WARM_STEPS)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(f"correct {batch} {misses} {ours.correct(WARM_STEPS)}", flush=True)


def known_metrics(program: str) -> list[str]:
    """Those of METRICS that this ncu knows: one that it does not know would end the run."""
    listed = subprocess.run(
        [program, "--query-metrics"], check=False, capture_output=True, text=True, timeout=40
    ).stdout
    names = {line.split()[0] for line in listed.splitlines() if line.strip()}
    always = ("launch__", "sm__maximum_")  # of the launch, not counters: not listed
    return [metric for metric in METRICS if metric.startswith(always) or metric.split(".")[0] in names]


def command(program: str, metrics: list[str], row_bytes: int) -> list[str]:
    """ncu on `--run`; clocks and caches are left as they are."""
    return [
        program, "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none",
        "--kernel-name", "regex:resolve", "--metrics", ",".join(metrics), "--csv", "--page", "raw", "--print-units", "base",
        sys.executable, str(Path(__file__).resolve()), "--run", "--row-bytes", str(row_bytes),
    ]  # fmt: skip


def parse_csv(output: str) -> list[dict[str, Any]]:
    """One dictionary a kernel, in order, from what ncu prints (other lines come before it); metrics it lacks are None."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(lines))
    kernels = [row for row in table if row.get("ID", "").strip()]  # the row below the heading holds units
    found = []
    for row in kernels:
        figures: dict[str, Any] = {"kernel": row.get("Kernel Name", "")}
        for metric, name in METRICS.items():
            text = (row.get(metric) or "").replace(",", "")
            try:
                figures[name] = float(text)
            except ValueError:
                figures[name] = None
        found.append(figures)
    return found


def with_points(kernels: list[dict[str, Any]], row_bytes: int) -> list[dict[str, Any]]:
    """Kernels beside the points they belong to, and what must travel at least. Raises ValueError if they do not match."""
    if len(kernels) != len(POINTS):
        raise ValueError(f"{len(kernels)} kernels profiled, want {len(POINTS)}")
    rows = []
    for (batch, misses, resident), figures in zip(POINTS, kernels, strict=True):
        sectors = figures["sysmem_read_sectors"]
        rows.append(
            {
                "batch": batch,
                "misses": misses,
                "resident": resident,
                "bytes_needed": batch * misses * row_bytes,
                "sysmem_read_bytes": None if sectors is None else 32 * sectors,
                **figures,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--row-bytes", type=int, default=1152)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.run:
        run_points(arguments.row_bytes)
        return 0
    result: dict[str, Any] = {
        **environment(arguments.commit),
        "row_bytes": arguments.row_bytes,
        "rows": [],
        "problem": None,
    }
    program = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    output = ""
    try:
        metrics = known_metrics(program)
        result["metrics_unknown"] = sorted(set(METRICS) - set(metrics))
        done = subprocess.run(
            command(program, metrics, arguments.row_bytes),
            check=False,
            capture_output=True,
            text=True,
            timeout=arguments.seconds,
        )
        output = done.stdout + done.stderr
        result["rows"] = with_points(parse_csv(done.stdout), arguments.row_bytes)
        result["correct"] = [
            line.split()[-1] == "True" for line in done.stdout.splitlines() if line.startswith("correct ")
        ]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        result["problem"] = f"{error}; {output[-1500:]}"
    for row in result["rows"]:
        print(row)
    print(result["problem"] or "counters read")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 3 if result["problem"] else 0


if __name__ == "__main__":
    sys.exit(main())
