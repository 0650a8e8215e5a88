"""Goal: no schedule breaks an invariant, and the schedules reach what they claim to reach.

Method: a few thousand simulated schedules from a fixed seed, and some from the commit's hash, so that every commit
tries new ones and any failure can be repeated (`Simulation(seed).run()`).
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from sim.simulator import Simulation

FIXED_SEED = 20_000
NUM_FIXED = 2_000
NUM_NEW = 500


def commit_seed() -> int:
    """SIM_SEED, else a number made of the commit's hash, else 1."""
    if seed := os.environ.get("SIM_SEED"):
        return int(seed)
    command = ["git", "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 1
    return int(answer.stdout[:8], 16)


def run_many(first: int, count: int) -> Counter[str]:
    """Totals over seeds first..first+count-1; raises the first Violation."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + count):
        simulation = Simulation(seed)
        simulation.run()
        options, rank = simulation.options, simulation.ranks.first
        totals.update(asdict(rank.coordinator.counters))
        totals.update({f"read {kind}": number for kind, number in rank.gpu.num_reads.items()})
        border, mover = rank.border, rank.mover
        totals.update({"border moves": mover.num_begun > 0, "border at its end": border.ended > 0 and border.is_at_end})
        totals.update({"border goes back": mover.num_back})
        totals.update({"stale": simulation.ranks.stale, "forwards": simulation.num_launches})
        totals.update({"ordered by misses": simulation.ranks.miss_rounds})
        totals.update({"several ranks": options.num_ranks > 1, "ledger": options.ledger})
        totals.update({"no overlap": not options.overlap, "no radix": not options.radix})
    return totals


def test_fixed_schedules() -> None:
    """Goal: I1..I7 hold. Method: the same seeds each time; every kind of event must have happened in them, often."""
    print(f"seeds {FIXED_SEED}..{FIXED_SEED + NUM_FIXED - 1}")
    totals = run_many(FIXED_SEED, NUM_FIXED)
    for event in (
        "pages_mirrored", "pages_spilled", "pages_promoted", "leases_acquired", "pages_rehomed",
        "stale_acknowledgements", "refusals", "read resident", "read hot", "read host", "read streamed", "stale",
        "several ranks", "no overlap", "no radix", "ledger", "ordered by misses", "pages_relocated",
        "border moves", "border at its end", "border goes back",
    ):  # fmt: skip
        assert totals[event] >= 50, (event, totals[event])
    assert totals["leases_acquired"] == totals["leases_released"]


def test_new_schedules() -> None:
    """Goal: look where nobody has looked. Method: seeds that follow from the commit (SIM_SEED repeats a run)."""
    seed = commit_seed()
    print(f"SIM_SEED={seed}")
    run_many(seed, NUM_NEW)


@pytest.mark.parametrize("seed", [3, 14, 159])
def test_a_seed_is_a_schedule(seed: int) -> None:
    """Goal: a failure can be repeated. Method: run a seed twice and compare every count."""
    assert run_many(seed, 1) == run_many(seed, 1)


def test_pending_says_why() -> None:
    """Goal: a system that has not drained says what it waits for. Method: stop a schedule half-way."""
    simulation = next(simulation for seed in range(100) if (simulation := half_way(seed)).running)
    reasons = " ".join(simulation.pending())
    assert "runs" in reasons and "device pages are free" in reasons


def half_way(seed: int) -> Simulation:
    """A schedule after four iterations."""
    simulation = Simulation(seed)
    for _ in range(4):
        simulation._arrive()
        simulation._iterate()
    return simulation
