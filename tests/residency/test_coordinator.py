"""Goal: every transaction of the coordinator does what its docstring says, and refuses what it must.

Method: one hand-driven scene per edge on a small coordinator, with the structural check after each.
"""

from __future__ import annotations

import pytest

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import PageState, Residency
from sglang_hisparse.residency.invariants import check

OPEN, DIRTY, MIRRORING, CLEAN, HOST = (
    PageState.OPEN,
    PageState.DIRTY,
    PageState.MIRRORING,
    PageState.CLEAN,
    PageState.HOST,
)


def host_page(stage: Stage, slot: int = 4) -> int:
    """A page of the tree that is host-only, its copy complete."""
    (page,) = stage.cache(slot, 1)
    stage.coordinator.on_completed(stage.mirror_all())
    stage.coordinator.spill([page])
    return page


# -- states ------------------------------------------------------------------------------------------------------------


def test_life_of_a_page() -> None:
    """Goal: OPEN, DIRTY, MIRRORING, CLEAN, HOST and back, each by its call. Method: walk the diagram."""
    stage = Stage()
    page = stage.extend(1, 1, launch=False)[0]
    assert stage.states([page]) == [OPEN]
    stage.launch(1, 1)
    assert stage.states([page]) == [DIRTY]
    ids = stage.mirror_all()
    assert stage.states([page]) == [MIRRORING] and stage.book.releasable()[page]
    stage.coordinator.on_completed(ids)
    assert stage.states([page]) == [CLEAN] and not stage.coordinator.has_transfers
    stage.finish(1, keep=1)
    stage.coordinator.spill([page])
    assert stage.states([page]) == [HOST] and stage.pages.num_free == 12
    assert stage.coordinator.promote([page])
    assert stage.states([page]) == [CLEAN]
    check(stage.coordinator)


def test_partial_page_is_not_sealed() -> None:
    """Goal: a page is sealed by the forward that writes its last row (R8). Method: launch one row short, then that
    row."""
    stage = Stage()
    pages = stage.extend(1, 2, launch=False)
    stage.launch(1, 1, rows=3)
    assert stage.states(pages) == [DIRTY, OPEN]
    stage.launch(1, 2)
    assert stage.states(pages) == [DIRTY, DIRTY]


def test_middle_chunk_keeps_everything_held() -> None:
    """Goal: no page of a request that is being prefilled may leave. Method: a middle chunk, then the last."""
    stage = Stage()
    pages = stage.extend(1, 4, ends=False)
    stage.mirror_all()
    assert stage.book.holds[pages].tolist() == [1, 1, 1, 1]
    with pytest.raises(InvariantError, match="R19"):
        stage.coordinator.spill(pages[:1])
    stage.launch(1, 4, ends=True)
    assert stage.book.holds[pages].tolist() == [0, 0, 1, 1]
    check(stage.coordinator)


def test_spill_refuses_what_has_no_copy_on_its_way() -> None:
    """Goal: I1. Method: spill OPEN, DIRTY and planned but not enqueued pages of a cached prefix."""
    stage = Stage(auto_ack=False)
    (page,) = stage.cache(1, 1)
    with pytest.raises(InvariantError, match=r"I1.*DIRTY"):
        stage.coordinator.spill([page])
    ids = stage.mirror_all()
    with pytest.raises(InvariantError, match=r"I1.*MIRRORING"):
        stage.coordinator.spill([page])
    stage.coordinator.on_enqueued(ids)
    stage.coordinator.spill([page])
    assert stage.coordinator.take_plan().wait_transfer_id == ids[0]


def test_spill_refuses_a_user_without_lease() -> None:
    """Goal: R19. Method: spill a page beyond the tail before and after its user's lease."""
    stage = Stage()
    pages = stage.extend(1, 4)
    stage.mirror_all()
    with pytest.raises(InvariantError, match="R19"):
        stage.coordinator.spill(pages[:1])
    assert stage.coordinator.acquire_lease(1)
    stage.coordinator.spill(pages[:1])
    assert stage.coordinator.residency(1) is Residency.MIXED
    stage.coordinator.check_step([1])
    check(stage.coordinator)


def test_residency_of_a_request() -> None:
    """Goal: full, mixed and none. Method: spill nothing, one page, everything beyond the tail."""
    stage = Stage()
    pages = stage.extend(1, 4)
    stage.mirror_all()
    assert stage.coordinator.residency(1) is Residency.FULL
    stage.coordinator.acquire_lease(1)
    stage.coordinator.spill(pages[:1])
    assert stage.coordinator.residency(1) is Residency.MIXED
    stage.coordinator.spill(pages[1:2])
    assert stage.coordinator.residency(1) is Residency.NONE


# -- pages -------------------------------------------------------------------------------------------------------------


def test_append_refuses_when_the_device_is_full() -> None:
    """Goal: shortage is an answer, not an exception, and changes nothing (I7). Method: one page more than there are."""
    stage = Stage(device=3)
    stage.coordinator.attach(1, [], final_pages=4)
    pages = stage.book.allocate(4)
    assert not stage.coordinator.append(1, pages)
    assert stage.pages.num_free == 3 and stage.row(1) == []
    assert stage.coordinator.append(1, pages[:3])


def test_double_free_is_refused() -> None:
    """Goal: I2 for logical pages. Method: free a page twice."""
    stage = Stage()
    (page,) = stage.extend(1, 1)
    stage.finish(1)
    with pytest.raises(InvariantError, match="freed twice"):
        stage.coordinator.free([page])
    check(stage.coordinator)


def test_page_in_use_is_not_freed() -> None:
    """Goal: a page that a request uses never reaches the free list. Method: free it while mapped."""
    stage = Stage()
    pages = stage.extend(1, 1)
    with pytest.raises(InvariantError, match="1 users"):
        stage.coordinator.free(pages)
    assert stage.book.num_free == 23


def test_promote_is_all_or_nothing_and_host_only() -> None:
    """Goal: promotion's two refusals. Method: too few device pages; a page that is resident."""
    stage = Stage(device=4)
    page = host_page(stage)
    resident = stage.extend(1, 4)
    assert not stage.coordinator.promote([page])
    assert stage.states([page]) == [HOST]
    stage.finish(1, keep=3)
    with pytest.raises(InvariantError, match="only a host-only page"):
        stage.coordinator.promote(resident[:1])


def test_promotion_undone_before_the_plan_is_not_planned() -> None:
    """Goal: the plan holds what is true when it is taken. Method: promote and spill again, promote and free."""
    stage = Stage()
    page = host_page(stage)
    stage.coordinator.take_plan()
    stage.coordinator.promote([page])
    stage.coordinator.spill([page])
    plan = stage.coordinator.take_plan()
    assert plan.promotions == () and plan.table == ((page, 0),)
    stage.coordinator.promote([page])
    stage.coordinator.free([page])
    plan = stage.coordinator.take_plan()
    assert plan.promotions == () and plan.table == ((page, 0),)
    assert stage.coordinator.take_plan().is_empty
    check(stage.coordinator)


def test_plan_waits_for_the_latest_copy_of_what_was_spilled() -> None:
    """Goal: the wait covers every released page. Method: spill in falling order of transfer ids."""
    stage = Stage()
    pages = stage.cache(1, 3)
    ids = stage.mirror_all()
    for page in reversed(pages):
        stage.coordinator.spill([page])
    assert stage.coordinator.take_plan().wait_transfer_id == max(ids)
    assert stage.coordinator.take_plan().is_empty


# -- dedup -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True], ids=["duplicate DIRTY", "duplicate being copied"])
def test_dedup_moves_the_device_page_to_the_tree(copied: bool) -> None:
    """Goal: R22. Method: replace a resident duplicate by a host-only tree page, before and after its own mirror."""
    stage = Stage()
    tree = host_page(stage)
    (mine,) = stage.extend(1, 1)
    device_page = int(stage.book.device_page[mine])
    if copied:
        stage.mirror_all()
    assert stage.coordinator.replace(1, 0, [tree]) == [mine]
    stage.coordinator.free([mine])
    assert stage.states([tree]) == [CLEAN] and stage.book.device_page[tree] == device_page
    assert set(stage.coordinator.take_plan().table) >= {(tree, device_page), (mine, 0)}
    assert stage.coordinator.counters.pages_rehomed == 1
    stage.coordinator.check_step([1])
    check(stage.coordinator)


def test_dedup_keeps_a_copy_in_flight_of_the_tree_page() -> None:
    """Goal: a re-homed page released again still waits for its own copy. Method: spill at enqueue, re-home, spill."""
    stage = Stage()
    (tree,) = stage.cache(4, 1)
    (transfer_id,) = stage.mirror_all()
    stage.coordinator.spill([tree])
    stage.coordinator.take_plan()
    (mine,) = stage.extend(1, 1)
    stage.coordinator.free(stage.coordinator.replace(1, 0, [tree]))
    assert stage.states([tree]) == [MIRRORING] and mine != tree
    stage.finish(1, keep=1)
    stage.coordinator.spill([tree])
    assert stage.coordinator.take_plan().wait_transfer_id == transfer_id
    check(stage.coordinator)


def test_dedup_carries_a_promotion_that_is_still_planned() -> None:
    """Goal: re-homing never hands over a device page whose bytes were dropped from the plan. Method: promote, then
    dedup."""
    stage = Stage()
    tree, mine = host_page(stage, 4), host_page(stage, 3)
    stage.coordinator.take_plan()
    stage.coordinator.promote([mine])
    device_page = int(stage.book.device_page[mine])
    stage.coordinator.attach(1, [mine], final_pages=2)
    stage.coordinator.free(stage.coordinator.replace(1, 0, [tree]))
    plan = stage.coordinator.take_plan()
    assert [(p.logical_page, p.device_page) for p in plan.promotions] == [(tree, device_page)]
    assert dict(plan.table) == {tree: device_page, mine: 0}
    check(stage.coordinator)


def test_dedup_forgets_hot_rows() -> None:
    """Goal: hot rows of replaced ids are forgotten (I4). Method: dedup under a lease, and where nothing changes."""
    stage = Stage()
    pages = stage.extend(1, 4)
    stage.coordinator.acquire_lease(1)
    tree = host_page(stage)
    stage.coordinator.take_plan()
    assert stage.coordinator.replace(1, 0, pages[:1]) == []
    assert stage.coordinator.take_plan().leases == ()
    stage.coordinator.free(stage.coordinator.replace(1, 0, [tree]))
    (change,) = stage.coordinator.take_plan().leases
    assert change.slot == 1 and list(change.device_pages) == stage.coordinator.hot_lease[1]
    check(stage.coordinator)


# -- leases, release, flush --------------------------------------------------------------------------------------------


def test_lease_is_kept_refused_and_returned() -> None:
    """Goal: one lease a slot, a refusal when pages lack. Method: acquire twice, acquire for another slot, release
    twice."""
    stage = Stage(device=4)
    stage.extend(1, 1)
    stage.extend(2, 1)
    assert stage.coordinator.acquire_lease(1)
    lease = list(stage.coordinator.hot_lease[1])
    assert stage.coordinator.acquire_lease(1) and stage.coordinator.hot_lease[1] == lease
    assert not stage.coordinator.acquire_lease(2)
    check(stage.coordinator)
    stage.coordinator.release_lease(1)
    stage.coordinator.release_lease(1)
    assert stage.pages.num_free == 2 and stage.coordinator.counters.leases_released == 1
    check(stage.coordinator)


def test_lease_that_changes_hands_within_a_step_is_announced_once() -> None:
    """Goal: the plan tells a slot's final lease and resets its hot rows. Method: release and acquire between two
    plans."""
    stage = Stage()
    stage.extend(1, 1)
    stage.coordinator.acquire_lease(1)
    stage.coordinator.take_plan()
    stage.finish(1)
    stage.extend(1, 1)
    stage.coordinator.acquire_lease(1)
    (change,) = stage.coordinator.take_plan().leases
    assert list(change.device_pages) == stage.coordinator.hot_lease[1]


def test_shared_page_counts_its_users() -> None:
    """Goal: users, users without a lease and holds under sharing. Method: three users come, lease and go in turn."""
    stage = Stage(device=20, slots=6)
    prefix = stage.cache(5, 3)
    for slot in (1, 2, 3):
        stage.extend(slot, 5, prefix=prefix)
    assert (stage.book.users[prefix] == 3).all() and (stage.book.unleased[prefix] == 3).all()
    stage.coordinator.acquire_lease(2)
    assert (stage.book.unleased[prefix] == 2).all()
    stage.finish(1, keep=3)
    stage.coordinator.release(2)
    assert (stage.book.users[prefix] == 1).all() and (stage.book.unleased[prefix] == 1).all()
    check(stage.coordinator)


def test_check_step_names_the_slot() -> None:
    """Goal: a request with host-only pages and no lease never decodes. Method: attach a host-only prefix and ask."""
    stage = Stage()
    page = host_page(stage)
    stage.extend(1, 3, prefix=[page])
    with pytest.raises(InvariantError, match="R19: request slot 1"):
        stage.coordinator.check_step([1])
    with pytest.raises(InvariantError, match="R19"):
        check(stage.coordinator)


def test_slot_with_a_request_takes_no_other() -> None:
    """Goal: a missed release is seen at the next request. Method: attach twice."""
    stage = Stage()
    stage.extend(1, 1)
    with pytest.raises(InvariantError, match="slot 1"):
        stage.coordinator.attach(1, [], final_pages=1)


def test_clear_forgets_everything_and_old_acknowledgements() -> None:
    """Goal: flush returns to empty, and late acknowledgements change nothing (I5). Method: flush under copies and a
    plan."""
    stage = Stage(auto_ack=False)
    stage.extend(1, 4)
    old = stage.mirror_all()
    stage.coordinator.acquire_lease(1)
    assert stage.coordinator.has_transfers
    stage.coordinator.clear()
    check(stage.coordinator)
    assert stage.coordinator.take_plan().is_empty and not stage.coordinator.has_transfers
    assert (stage.pages.num_free, stage.book.num_free) == (12, 24)
    pages = stage.extend(1, 4)
    new = stage.mirror_all()
    assert not set(old) & set(new)
    stage.coordinator.on_completed(old)
    stage.coordinator.on_enqueued(old)
    assert stage.states(pages) == [MIRRORING] * 4 and not stage.book.enqueued[pages].any()
    check(stage.coordinator)
