"""Goal: no fault of link, worker, pool or client ends the scheduler, changes a token or leaks a page.

Method: SGLang's scheduler with HiSparse on the CPU, under pressure, with seeded faults planted through the one seam.
"""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from harness.checks import assert_outputs, assert_prefix_of_reference
from harness.hisparse import engine_for, finish, plant, submit
from harness.scenarios import random_life

from sglang_hisparse.errors import InvariantError

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
# Three of them fill the device; the fourth is admitted when the others can shrink, and then they must.
PROMPTS = [500, 620, 560, 600, 610]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("copy_fail:0.3", "copy_fail"),
        ("copy_fail:@1+", "copy_fail"),
        ("copy_delay:6,copy_reorder:0.7", "copy_delay"),
        ("copy_reorder:1,copy_delay:2", "copy_reorder"),
        ("event_fail:0.3", "event_fail"),
        ("worker_dies:@1", "worker_dies"),
        ("worker_dies:@9", "worker_dies"),
        ("copy_fail:0.2,event_fail:0.2,copy_delay:3,copy_reorder:0.5,seed:3", "copy_fail"),
    ],
)
def test_a_bad_link_changes_no_token(text: str, kind: str) -> None:
    """Goal: rows are right whatever happens to copies and events. Method: five requests where three fit, faulty link.

    That pages leave the device although every copy of the worker fails shows that the slow way serves.
    """
    with engine_for(mode="always_host" if kind == "copy_reorder" else "hybrid") as engine:
        seam = plant(engine, text)
        handles = submit(engine, PROMPTS, 45)
        engine.run_until_idle()
        assert_outputs(handles)
        assert seam.fired[kind] > 0
        assert not any(handle.retractions for handle in handles), "a failed copy retracted a request"
        counters = engine.coordinator.residency.counters
        assert counters.pages_spilled > 10 and counters.leases_acquired > 0
        assert (counters.copies_failed > 0) == (seam.fired["copy_fail"] + seam.fired["worker_dies"] > 0)
        finish(engine)


def test_the_slow_way_is_what_keeps_promises() -> None:
    """Goal: the tests above bite. Method: the same life on a dead link without it ends at the first broken promise (I7)."""
    with engine_for() as engine:
        plant(engine, "worker_dies:@1")
        engine.coordinator.worker.copy_now = None
        submit(engine, PROMPTS, 45)
        with pytest.raises(InvariantError, match="I7"):
            engine.run_until_idle()


@LOOPS
def test_eager_mirroring_rests_after_failures(overlap: bool) -> None:
    """Goal: a dead link is not hammered. Method: room for all, every copy fails; count attempts against forwards."""
    with engine_for(overlap=overlap, device_pages=64) as engine:
        seam = plant(engine, "worker_dies:@1")
        handles = submit(engine, [400, 300], 170)
        engine.run_until_idle()
        assert_outputs(handles)
        residency = engine.coordinator.residency
        assert residency.step > 150 and 3 <= seam.fired["worker_dies"] <= 12
        assert residency.counters.copies_failed > 0 and residency.num_dirty > 0
        plant(engine, "")
        again = submit(engine, [400], 90, seed=9)
        engine.run_until_idle()
        assert_outputs(again)
        assert residency.num_dirty <= 1, "mirroring has not come back"
        finish(engine)


@LOOPS
@pytest.mark.parametrize("text", ["refuse:@40", "refuse:0.1,seed:4"])
def test_refused_room_queues_or_retracts(text: str, overlap: bool) -> None:
    """Goal: a pool that says no has an answer. Method: refuse at the n-th question, and at random; requests go on."""
    with engine_for(overlap=overlap) as engine:
        seam = plant(engine, text)
        handles = submit(engine, PROMPTS, 45)
        engine.run_until_idle()
        assert seam.fired["refuse"] > 0
        # SGLang gives up the last running request when even it is refused twice in a row.
        assert_outputs([handle for handle in handles if handle.finish_reason != "abort"])
        assert_prefix_of_reference(handles)
        assert sum(handle.finish_reason == "length" for handle in handles) >= 3
        finish(engine)


@LOOPS
@pytest.mark.parametrize("step", [1, 3, 7, 30])
def test_abort_at_the_nth_step(step: int, overlap: bool) -> None:
    """Goal: a client may leave at any step. Method: a random request is aborted at that step, the others end right."""
    with engine_for(overlap=overlap) as engine:
        seam = plant(engine, f"abort:@{step},seed:{step}")
        handles = submit(engine, PROMPTS[:4], 40)
        engine.run_until_idle()
        assert seam.fired["abort"] == 1
        assert [handle.finish_reason for handle in handles].count("abort") == 1
        assert_outputs([handle for handle in handles if handle.finish_reason != "abort"])
        assert_prefix_of_reference(handles)
        finish(engine)


@LOOPS
@pytest.mark.parametrize("seed", range(2))
def test_everything_at_once(seed: int, overlap: bool) -> None:
    """Goal: faults together are no worse. Method: a random life with all kinds of faults."""
    with engine_for(overlap=overlap, radix=seed == 0, link_seed=seed) as engine:
        seam = plant(
            engine,
            f"copy_fail:0.2,copy_delay:3,copy_reorder:0.5,event_fail:0.1,refuse:0.02,abort:0.01,seed:{seed}",
        )
        handles = random_life(engine, seed=seed + 50, num_events=80)
        assert_outputs([handle for handle in handles if handle.finish_reason != "abort"])
        assert_prefix_of_reference(handles)
        assert all(seam.fired[kind] for kind in ("copy_fail", "copy_delay", "event_fail", "refuse", "abort"))
        plant(engine, "")
        finish(engine)
