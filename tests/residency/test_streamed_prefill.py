"""Goal: a streamed prefill holds what is being written and no more, and its plan names every page once, where it is.

Method: hand-driven scenes on a small coordinator, with the structural check after each step.
"""

from __future__ import annotations

import numpy as np
import pytest

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import PageState, Residency
from sglang_hisparse.residency.invariants import check

HOST = PageState.HOST


def begin(stage: Stage, slot: int, prefix: list[int], *, chunk: int = 2, final: int = 20) -> None:
    """The first chunk of a streamed prefill gets its pages."""
    needed = stage.limits.hot_pages + chunk
    stage.coordinator.attach(slot, prefix, prompt_pages=needed, final_pages=final, streamed=True)
    stage.grow(slot, chunk)


def test_chunks_leave_behind_each_other() -> None:
    """Goal: a prompt of eleven pages passes through a device of six. Method: five chunks of two pages and one of one; the lease
    is there from the start, sealed pages may leave, those of the chunk may not."""
    stage = Stage(device=6, logical=24)
    begin(stage, 1, [])
    assert len(stage.coordinator.hot_lease[1]) == 2 and stage.book.committed_pages() == 5
    for chunk in range(6):
        count = 2 if chunk < 5 else 1
        if chunk:
            assert stage.policy.make_room(count), "what the chunks before wrote makes room"
            stage.grow(1, count)
        assert HOST not in stage.states(stage.row(1)[2 * chunk :])
        stage.coordinator.take_plan()
        stage.coordinator.check_step([1])
        stage.launch(1, 2 * chunk + count, ends=chunk == 5)
        check(stage.coordinator)
    assert not stage.book.prefilling[1] and stage.coordinator.residency(1) is Residency.MIXED
    stage.coordinator.check_step([1])
    assert stage.book.committed_pages() == stage.limits.smallest_pages


def test_the_page_that_is_being_written_is_held() -> None:
    """Goal: a chunk that ends inside a page keeps that page. Method: one and a half pages, then ask for all that can leave."""
    stage = Stage(device=6)
    begin(stage, 1, [])
    stage.launch(1, 1, rows=2, ends=False)
    stage.policy.make_room(6)
    assert stage.states(stage.row(1)) == [HOST, PageState.OPEN]
    stage.launch(1, 2, ends=False)
    stage.policy.make_room(6)
    assert stage.states(stage.row(1)) == [HOST, HOST]
    check(stage.coordinator)


def test_the_plan_names_each_page_once_and_where_it_is() -> None:
    """Goal: attention finds all pages of the batch, shared ones once. Method: two requests over one prefix, one of them full."""
    stage = Stage(device=14, logical=24)
    prefix = stage.cache(3, 4)
    stage.mirror_all()
    neighbour = stage.extend(2, 3, ends=False)
    assert stage.coordinator.plan_stream([2]) is None, "nothing is host-only"
    stage.coordinator.spill(prefix[:3])
    begin(stage, 1, prefix)
    stage.coordinator.take_plan()
    plan = stage.coordinator.plan_stream([1, 2])
    assert plan is not None and plan.num_pages == 4 + 2 + 3
    assert sorted(plan.host_pages.tolist()) == sorted(prefix[:3])
    resident = [prefix[3], *stage.row(1)[4:], *neighbour]
    assert sorted(plan.resident_pages.tolist()) == sorted(resident)
    assert np.array_equal(plan.device_pages, stage.book.device_page[plan.resident_pages]) and plan.device_pages.all()
    check(stage.coordinator)


def test_it_disturbs_nobody() -> None:
    """Goal: the pages of requests without a lease stay, whatever a streamed prefill shares with them. Method: ask for more room
    than there is."""
    stage = Stage(device=12, logical=24)
    row = stage.extend(2, 5, ends=False)
    begin(stage, 1, row[:4])
    assert not stage.policy.make_room(6)
    assert HOST not in stage.states(row)
    check(stage.coordinator)


def test_promotion_passes_it_over() -> None:
    """Goal: pages do not come back while the prefill sends them away. Method: a free device, a tick in mid-prefill, one after."""
    from sglang_hisparse.residency import ResidencyPolicy

    stage = Stage(device=14, policy=ResidencyPolicy(watermark_low=0.0, watermark_high=0.0, promote_pages_per_step=8))
    begin(stage, 1, [])
    stage.launch(1, 2, ends=False)
    stage.mirror_all()
    stage.coordinator.spill(stage.row(1))
    stage.policy.tick()
    assert stage.states(stage.row(1)) == [HOST, HOST] and 1 in stage.coordinator.hot_lease
    stage.grow(1, 2)
    stage.launch(1, 4)
    stage.policy.tick()
    stage.policy.tick()
    assert HOST not in stage.states(stage.row(1)) and stage.coordinator.hot_lease == {}
    check(stage.coordinator)


def test_it_ends_at_any_chunk() -> None:
    """Goal: abort returns lease, holds and pages. Method: end it after its second chunk."""
    stage = Stage(device=6)
    begin(stage, 1, [])
    stage.launch(1, 2, ends=False)
    assert stage.policy.make_room(2)
    stage.grow(1, 2)
    stage.finish(1)
    assert (stage.pages.num_free, stage.book.num_free) == (6, 24) and stage.coordinator.hot_lease == {}
    assert not stage.book.streams(1)
    check(stage.coordinator)


def test_a_lease_that_was_promised_and_is_not_there() -> None:
    """Goal: I7, allocation never goes on without it. Method: one free page for a lease of two."""
    stage = Stage(device=6)
    stage.extend(2, 5)
    with pytest.raises(InvariantError, match="I7: request slot 1 was promised a hot lease"):
        begin(stage, 1, [])
