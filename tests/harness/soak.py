"""Random engines living random lives under random faults: the soak of the scheduler on the CPU.

    python tests/harness/soak.py --seconds 120 --seed 7

Called by the pressure tests for a few seconds and by people for as long as they like. Life n of seed s is always the same:
`one_life(s, n)` repeats a failure that the soak has reported. It must never hide one: the first ends it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]
    __package__ = "harness"

from harness.checks import assert_outputs, assert_prefix_of_reference
from harness.engine import Engine, Handle
from harness.hisparse import engine_for, finish, plant
from harness.scenarios import random_life

FAULTS = (
    "",
    "copy_fail:0.2",
    "copy_delay:5,copy_reorder:0.5",
    "event_fail:0.2",
    "worker_dies:@5",
    "abort:0.02",
    "copy_fail:0.1,copy_delay:3,copy_reorder:0.3,event_fail:0.1,refuse:0.01,abort:0.01",
)


@dataclass(slots=True)
class SoakReport:
    """What a soak has done; counts of rows and pages say that it did something."""

    lives: int = 0
    requests: int = 0
    aborted: int = 0
    lost: int = 0
    retractions: int = 0
    rows_read: int = 0
    pages_spilled: int = 0
    pages_promoted: int = 0
    copies_failed: int = 0
    extends_streamed: int = 0


def draw_engine(rng: random.Random) -> dict[str, Any]:
    """Arguments of an engine: pools from tiny to comfortable, every mode."""
    hot_pages = rng.choice((2, 3, 4))
    device_pages = rng.randint(max(12, hot_pages + 6), 40)
    return {
        "mode": rng.choice(("hybrid", "hybrid", "always_host")),
        "overlap": rng.random() < 0.7,
        "radix": rng.random() < 0.7,
        "device_pages": device_pages,
        "ratio": rng.choice((1, 1.5, 3, 5)),
        "hot_pages": hot_pages,
        "max_running_requests": rng.randint(2, 10),
        "chunked_prefill_size": rng.choice((128, 256, 512)),
        "link_seed": rng.choice((None, rng.randrange(1000), rng.randrange(1000))),
        "index_topk_freq": rng.choice((1, 2, 4)),
        "config": {
            "mirroring": rng.choice(("eager", "eager", "on_pressure")),
            "prefill_scratch_tokens": rng.choice((0, 1024, 4096)),
            "stream_extend_tokens": rng.choice((0, 64, 1024)),
        },
    }


def record_client_aborts(engine: Engine) -> set[str]:
    """Rids that a client, or the fault that plays one, gives up from now on."""
    given_up: set[str] = set()
    abort, abort_request = engine.abort, engine.scheduler.abort_request

    def recording_abort(handle: Handle) -> None:
        given_up.add(handle.rid)
        abort(handle)

    def recording_abort_request(message: Any) -> None:
        given_up.add(message.rid)
        abort_request(message)

    engine.abort, engine.scheduler.abort_request = recording_abort, recording_abort_request
    return given_up


def one_life(seed: int, number: int, report: SoakReport) -> None:
    """One engine from birth to empty pools. Raises whatever is wrong."""
    rng = random.Random(f"{seed}/{number}")
    arguments, faults = draw_engine(rng), rng.choice(FAULTS)
    with engine_for(**arguments) as engine:
        longest = min(2500, engine.scheduler.max_req_input_len - 64)
        plant(engine, f"{faults},seed:{number}" if faults else "")
        given_up = record_client_aborts(engine)
        handles = random_life(engine, seed=rng.randrange(10**6), num_events=60, max_prompt=longest, max_new=100)
        assert_outputs([handle for handle in handles if handle.finish_reason != "abort"])
        assert_prefix_of_reference(handles)
        lost = [handle.rid for handle in handles if handle.finish_reason == "abort" and handle.rid not in given_up]
        # SGLang gives up a request that runs alone when it is refused room twice in a row: only planted refusals may do that.
        assert not lost or "refuse" in faults, f"{lost} ended without a client's wish"
        report.lost += len(lost)
        plant(engine, "")
        finish(engine)
        counters, read = engine.coordinator.residency.counters, engine.model.counters
        report.lives += 1
        report.requests += len(handles)
        report.aborted += sum(handle.finish_reason == "abort" for handle in handles)
        report.retractions += sum(handle.retractions for handle in handles)
        report.rows_read += read.rows_read_decode + read.rows_read_extend
        report.pages_spilled += counters.pages_spilled
        report.pages_promoted += counters.pages_promoted
        report.copies_failed += counters.copies_failed
        report.extends_streamed += engine.coordinator.counters().get("streamed_extends", 0)


def soak(*, seconds: float, seed: int) -> SoakReport:
    """Lives until the time is over, at least one. Raises AssertionError naming the life that failed."""
    report, ends = SoakReport(), time.monotonic() + seconds
    number = 0
    while number == 0 or time.monotonic() < ends:
        try:
            one_life(seed, number, report)
        except Exception as error:
            raise AssertionError(f"life {number} of seed {seed}: {type(error).__name__}: {error}") from error
        number += 1
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(soak(seconds=arguments.seconds, seed=arguments.seed))


if __name__ == "__main__":
    main()
