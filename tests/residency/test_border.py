"""Goal: memory moves from device pages to logical ones when it is wanted, never from under anybody, and no sooner.

Method: a coordinator with a hand-driven mover; arithmetic of the steps by hand. Random schedules are tests/sim's.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import Border, BorderStep, Owner, PageState, Progress, border_steps
from sglang_hisparse.residency.border import HURRY_LOOKS, MAX_DEFERRALS, MAX_STEPS_AT_ONCE, REST_LOOKS
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.residency.types import LeaseChange, Relocation, ResidencyLimits

STEPS = tuple(BorderStep(12 - 2 * step, 12 + 4 * step) for step in range(4))  # (12, 12) .. (6, 24)


class Hand:
    """A mover that does what the test says."""

    def __init__(self) -> None:
        self.state = Progress.BEGUN
        self.moves: list[tuple[int, int]] = []
        self.calls = 0

    def begin(self, old: int, new: int) -> None:
        self.state = Progress.BEGUN
        self.moves.append((old, new))

    def progress(self) -> Progress:
        return self.state

    def advance(self) -> None:
        self.calls += 1


def build(steps: tuple[BorderStep, ...] = STEPS, **options: object) -> tuple[Stage, Border, Hand]:
    stage = Stage(device=steps[0].device_pages, logical=steps[-1].logical_pages, border=steps, **options)
    hand = Hand()
    return stage, Border(stage.coordinator, stage.policy.make_room, hand), hand


def tick(border: Border) -> None:
    """One iteration of a scheduler."""
    border.follow()
    border.look()


def finish(border: Border, hand: Hand) -> None:
    hand.state = Progress.MOVED
    tick(border)


def test_one_move_from_wish_to_pages() -> None:
    """Goal: each moment of a move changes what it should and nothing else. Method: look at both pools after each tick."""
    stage, border, hand = build()
    assert (stage.book.num_free, stage.pages.num_free) == (12, 12)
    tick(border)
    assert not border.is_moving and stage.coordinator.take_plan().is_empty
    border.want(13)
    tick(border)
    plan = stage.coordinator.take_plan()
    assert plan.vacates and not plan.relocations and hand.moves == [(0, 1)]
    assert (stage.book.num_free, stage.pages.num_free) == (12, 10)
    tick(border)
    assert stage.book.num_free == 12 and hand.calls == 0
    hand.state = Progress.VACATED
    tick(border)
    assert stage.book.num_free == 12 and hand.calls == 1
    finish(border, hand)
    assert (stage.book.num_free, stage.pages.num_free) == (16, 10) and not border.is_moving
    check(stage.coordinator)


def test_a_move_begins_ahead_of_need() -> None:
    """Goal: requests seldom wait for the border. Method: use logical pages one by one until less than one step's are free."""
    stage, border, hand = build()
    stage.extend(1, 8)
    tick(border)
    assert hand.moves == []
    stage.grow(1, 1)
    tick(border)
    assert hand.moves == [(0, 1)]


def test_who_had_to_wait_makes_the_border_hurry() -> None:
    """Goal: a burst of prompts does not wait for every step. Method: a request that waits; moves until calm has come back."""
    steps = tuple(BorderStep(60 - step, 60 + 4 * step) for step in range(30))
    stage, border, hand = build(steps)
    stage.extend(1, 58)
    assert border.defers(3), "one page more than are free"
    tick(border)
    assert hand.moves == [(0, MAX_STEPS_AT_ONCE)]
    finish(border, hand)
    assert stage.policy.make_room(8)
    stage.extend(2, 3)
    tick(border)
    assert hand.moves[1:] == [(4, 5)], "15 pages are free, and four steps give 16"
    finish(border, hand)
    for _ in range(HURRY_LOOKS):
        tick(border)
    stage.extend(3, 4)
    tick(border)
    assert len(hand.moves) == 2, "15 pages are free, and one step gives 4"


def test_a_move_ends_with_its_last_chunk() -> None:
    """Goal: no iteration is lost between the last chunk and the pages that it backs. Method: a mover that needs one call; what
    the others say then."""
    for others, usable in ((Progress.MOVED, 16), (Progress.VACATED, 12)):
        _, border, hand = build()
        border.want(13)
        tick(border)
        answers = [Progress.VACATED, others]
        border._agree = lambda value, answers=answers: min(value, answers.pop(0))
        hand.state = Progress.VACATED
        hand.advance = lambda hand=hand: setattr(hand, "state", Progress.MOVED)  # type: ignore[method-assign]
        border.follow()
        assert border.coordinator.book.num_usable == usable and not answers


def test_a_big_wish_is_met_in_bounded_moves() -> None:
    """Goal: one move does not empty the device. Method: ask for everything; count the steps of each move."""
    steps = tuple(BorderStep(40 - step, 40 + 2 * step) for step in range(7))
    _, border, hand = build(steps)
    border.want(52)
    tick(border)
    assert hand.moves == [(0, MAX_STEPS_AT_ONCE)]
    border.want(52)
    finish(border, hand)
    assert hand.moves[1:] == [(4, 6)] and border.is_at_end
    finish(border, hand)
    border.want(60)
    tick(border)
    assert len(hand.moves) == 2


def test_what_lies_above_moves_below() -> None:
    """Goal: what must stay resident keeps bytes, owner and state. Method: an open tail, a mirrored page and a lease on top."""
    stage, border, _ = build()
    below = stage.pages.lease(8, Owner.HOT, 9)
    mirrored, tail = stage.extend(2, 2, ends=False, launch=False)
    stage.launch(2, 1, rows=1)
    stage.mirror_all()
    stage.coordinator.acquire_lease(2)
    stage.coordinator.take_plan()
    assert stage.book.device_page[[mirrored, tail]].tolist() == [9, 10] and stage.coordinator.hot_lease[2] == [11, 12]
    stage.pages.release(below, Owner.HOT, 9)
    border.want(15)
    tick(border)
    plan = stage.coordinator.take_plan()
    targets = stage.book.device_page[[mirrored, tail]].tolist()
    assert set(targets) <= set(range(1, 9)) and set(stage.coordinator.hot_lease[2]) <= set(range(1, 9))
    assert plan.relocations == (Relocation(9, targets[0]), Relocation(10, targets[1]))
    assert dict(plan.table) == {mirrored: targets[0], tail: targets[1]}
    assert plan.leases == (LeaseChange(2, tuple(stage.coordinator.hot_lease[2])),)
    assert plan.wait_transfer_id == stage.sent[-1].transfer_id
    assert stage.states([mirrored, tail]) == [PageState.MIRRORING, PageState.OPEN]
    assert stage.coordinator.counters.pages_relocated == 2 and stage.pages.num_usable == 8
    check(stage.coordinator)


def test_the_plan_waits_for_copies_that_read_the_old_pages() -> None:
    """Goal: memory never leaves under a copy to the host, though the page has another owner or none. Method: free it first."""
    stage, border, _ = build()
    stage.extend(1, 12)
    ids = stage.mirror_all()
    stage.finish(1)
    stage.coordinator.take_plan()
    border.want(13)
    tick(border)
    reader = {transfer.transfer_id: transfer.device_page for transfer in stage.sent}
    assert stage.coordinator.take_plan().wait_transfer_id == max(i for i in ids if reader[i] > 10)


def test_a_copy_that_is_not_sent_yet_keeps_the_border() -> None:
    """Goal: a planned copy finds the page that it was planned for. Method: acknowledge late; fail instead."""
    for answer in ("on_enqueued", "on_failed"):
        stage, border, hand = build(auto_ack=False)
        stage.extend(1, 12)
        ids = stage.mirror_all()
        stage.finish(1)
        border.want(13)
        tick(border)
        assert hand.moves == []
        getattr(stage.coordinator, answer)(ids)
        border.want(13)
        tick(border)
        assert hand.moves == [(0, 1)]
        assert bool(stage.coordinator.take_plan().wait_transfer_id) == (answer == "on_enqueued")


def test_a_promotion_changes_its_target() -> None:
    """Goal: bytes that are still to come go to the new page. Method: promote to the topmost page, then move the border."""
    stage, border, _ = build()
    (page,) = stage.cache(1, 1)
    stage.mirror_all()
    stage.coordinator.spill([page])
    below = stage.pages.lease(11, Owner.HOT, 9)
    stage.coordinator.take_plan()
    assert stage.coordinator.promote([page]) and stage.book.device_page[page] == 12
    stage.pages.release(below, Owner.HOT, 9)
    border.want(16)
    tick(border)
    plan = stage.coordinator.take_plan()
    (promotion,) = plan.promotions
    assert promotion.device_page == stage.book.device_page[page] <= 10 and not plan.relocations
    assert (page, promotion.device_page) in plan.table


def test_promises_to_live_requests_come_first() -> None:
    """Goal: I7, a move leaves what admission has counted on. Method: a prompt that needs all but one page, then its end."""
    stage, border, hand = build()
    stage.coordinator.attach(1, [], final_pages=11, prompt_pages=10)
    stage.grow(1, 10)
    assert stage.book.committed_pages() == 11
    assert not border.defers(5)
    tick(border)
    assert hand.moves == []
    stage.launch(1, 10)
    assert border.defers(5)
    tick(border)
    assert hand.moves == [(0, 3)]


def test_a_target_that_is_promised_away_is_not_chosen() -> None:
    """Goal: of several steps those that fit are made. Method: want three steps' pages while two fit the ledger."""
    stage, border, hand = build()
    stage.coordinator.attach(1, [], final_pages=7, prompt_pages=6)
    border.want(24)
    tick(border)
    assert hand.moves == [(0, 2)]


def test_a_request_is_not_put_off_for_ever() -> None:
    """Goal: a move that does not end costs cached prefixes, and no more. Method: ask until the answer changes; end it; ask."""
    _, border, hand = build()
    assert not border.defers(12)
    assert all(border.defers(13) for _ in range(MAX_DEFERRALS)) and not border.defers(13)
    tick(border)
    finish(border, hand)
    assert not border.defers(16) and border.defers(17)


def test_at_its_end_the_border_defers_nobody() -> None:
    """Goal: then only eviction helps. Method: two steps, a wish for more than there are."""
    _, border, hand = build(STEPS[:2])
    border.want(16)
    tick(border)
    assert border.defers(13), "the move is under way"
    finish(border, hand)
    assert not border.defers(17) and border.is_at_end


def test_failing_copies_make_the_border_rest() -> None:
    """Goal: shortage is not turned into work at every step. Method: copies that all fail; count questions for room."""
    stage, border, hand = build(auto_ack=False)
    stage.extend(1, 12)
    asked: list[int] = []
    border._make_room = lambda count: asked.append(count) or stage.policy.make_room(count)  # type: ignore[func-returns-value]
    for _ in range(REST_LOOKS):
        border.want(1)
        tick(border)
        for transfer in stage.sent:
            if stage.coordinator._sources:
                stage.coordinator.on_failed([transfer.transfer_id])
    assert asked == [2] and hand.moves == []
    assert set(stage.states(stage.row(1)[:10])) == {PageState.DIRTY}


def test_ranks_go_on_by_the_slowest() -> None:
    """Goal: R30. Method: what the ranks agree on differs from what this one has seen."""
    stage, border, hand = build()
    agreed = [Progress.BEGUN]
    border._agree = lambda value: min(value, agreed[0])
    border.want(13)
    tick(border)
    hand.state = Progress.MOVED
    tick(border)
    assert hand.calls == 0 and stage.book.num_usable == 12
    agreed[0] = Progress.VACATED
    tick(border)
    assert hand.calls == 1 and stage.book.num_usable == 12
    agreed[0] = Progress.MOVED
    tick(border)
    assert stage.book.num_usable == 16


def test_a_flush_leaves_the_border_where_it_is() -> None:
    """Goal: after a flush the pools are as large as the memory behind them. Method: flush in the middle of a move."""
    stage, border, hand = build()
    stage.extend(1, 6)
    border.want(7)
    tick(border)
    stage.coordinator.clear()
    assert (stage.pages.num_free, stage.book.num_free) == (10, 12)
    check(stage.coordinator)
    finish(border, hand)
    assert stage.book.allocate(16) == list(range(1, 17))


def test_a_plan_with_only_a_relocation_is_not_empty() -> None:
    """Goal: no part of a plan is dropped for emptiness. Method: a page above, its plan alone."""
    stage, border, _ = build()
    below = stage.pages.lease(11, Owner.HOT, 9)
    (page,) = stage.extend(1, 1)
    stage.coordinator.take_plan()
    stage.pages.release(below, Owner.HOT, 9)
    border.want(14)
    tick(border)
    plan = stage.coordinator.take_plan()
    assert plan.relocations == (Relocation(12, int(stage.book.device_page[page])),) and not plan.is_empty


# -- where the border may stand ----------------------------------------------------------------------------------------


def shape(**changes: int) -> tuple[BorderStep, ...]:
    """Chunks of 100 bytes; device pages of 30 in each of 6 layers; index pages of 10 in each of 2 leaders."""
    sizes = {"device_pages": 19, "logical_pages": 59, "page_bytes": 30, "index_page_bytes": 10, "num_layers": 6, "num_leaders": 2}
    return border_steps(**{**sizes, **changes}, chunk_bytes=100)


def test_steps_by_hand() -> None:
    """Goal: the arithmetic of chunks. Method: 6 chunks a layer, 3 chunks of index-K for each leader per step."""
    # At first 600 bytes a layer hold 20 pages (19 and the pad), 2 chunks of index-K hold 20.
    assert shape() == (BorderStep(19, 19), BorderStep(15, 49), BorderStep(12, 59))


def test_chunks_that_are_left_over_are_kept() -> None:
    """Goal: no chunk is lost where layers do not divide by leaders. Method: 6 layers, 4 leaders: 6, 12, 18 chunks are 1, 3, 4."""
    assert [step.logical_pages for step in shape(num_leaders=4)] == [19, 29, 49, 59]
    assert [step.logical_pages for step in shape(num_leaders=6)] == [19, 29, 39, 49, 59]


def test_nothing_moves_where_nothing_is_wanted() -> None:
    """Goal: ratio 1 has one step. Method: as many logical pages as device pages; and one page fewer in the last chunk."""
    assert shape(logical_pages=19) == (BorderStep(19, 19),)
    assert shape(device_pages=17, logical_pages=19) == (BorderStep(17, 19),)


@pytest.mark.parametrize("page_bytes", [73_728, 41_984])
def test_steps_of_a_real_model(page_bytes: int) -> None:
    """Goal: every step gives memory and takes it, and no byte counts twice. Method: DeepSeek's layers, 2 MiB chunks."""
    chunk, layers = 2 << 20, 61
    steps = border_steps(
        device_pages=5_000, logical_pages=20_000, page_bytes=page_bytes, index_page_bytes=8_448,
        num_layers=layers, num_leaders=layers, chunk_bytes=chunk,
    )  # fmt: skip
    start = -(-5_001 * page_bytes // chunk) + -(-5_001 * 8_448 // chunk)
    for before, after in pairwise(steps):
        assert after.device_pages < before.device_pages and after.logical_pages > before.logical_pages
    for number, step in enumerate(steps):
        kv = -(-(step.device_pages + 1) * page_bytes // chunk)
        index = -(-(step.logical_pages + 1) * 8_448 // chunk)
        assert kv + index <= start, number
    assert steps[0].device_pages == 5_000 and steps[-1].logical_pages == 20_000


def test_limits_without_a_border_have_one_step() -> None:
    """Goal: the default is what it was. Method: the limits of a pool that does not move."""
    limits = ResidencyLimits(24, 12, 5, 24, 2)
    assert limits.steps == (BorderStep(12, 24),) and limits.least_device_pages == 12
    stage = Stage()
    assert stage.book.num_usable == 24 and stage.pages.num_usable == 12
    with pytest.raises(InvariantError, match="I10"):
        stage.book.extend_to(25)


def test_no_second_look_where_nobody_can_be_kept() -> None:
    """Goal: nobody waits, and no forward looks at all requests again, for a move that the estimate of the ledger alone allows. Method:
    pages that two kept requests share behind different beginnings, which the estimate counts once."""
    steps = (BorderStep(60, 60), BorderStep(45, 100))
    stage, border, hand = build(steps, hot=16)
    first, second, common = stage.cache(1, 10), stage.cache(1, 10), stage.cache(1, 5)
    for slot, prefix, bounded in ((1, first, False), (2, second, False), (3, first + common, True), (4, second + common, True)):
        stage.coordinator.attach(slot, prefix, final_pages=len(prefix) + 1, bounded=bounded)
        stage.grow(slot, 1)
        stage.launch(slot, len(prefix) + 1)
    looks, keeps_within = [], border._keeps_within
    border._keeps_within = lambda limit: looks.append(limit) or keeps_within(limit)
    assert border.defers(stage.book.num_free + 1) and border._fits(1)
    for _ in range(REST_LOOKS):
        border.want(61)
        tick(border)
        assert not border.defers(stage.book.num_free + 1)
    assert looks == [45] and not hand.moves
    border.want(61)
    tick(border)
    assert looks == [45, 45] and stage.book.fresh_committed_pages() <= 60
    check(stage.coordinator)
