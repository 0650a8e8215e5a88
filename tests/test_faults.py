"""Goal: faults are what the plan says, and each has its answer in the worker. Method: grammar, triggers, and a world on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from runtime_world import World, make_world

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.faults import FAULT_VARIABLE, FaultPlan, FaultSeam, Trigger, When
from sglang_hisparse.residency.types import PageState, StepPlan


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", FaultPlan()),
        ("zero_rows:0.01", FaultPlan(zero_rows=0.01)),
        ("copy_fail:0.5", FaultPlan(copy_fail=When(share=0.5))),
        ("copy_fail:@3", FaultPlan(copy_fail=When(first=3))),
        ("copy_fail:@3+, seed:9", FaultPlan(copy_fail=When(first=3, after=True), seed=9)),
        ("worker_dies:@5", FaultPlan(worker_dies=When(first=5, after=True))),
        (
            "copy_delay:4,copy_reorder:1,event_fail:@1,refuse:0.1,abort:@7",
            FaultPlan(
                copy_delay=4,
                copy_reorder=1.0,
                event_fail=When(first=1),
                refuse=When(share=0.1),
                abort=When(first=7),
            ),
        ),
    ],
)
def test_the_grammar(text: str, plan: FaultPlan) -> None:
    """Goal: a text says one plan. Method: each kind of entry."""
    assert FaultPlan.parse(text) == plan


@pytest.mark.parametrize(
    "entry",
    ["copy_fail", "copy_fail:", "copy_fail:0", "copy_fail:@0", "copy_fail:@x", "copy_fail:1.1", "copy_fail:nan",
     "copy_delay:-1", "copy_delay:0.5", "worker_dies:0.5", "seed:x", "copy_fails:0.1", "zero_rows:2"],
)  # fmt: skip
def test_a_bad_entry_is_named(entry: str) -> None:
    """Goal: a soak never runs without its faults. Method: bad entries beside a good one."""
    with pytest.raises(ConfigError, match="copy_fail:WHEN") as error:
        FaultPlan.parse(f"abort:@1,{entry}")
    assert repr(entry) in str(error.value)


def test_triggers_fire_when_they_say() -> None:
    """Goal: counts are exact, shares are shares, seeds repeat. Method: many passes."""
    once, after = Trigger(When(first=3), "s"), Trigger(When(first=3, after=True), "s")
    assert [once.fires() for _ in range(5)] == [False, False, True, False, False]
    assert [after.fires() for _ in range(5)] == [False, False, True, True, True]
    runs = []
    for _ in range(2):
        trigger = Trigger(When(share=0.3), "seed")
        runs.append([trigger.fires() for _ in range(5000)])
        assert 0.27 < trigger.fired / trigger.passed < 0.33
    assert runs[0] == runs[1]


def test_observations_lose_and_invent_nothing() -> None:
    """Goal: late and reordered is all that a completion can be. Method: many ids through the seam, each out exactly once."""
    seam = FaultSeam(FaultPlan.parse("copy_delay:5,copy_reorder:0.5,seed:1"))
    seen: list[int] = []
    for step in range(100):
        seen += seam.observe([3 * step, 3 * step + 1, 3 * step + 2])
    assert seam.holds_back and len(seen) < 300 and seen != sorted(seen)
    seen += seam.settle()
    assert sorted(seen) == list(range(300)) and not seam.holds_back
    assert seam.fired["copy_delay"] > 50 and seam.fired["copy_reorder"] > 10


def test_off_means_absent() -> None:
    """Goal: no cost in production. Method: without the variable, and with zero_rows alone, no seam exists."""
    with make_world() as world:
        assert world.runtime.faults is None and world.runtime.worker.faults is None
        world.runtime.plant(FaultPlan.parse("zero_rows:0.5,seed:3"))
        assert world.runtime.faults is None and world.runtime.worker.faults is None


def test_the_variable_plants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a soak on a real server reaches the same seam. Method: set the variable, build a runtime."""
    monkeypatch.setenv(FAULT_VARIABLE, "copy_fail:@1+")
    with make_world() as world:
        assert world.runtime.worker.faults is world.runtime.faults
        client = world.start(300)
        world.decode(client)
        world.decode(client)
        assert world.residency.counters.copies_failed > 0


def dirty_pages(world: World) -> list[int]:
    return np.flatnonzero(world.book.state == PageState.DIRTY).tolist()


def test_a_launch_that_raises_is_a_failed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a real launch failure is handled, not only an injected one. Method: the copy kernel raises twice, then works."""
    import sglang_hisparse.transfer.worker as module

    copy_pages, calls = module.copy_pages, []

    def flaky(**arguments: object) -> None:
        calls.append(arguments)
        if len(calls) <= 2:
            raise RuntimeError("no resources for this launch")
        copy_pages(**arguments)

    with make_world() as world:
        client = world.start(400)
        monkeypatch.setattr(module, "copy_pages", flaky)
        for _ in range(12):
            world.decode(client)
        assert world.runtime.worker.failed_launches == 2 and len(calls) == 3
        assert world.residency.counters.copies_failed == 2 * 6
        assert dirty_pages(world) == [] and world.residency.failures_in_row == 0


def test_pressure_does_not_wait_for_the_link_to_recover() -> None:
    """Goal: a promise holds on a dead link. Method: every copy of the worker fails; pages leave by the slow way, bytes right."""
    with make_world() as world:
        world.runtime.plant(FaultPlan.parse("worker_dies:@1"))
        client = world.start(700)
        world.decode(client)
        assert len(dirty_pages(world)) > 4
        positions = world.go_mixed(client)
        assert positions and world.wrong_rows(client) == 0
        assert world.residency.counters.copies_failed > 0


def test_the_slow_way_does_not_lose_to_an_older_copy() -> None:
    """Goal: an earlier owner's copy cannot land on top. Method: the worker is drained before rows are written."""
    with make_world() as world:
        world.runtime.plant(FaultPlan.parse("worker_dies:@1"))
        worker, order = world.runtime.worker, []
        drain, note = worker.drain, worker.note_enqueued
        worker.drain = lambda: (order.append("drain"), drain())[1]
        worker.note_enqueued = lambda ids, event: (order.append("copied"), note(ids, event))[1]
        client = world.start(700)
        world.decode(client)
        assert world.runtime.make_room(world.num_free_device + 1)
        assert order[:2] == ["drain", "copied"]


def test_ranks_of_a_group_give_no_copy_back() -> None:
    """Goal: one rank's failure changes no decision (R30). Method: as on several ranks, a failed copy is made at once."""
    with make_world() as world:
        world.runtime.worker.must_succeed = True
        world.runtime.plant(FaultPlan.parse("copy_fail:0.5"))
        client = world.start(700)
        for _ in range(3):
            world.decode(client)
        assert world.runtime.faults.fired["copy_fail"] > 0
        assert world.residency.counters.copies_failed == 0 and dirty_pages(world) == []


class BrokenEvent:
    """An event whose query fails."""

    def query(self) -> bool:
        raise RuntimeError("event lost")


def test_an_event_that_fails_is_waited_for_instead() -> None:
    """Goal: a lost event loses no acknowledgement. Method: a batch with a broken event, and one whose query is injected."""
    with make_world() as world:
        worker, drains = world.runtime.worker, []
        worker.drain = lambda: drains.append(1)
        worker.note_enqueued([7, 8], BrokenEvent())
        assert worker.poll() == [7, 8] and drains == [1] and worker.failed_events == 1
        world.runtime.plant(FaultPlan.parse("event_fail:@1"))
        worker.note_enqueued([9], BrokenEvent())
        assert worker.poll() == [9] and drains == [1, 1] and worker.failed_events == 2


def test_a_plan_waits_behind_slow_copies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a copy made the slow way, with an id between launched ones, hides no wait. Method: a stream that notes its waits."""
    waited: list[str] = []
    with make_world() as world:
        worker = world.runtime.worker
        for ids, event in (([1, 3], "first"), ([2], None), ([4, 5], "second"), ([6], "third")):
            worker.note_enqueued(ids, event)
        stream = SimpleNamespace(wait_event=waited.append)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(worker, "_on_gpu", True)
        for transfer_id in (2, 3, 5, 9):
            worker.apply(StepPlan(step=1, wait_transfer_id=transfer_id, promotions=(), table=(), leases=()))
        monkeypatch.undo()
        worker._batches.clear()
    assert waited == ["first", "first", "second", "third"]


def test_a_copy_that_lags_is_waited_for_in_the_end() -> None:
    """Goal: copies in flight are bounded (issue: copy stream behind). Method: plans name copies older than the lag."""
    with make_world() as world:
        lag = world.residency.policy.mirror_lag_steps
        client = world.start(300)
        world.decode(client)
        newest = world.residency._next_transfer_id - 1
        waits = []
        take_plan = world.residency.take_plan
        world.residency.take_plan = lambda: waits.append(take_plan()) or waits[-1]
        for _ in range(lag + 2):
            world.decode(client)
        assert max(plan.wait_transfer_id for plan in waits) >= newest
        assert all(plan.wait_transfer_id == 0 for plan in waits[: lag - 2])


def test_a_bad_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a soak does not run without its faults. Method: a runtime is built under a variable that means nothing."""
    monkeypatch.setenv(FAULT_VARIABLE, "nonsense")
    with pytest.raises(ConfigError, match="nonsense"), make_world():
        pass
