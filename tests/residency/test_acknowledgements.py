"""Goal: acknowledgements move the page they belong to, once, and nothing else (I5, R7, R30).

Method: late, early, repeated and failed acknowledgements by hand on a small coordinator, with the structural check.
"""

from __future__ import annotations

import pytest

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import PageState
from sglang_hisparse.residency.invariants import check

DIRTY, MIRRORING, CLEAN = PageState.DIRTY, PageState.MIRRORING, PageState.CLEAN


def test_acknowledgements_of_a_freed_page_change_nothing() -> None:
    """Goal: I5. Method: free a page under its copy, give its id to a new owner, deliver the old acknowledgements
    twice."""
    stage = Stage(auto_ack=False)
    (page,) = stage.extend(1, 1)
    old = stage.mirror_all()
    stage.finish(1)
    assert stage.extend(2, 1) == [page]
    new = stage.mirror_all()
    for ids in (old, old):
        stage.coordinator.on_enqueued(ids)
        stage.coordinator.on_completed(ids)
    assert stage.states([page]) == [MIRRORING] and not stage.book.enqueued[page]
    assert stage.coordinator.counters.stale_acknowledgements == 4
    stage.coordinator.on_enqueued(new)
    assert stage.book.enqueued[page]
    check(stage.coordinator)


def test_completion_before_enqueued_decides_nothing() -> None:
    """Goal: a completion that one rank sees early makes no page releasable there alone (R30). Method: reverse the
    order."""
    stage = Stage(auto_ack=False)
    (page,) = stage.cache(1, 1)
    ids = stage.mirror_all()
    stage.coordinator.on_completed(ids)
    assert stage.states([page]) == [MIRRORING] and not stage.book.releasable()[page]
    assert not stage.coordinator.has_transfers and stage.coordinator.is_landing_target(page)
    check(stage.coordinator)
    stage.coordinator.on_enqueued(ids)
    assert stage.states([page]) == [CLEAN] and stage.book.releasable()[page]
    check(stage.coordinator)


def test_early_completion_of_a_freed_page_is_forgotten() -> None:
    """Goal: I5 for that order. Method: complete, free, reuse the id, then acknowledge the old copy as enqueued."""
    stage = Stage(auto_ack=False)
    (page,) = stage.extend(1, 1)
    ids = stage.mirror_all()
    stage.coordinator.on_completed(ids)
    stage.finish(1)
    stage.extend(2, 1)
    stage.mirror_all()
    stage.coordinator.on_enqueued(ids)
    assert stage.states([page]) == [MIRRORING] and not stage.book.enqueued[page]
    check(stage.coordinator)


def test_failed_copy_is_planned_anew() -> None:
    """Goal: a copy that never reached the stream leaves the page DIRTY. Method: fail it, mirror again, complete."""
    stage = Stage(auto_ack=False)
    (page,) = stage.extend(1, 1)
    first = stage.mirror_all()
    stage.coordinator.on_failed(first)
    assert stage.states([page]) == [DIRTY] and stage.coordinator.mirror_backlog(9) == [page]
    second = stage.mirror_all()
    assert second and second != first
    stage.coordinator.on_enqueued(second)
    stage.coordinator.on_failed(first)
    assert stage.states([page]) == [MIRRORING]
    check(stage.coordinator)


def test_enqueued_copy_cannot_fail() -> None:
    """Goal: a failure after enqueued is a bug of the worker and said so (I1). Method: report both."""
    stage = Stage()
    stage.extend(1, 1)
    with pytest.raises(InvariantError, match="I1"):
        stage.coordinator.on_failed(stage.mirror_all())


def test_landing_target() -> None:
    """Goal: a freed page with a host write under way takes no landing (R7). Method: free under two copies, land
    both."""
    stage = Stage()
    (page,) = stage.extend(1, 1)
    first = stage.mirror_all()
    stage.finish(1)
    stage.extend(2, 1)
    second = stage.mirror_all()
    stage.finish(2)
    stage.coordinator.on_completed(first)
    assert not stage.coordinator.is_landing_target(page)
    stage.coordinator.on_completed(second)
    assert stage.coordinator.is_landing_target(page)
