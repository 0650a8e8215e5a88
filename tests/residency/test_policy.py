"""Goal: the spill policy takes the right victims, funds leases, keeps its watermarks and does not thrash.

Method: one hand-driven scene per rule on a small coordinator, with the structural check after each.
"""

from __future__ import annotations

import pytest

from residency.stage import Stage
from sglang_hisparse.residency import Mirroring, PageState, Residency, ResidencyMode, ResidencyPolicy
from sglang_hisparse.residency.invariants import check

DIRTY, CLEAN, HOST = PageState.DIRTY, PageState.CLEAN, PageState.HOST


def watermarks(low: float, high: float, promote: int = 0) -> ResidencyPolicy:
    return ResidencyPolicy(watermark_low=low, watermark_high=high, promote_pages_per_step=promote)


# -- victims -----------------------------------------------------------------------------------------------------------


def test_room_that_is_there_costs_nothing() -> None:
    """Goal: no spill without shortage. Method: ask for what is free."""
    stage = Stage(device=4)
    pages = stage.cache(1, 2)
    assert stage.policy.make_room(2)
    assert stage.states(pages) == [DIRTY, DIRTY] and stage.sent == []


def test_unused_pages_go_first_least_recently_used_first() -> None:
    """Goal: cached pages of finished requests leave before anybody's. Method: two generations and a running request."""
    stage = Stage(device=8)
    old, new = stage.cache(1, 2), stage.cache(2, 2)
    running = stage.extend(3, 4)
    assert stage.policy.make_room(2)
    assert stage.states(old) == [HOST, HOST] and HOST not in stage.states(new + running)
    assert stage.policy.make_room(3)
    assert stage.states(new) == [HOST, DIRTY]
    check(stage.coordinator)


def test_pages_with_a_copy_go_before_dirty_ones() -> None:
    """Goal: pressure costs no transfer where it can be helped. Method: the younger of two cached pages is CLEAN."""
    stage = Stage(device=4)
    (old,), (new,) = stage.cache(1, 1), stage.cache(2, 1)
    stage.coordinator.mirror([new])
    assert stage.policy.make_room(3)
    assert stage.states([old, new]) == [DIRTY, HOST]


def test_pages_whose_users_hold_leases_leave_for_free() -> None:
    """Goal: older pages of mixed requests go before anybody else is mixed. Method: one mixed, one full request."""
    stage = Stage(device=14, slots=4)
    mixed, full = stage.extend(1, 5), stage.extend(2, 5)
    stage.coordinator.acquire_lease(1)
    assert stage.policy.make_room(4)
    assert stage.states(mixed).count(HOST) == 2 and HOST not in stage.states(full)
    assert stage.coordinator.counters.leases_acquired == 1
    check(stage.coordinator)


def test_nothing_releasable_is_a_refusal() -> None:
    """Goal: exhaustion is an answer (I7), and counted. Method: copies are never acknowledged as enqueued."""
    stage = Stage(device=6, auto_ack=False)
    pages = stage.cache(1, 6)
    assert not stage.policy.make_room(1)
    assert HOST not in stage.states(pages) and stage.coordinator.counters.refusals == 1
    stage.coordinator.on_enqueued([transfer.transfer_id for transfer in stage.sent])
    assert stage.policy.make_room(1)
    check(stage.coordinator)


# -- going mixed -------------------------------------------------------------------------------------------------------


def test_lease_is_funded_by_the_pages_given_back() -> None:
    """Goal: R20: a full device can still be spilled from. Method: one request owns all pages, none is free."""
    stage = Stage(device=8)
    pages = stage.extend(1, 8)
    assert stage.pages.num_free == 0
    assert stage.policy.make_room(1)
    assert stage.pages.num_free >= 1 and len(stage.coordinator.hot_lease[1]) == 2
    states = stage.states(pages)
    assert states.index(DIRTY) == states.count(HOST), "the oldest pages leave"
    check(stage.coordinator)


def test_request_that_gains_nothing_stays_full() -> None:
    """Goal: a request goes mixed only where it gives back more than its lease. Method: hot 2, tail 2, four pages."""
    stage = Stage(device=4)
    pages = stage.extend(1, 4)
    assert not stage.policy.make_room(1)
    assert stage.coordinator.hot_lease == {} and HOST not in stage.states(pages)
    check(stage.coordinator)


def test_the_request_that_gains_most_goes_first() -> None:
    """Goal: fewest leases for the pages needed. Method: a short and a long request, one page short."""
    stage = Stage(device=16, slots=4)
    stage.extend(1, 6)
    stage.extend(2, 10)
    assert stage.policy.make_room(1)
    assert list(stage.coordinator.hot_lease) == [2]


def test_a_request_that_is_being_prefilled_gives_nothing() -> None:
    """Goal: no page of it leaves, however short the device is. Method: a middle chunk fills the device."""
    stage = Stage(device=8)
    pages = stage.extend(1, 8, ends=False)
    assert not stage.policy.make_room(1)
    assert HOST not in stage.states(pages)


def test_sharers_go_mixed_together_or_not_at_all() -> None:
    """Goal: a shared page leaves only with a lease for each user (R19). Method: two users of a prefix worth two
    leases."""
    stage = Stage(device=12, slots=4)
    prefix = stage.cache(3, 6)
    stage.extend(1, 9, prefix=prefix)
    stage.extend(2, 9, prefix=prefix)
    assert stage.pages.num_free == 0
    assert stage.policy.make_room(1)
    assert sorted(stage.coordinator.hot_lease) == [1, 2]
    stage.coordinator.check_step([1, 2])
    check(stage.coordinator)


def test_sharers_that_gain_nothing_stay_full() -> None:
    """Goal: two leases must be worth it. Method: a shared prefix as large as the leases."""
    stage = Stage(device=8, slots=4)
    prefix = stage.cache(3, 4)
    stage.extend(1, 6, prefix=prefix)
    stage.extend(2, 6, prefix=prefix)
    assert not stage.policy.make_room(1)
    assert stage.coordinator.hot_lease == {} and HOST not in stage.states(prefix)
    check(stage.coordinator)


def test_refused_transaction_leaves_no_lease_mark() -> None:
    """Goal: all or nothing. Method: the copies of the would-be victims are not enqueued."""
    stage = Stage(device=8, auto_ack=False)
    stage.extend(1, 8)
    assert not stage.policy.make_room(1)
    assert not stage.book.leased.any() and stage.coordinator.take_plan().leases == ()
    check(stage.coordinator)


# -- the tick ----------------------------------------------------------------------------------------------------------


def test_eager_mirroring_has_a_budget() -> None:
    """Goal: sealed pages are copied while there is no pressure, oldest first, so many a step. Method: three ticks."""
    stage = Stage(policy=ResidencyPolicy(watermark_low=0.0, mirror_pages_per_step=2))
    pages = stage.extend(1, 5)
    copied = []
    for _ in range(3):
        stage.policy.tick()
        copied.append([transfer.logical_page for transfer in stage.sent])
    assert copied == [pages[:2], pages[:4], pages]


def test_mirroring_on_pressure_waits_for_it() -> None:
    """Goal: `on_pressure` copies nothing while pages are free, and what is needed when they are not."""
    stage = Stage(
        device=6, policy=ResidencyPolicy(mirroring=Mirroring.ON_PRESSURE, watermark_low=0.0, watermark_high=0.0)
    )
    pages = stage.cache(1, 5)
    stage.policy.tick()
    assert stage.sent == []
    assert stage.policy.make_room(3)
    assert [transfer.logical_page for transfer in stage.sent] == pages[:2]


def test_watermark_is_refilled_to_the_high_mark() -> None:
    """Goal: below the low mark spill up to the high one, at or above it nothing. Method: 2 and 4 of 10 pages."""
    stage = Stage(device=10, policy=watermarks(0.2, 0.4))
    stage.cache(1, 8)
    stage.policy.tick()
    assert stage.pages.num_free == 2
    stage.cache(2, 1)
    stage.policy.tick()
    assert stage.pages.num_free == 4
    check(stage.coordinator)


def test_promotion_waits_for_room_and_ends_the_lease() -> None:
    """Goal: a mixed request becomes full only if the high mark stays free; bounded per step, newest first; then no
    lease. Method: cached pages that a batch holds cannot make room; later some can."""
    stage = Stage(device=16, policy=watermarks(0.1, 0.25, promote=2))
    other = stage.cache(2, 4)
    pages = stage.extend(1, 7)
    stage.coordinator.acquire_lease(1)
    stage.mirror_all()
    stage.coordinator.spill(pages[:3])
    stage.book.hold(cached := [*other, *stage.cache(3, 1)], +1)
    assert stage.pages.num_free == 5
    stage.policy.tick()
    assert stage.states(pages[:3]) == [HOST] * 3, "three pages would leave fewer than the high mark"
    stage.book.hold(cached, -1)
    stage.coordinator.spill(other)
    stage.policy.tick()
    assert stage.states(pages[:3]) == [HOST, PageState.MIRRORING, PageState.MIRRORING]
    stage.coordinator.check_step([1])
    stage.policy.tick()
    assert stage.coordinator.residency(1) is Residency.FULL and stage.coordinator.hot_lease == {}
    check(stage.coordinator)


def test_unused_pages_make_room_for_promotion() -> None:
    """Goal: a running request is not kept mixed by pages that nobody uses. Method: no page is free, four are only cached;
    as many of them leave as come back, the coldest first."""
    stage = Stage(device=13, policy=watermarks(0.0, 0.0, promote=2))
    cold = stage.cache(2, 2)
    pages = stage.extend(1, 7)
    warm = stage.cache(3, 2)
    stage.mirror_all()
    stage.coordinator.acquire_lease(1)
    stage.coordinator.spill(pages[:2])
    newest = stage.cache(4, 2)
    assert stage.pages.num_free == 0
    stage.policy.tick()
    assert stage.states([*cold, *warm, *newest]) == [HOST] * 2 + [PageState.MIRRORING] * 4
    assert stage.coordinator.residency(1) is Residency.FULL and stage.coordinator.hot_lease == {}
    check(stage.coordinator)


def test_a_lease_that_ends_makes_no_room_of_its_own() -> None:
    """Goal: unused pages leave once for what comes back. Method: a request with nothing on the host holds a lease, a second
    one brings back more pages than a lease has, between the watermarks; the same pages could be spilled for both."""
    stage = Stage(device=22, policy=watermarks(0.0, 0.25, promote=6))
    cached = [*stage.cache(3, 4), *stage.cache(4, 4)]
    stage.extend(1, 4)
    stage.coordinator.acquire_lease(1)
    stage.mirror_all()
    pages = stage.extend(2, 6)
    stage.mirror_all()
    assert stage.coordinator.acquire_lease(2)
    stage.coordinator.spill(pages[:4])
    stage.grow(2, 1)
    assert stage.pages.num_free == 3 and stage.book.host_pages(1) == 0
    stage.policy.tick()
    assert stage.coordinator.residency(2) is Residency.FULL and stage.coordinator.hot_lease == {}
    assert stage.states(cached).count(HOST) == stage.coordinator.counters.pages_spilled - 4
    check(stage.coordinator)


@pytest.mark.parametrize("device", [12, 14, 16, 20])
def test_promotion_and_spilling_do_not_chase_each_other(device: int) -> None:
    """Goal: a steady load comes to rest. Method: two requests, fifty ticks; the last forty move nothing."""
    stage = Stage(device=device, policy=watermarks(0.2, 0.4, promote=2))
    stage.extend(1, 6)
    stage.extend(2, 6)
    moved = []
    for _ in range(50):
        stage.policy.tick()
        stage.coordinator.on_completed([transfer.transfer_id for transfer in stage.sent])
        counters = stage.coordinator.counters
        moved.append((counters.pages_spilled, counters.pages_promoted, counters.leases_acquired))
        check(stage.coordinator)
    assert moved[10] == moved[-1]


def test_always_host_sends_everything_beyond_the_tail() -> None:
    """Goal: the mode spills on an empty device and keeps the tail. Method: one tick."""
    stage = Stage(device=20, policy=ResidencyPolicy(mode=ResidencyMode.ALWAYS_HOST))
    pages = stage.extend(1, 6)
    stage.policy.tick()
    assert stage.states(pages[:4]) == [HOST] * 4 and HOST not in stage.states(pages[4:])
    assert stage.coordinator.residency(1) is Residency.NONE
    stage.policy.tick()
    assert stage.coordinator.counters.pages_promoted == 0
    check(stage.coordinator)


def test_always_host_sends_pages_that_are_all_shared() -> None:
    """Goal: sharing does not keep pages on the device in this mode. Method: two requests whose sealed pages are all
    one prefix."""
    stage = Stage(device=20, policy=ResidencyPolicy(mode=ResidencyMode.ALWAYS_HOST))
    prefix = stage.cache(3, 4)
    stage.extend(1, 6, prefix=prefix)
    stage.extend(2, 6, prefix=prefix)
    stage.policy.tick()
    assert stage.states(prefix) == [HOST] * 4 and sorted(stage.coordinator.hot_lease) == [1, 2]
    check(stage.coordinator)


def test_always_host_spares_the_prefix_of_a_prefill() -> None:
    """Goal: a page that a prefilling request reads stays. Method: a decoding and a prefilling user of one prefix."""
    stage = Stage(device=20, policy=ResidencyPolicy(mode=ResidencyMode.ALWAYS_HOST))
    prefix = stage.cache(3, 3)
    stage.extend(1, 6, prefix=prefix)
    stage.extend(2, 5, prefix=prefix, ends=False)
    stage.policy.tick()
    assert HOST not in stage.states(prefix)
    check(stage.coordinator)


def test_always_host_on_a_full_device_funds_the_lease() -> None:
    """Goal: no free page is needed to begin. Method: one request owns every page."""
    stage = Stage(device=8, policy=ResidencyPolicy(mode=ResidencyMode.ALWAYS_HOST))
    stage.extend(1, 8)
    stage.policy.tick()
    assert stage.coordinator.residency(1) is Residency.NONE
    check(stage.coordinator)


def test_watermarks_are_rounded_up() -> None:
    """Goal: a small pool still has a watermark. Method: figures for a large, a small and an empty pool."""
    policy = ResidencyPolicy()
    assert policy.watermark_pages(3125) == (63, 188)
    assert policy.watermark_pages(10) == (1, 1)
    assert policy.watermark_pages(0) == (0, 0)
