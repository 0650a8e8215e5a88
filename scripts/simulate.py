"""Run the protocol simulator over many seeds, or hunt the planted bugs with it.

    python scripts/simulate.py --schedules 20000 --seed 7 --json simulation.json
    python scripts/simulate.py --mutations

Owns the command line and the report only; the simulator is tests/sim/. The exit status is 0 when no invariant was
broken, or, with --mutations, when every planted bug was caught.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from sim.border_mutations import BORDER_MUTATIONS
from sim.gpu_model import Violation
from sim.mutations import MUTATIONS, hunt
from sim.sharing_mutations import SHARING_MUTATIONS
from sim.simulator import Simulation

CHUNK = 100  # schedules a work item


def run_chunk(first: int, count: int) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Totals over seeds first..first+count-1, and what broke."""
    totals: Counter[str] = Counter()
    broken = []
    for seed in range(first, first + count):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Violation as violation:
            broken.append({"seed": seed, "invariant": violation.invariant, "message": str(violation)})
        rank = simulation.ranks.first
        totals.update({"schedules": 1, "forwards": simulation.num_launches, "requests": simulation.num_requests})
        totals.update(asdict(rank.coordinator.counters))
        totals.update({f"rows_read_{kind}": number for kind, number in rank.gpu.num_reads.items()})
    return totals, broken


def run_schedules(console: Console, num_schedules: int, seed: int, processes: int) -> dict[str, Any]:
    totals: Counter[str] = Counter()
    broken: list[dict[str, Any]] = []
    firsts = range(seed, seed + num_schedules, CHUNK)
    counts = [min(CHUNK, seed + num_schedules - first) for first in firsts]
    started = time.perf_counter()
    with ProcessPoolExecutor(processes) as pool:
        for part, faults in track(pool.map(run_chunk, firsts, counts), "schedules", len(counts), console=console):
            totals.update(part)
            broken += faults
    elapsed = time.perf_counter() - started
    table = Table("count", "total")
    for name, number in totals.items():
        table.add_row(name, f"{number:,}")
    console.print(table)
    for fault in broken[:20]:
        console.print(f"seed {fault['seed']}: {fault['message']}", markup=False)
    console.print(
        f"{totals['schedules']:,} schedules, {len(broken)} invariants broken, "
        f"{totals['schedules'] / elapsed:.0f} a second"
    )
    return {"totals": dict(totals), "broken": broken, "schedules_per_s": totals["schedules"] / elapsed}


def run_mutations(console: Console, num_schedules: int, seed: int, processes: int) -> dict[str, Any]:
    table = Table("planted bug", "breaks", "schedules until caught", "seen as")
    rows = []
    with ProcessPoolExecutor(processes) as pool:
        planted = (*MUTATIONS, *BORDER_MUTATIONS, *SHARING_MUTATIONS)
        hunts = pool.map(hunt, planted, [seed] * len(planted), [num_schedules] * len(planted))
        for mutation, found in zip(planted, track(hunts, "planted bugs", len(planted), console=console), strict=True):
            count, seen = found or (None, None)
            rows.append({"bug": mutation.name, "breaks": mutation.breaks, "schedules": count, "seen_as": seen})
            table.add_row(mutation.name, mutation.breaks, "not caught" if count is None else f"{count:,}", seen or "-")
    console.print(table)
    missed = sum(row["schedules"] is None for row in rows)
    console.print(f"{len(rows)} planted bugs, {missed} not caught within {num_schedules:,} schedules each")
    return {"mutations": rows, "missed": missed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=10_000, help="how many, or at most for each planted bug")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others follow")
    parser.add_argument("--processes", type=int, default=None, help="default: one for each core")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument("--mutations", action="store_true", help="hunt the planted bugs instead")
    args = parser.parse_args()
    console = Console()
    console.print(f"seed {args.seed}")
    run = run_mutations if args.mutations else run_schedules
    report = {"seed": args.seed, **run(console, args.schedules, args.seed, args.processes)}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(bool(report.get("broken") or report.get("missed")))


if __name__ == "__main__":
    sys.exit(main())
