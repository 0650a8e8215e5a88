"""Goal: where prompts do not return the border moves for requests alone, and goes back under load to what they need.

Method: as in test_border.py, a coordinator with a hand-driven mover; cached pages are those of finished requests.
"""

from __future__ import annotations

import pytest

from residency.stage import Stage
from residency.test_border import Hand, finish, tick
from sglang_hisparse.residency import Border, BorderStep
from sglang_hisparse.residency.border import CLEAR_LOOKS, WATCH_LOOKS
from sglang_hisparse.residency.invariants import check

STEPS = tuple(BorderStep(40 - 2 * step, 40 + 8 * step) for step in range(6))  # (40, 40) .. (30, 80)


class Cache:
    """Cached pages, least recently used first."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.pages, self.num_given_up = stage, [], 0

    def num_unused(self) -> int:
        return len(self.pages)

    def give_up(self, num_pages: int) -> None:
        gone, self.pages = self.pages[:num_pages], self.pages[num_pages:]
        self.num_given_up += len(gone)
        self.stage.coordinator.free(gone)

    def fill(self, num_pages: int) -> list[int]:
        """Requests of up to ten pages leave them."""
        before = len(self.pages)
        for start in range(0, num_pages, 10):
            count = min(10, num_pages - start)
            assert self.stage.policy.make_room(count)
            self.pages += self.stage.cache(4, count)
            self.stage.mirror_all()
        return self.pages[before:]


def start(stage: Stage, slot: int, num_pages: int) -> list[int]:
    """A request of so many pages."""
    assert stage.policy.make_room(num_pages)
    return stage.extend(slot, num_pages)


def build(*, rare: bool, place: int = 0) -> tuple[Stage, Border, Hand, Cache]:
    """A border that has gone to `place`."""
    stage = Stage(device=40, logical=80, border=STEPS)
    hand, cache = Hand(), Cache(stage)
    border = Border(stage.coordinator, stage.policy.make_room, hand, cached=cache)
    border.give_up_pages = 4
    while border.ended < place:
        border.want(STEPS[place].logical_pages)
        border.look()
        stage.coordinator.take_plan()
        finish(border, hand)
    # What was wanted for that is forgotten.
    border._most_needed = border._needed_before = 0
    border.returns.are_rare = rare
    hand.moves.clear()
    return stage, border, hand, cache


def test_cached_prefixes_are_given_up_first() -> None:
    """Goal: nobody waits for memory, and none moves, while what nobody uses could go. Method: requests that fit only in its place, with
    either verdict; one that does not fit at all."""
    for rare in (False, True):
        _, border, hand, cache = build(rare=rare)
        cache.fill(30)
        assert border.defers(20) != rare
        tick(border)
        assert hand.moves == ([] if rare else [(0, 3)])
    stage, border, hand, cache = build(rare=True)
    start(stage, 1, 10)
    cache.fill(20)
    assert border.defers(31) and not border.defers(30)
    tick(border)
    assert hand.moves == [(0, 1)], "one page more than there are, with all that is cached"


def test_nothing_moves_ahead_of_need() -> None:
    """Goal: device pages are not given up for nothing. Method: requests that leave less than a step, with either verdict."""
    for rare in (False, True):
        stage, border, hand, _ = build(rare=rare)
        start(stage, 1, 36)
        tick(border)
        assert hand.moves == ([] if rare else [(0, 1)])


def test_the_way_back_under_load() -> None:
    """Goal: the border comes back while requests run, and takes no page from them. Method: one above the place where it should be,
    cached pages on both sides, forwards; then its end."""
    stage, border, hand, cache = build(rare=True, place=4)
    low, _, above = cache.fill(20), cache.fill(36), start(stage, 1, 3)
    assert min(above) > 48 > max(low)
    tick(border)
    assert stage.book.fill_limit == 40 and cache.num_given_up == 4
    assert not hand.moves
    while cache.pages and max(cache.pages) > 40:
        tick(border)
        check(stage.coordinator)
    assert not hand.moves and stage.row(1) == above and start(stage, 2, 5)[-1] <= 40, "new pages come from below"
    stage.finish(1)
    tick(border)
    assert hand.moves == [(4, 0)] and (stage.book.num_usable, border.num_returns) == (40, 1)
    assert stage.coordinator.take_plan().vacates
    finish(border, hand)
    assert stage.pages.num_usable == 40 and stage.book.fill_limit == 40
    check(stage.coordinator)


def test_a_part_of_the_way() -> None:
    """Goal: a request that stays does not keep memory that it does not need. Method: one whose topmost page is in the middle."""
    stage, border, hand, cache = build(rare=True, place=4)
    cache.fill(46)
    (page,) = start(stage, 1, 1)
    assert STEPS[0].logical_pages < page <= STEPS[1].logical_pages
    cache.give_up(20)
    for _ in range(3 * CLEAR_LOOKS):
        tick(border)
        if border.is_moving:
            break
    assert hand.moves == [(4, 1)]
    finish(border, hand)
    for _ in range(3 * CLEAR_LOOKS):
        tick(border)
    assert len(hand.moves) == 1
    stage.finish(1)
    tick(border)
    assert hand.moves[1:] == [(1, 0)]


def test_what_requests_have_needed_is_kept() -> None:
    """Goal: no way back that the next request undoes. Method: a need that is over, and asks that found room; forwards until it is
    forgotten."""
    for asks in (False, True):
        stage, border, hand, cache = build(rare=True, place=4)
        if asks:
            assert not border.defers(48)
        else:
            for slot, count in ((1, 28), (2, 20)):
                start(stage, slot, count)
                stage.mirror_all()
            tick(border)
            stage.finish(1)
            stage.finish(2)
        for _ in range(WATCH_LOOKS // 2):
            tick(border)
        assert hand.moves == [(4, 2)], "48 pages were needed, and 7 have room beside them"
        finish(border, hand)
        cache.fill(stage.book.num_free)
        for _ in range(WATCH_LOOKS + CLEAR_LOOKS):
            tick(border)
        assert len(hand.moves) == 1 and not cache.num_given_up, "it is where it should be"
        for _ in range(2 * WATCH_LOOKS):
            tick(border)
        assert hand.moves[1:] == [(2, 0)]


def take(stage: Stage, num_pages: int, *, grow_by: int = 0) -> None:
    """Two requests have so many pages, and will have `grow_by` more at their ends, each of them."""
    for slot, count in ((1, num_pages // 2), (2, num_pages - num_pages // 2)):
        assert stage.policy.make_room(count)
        stage.coordinator.attach(slot, [], final_pages=count + grow_by)
        stage.grow(slot, count)
        stage.launch(slot, count)
        stage.mirror_all()


@pytest.mark.parametrize(("needed", "place"), [(42, 1), (43, 2)])
def test_the_place_has_room_for_cached_pages(needed: int, place: int) -> None:
    """Goal: what is found again soon stays cached on the way back. Method: requests that leave no page of a place; the pages given up at
    once and a sixteenth fit beside 42 of them in 48 pages, and not beside 43."""
    stage, border, hand, cache = build(rare=True, place=4)
    cache.fill(4)
    take(stage, needed)
    for _ in range(2 * CLEAR_LOOKS):
        tick(border)
    assert hand.moves == [(4, place)] and not cache.num_given_up


def test_nothing_is_given_up_where_no_request_is_in_the_way() -> None:
    """Goal: cached pages below the place stay if the border goes there at once; else new pages must come from there. Method: all but two
    of them cached, nothing above; a request above, for which they leave."""
    stage, border, hand, cache = build(rare=True, place=4)
    cache.fill(38)
    tick(border)
    assert hand.moves == [(4, 0)] and not cache.num_given_up
    stage, border, hand, cache = build(rare=True, place=4)
    cache.fill(40)
    assert min(start(stage, 1, 3)) > 40
    tick(border)
    assert not hand.moves and cache.num_given_up == 4 and max(start(stage, 2, 4)) <= 40


def test_growth_of_running_requests_is_needed() -> None:
    """Goal: the border does not go back to where the running requests take it again, nor stays for all that their limits allow. Method:
    two that have 36 pages and may grow by eight each, four of them while it is watched twice; 44, 2 and 4 pages fit in 56."""
    stage, border, hand, _ = build(rare=False, place=4)
    border.watch_looks = 2 * stage.limits.page_size
    take(stage, 36, grow_by=8)
    for _ in range(border.watch_looks):
        tick(border)
    border.returns.are_rare = True
    for _ in range(CLEAR_LOOKS):
        tick(border)
    assert hand.moves == [(4, 2)]


def test_where_prompts_return_nothing_goes_back_under_load() -> None:
    """Goal: what conversations need stays cached. Method: the same with the other verdict; with it a way back that was begun ends."""
    stage, border, hand, cache = build(rare=False, place=4)
    cache.fill(60)
    for _ in range(2 * WATCH_LOOKS):
        tick(border)
    assert not cache.num_given_up and not [move for move in hand.moves if move[1] < move[0]]
    stage, border, hand, cache = build(rare=True, place=4)
    cache.fill(60)
    tick(border)
    given_up, border.returns.are_rare = cache.num_given_up, False
    assert given_up == 4
    for _ in range(2 * WATCH_LOOKS):
        tick(border)
    assert cache.num_given_up == given_up and stage.book.fill_limit == stage.book.num_usable


def test_a_pause_gives_nothing_up() -> None:
    """Goal: idle looks do not undo what the next turns need. Method: a server that rests, with either verdict."""
    for rare in (False, True):
        _, border, hand, cache = build(rare=rare, place=4)
        cache.fill(60)
        for _ in range(3 * border.calm_looks):
            border.follow()
            border.rest()
        assert not cache.num_given_up and not hand.moves


def test_a_move_ends_the_way_back() -> None:
    """Goal: pages are not kept back any more once they are needed. Method: a request that needs more than there is, while it is cleared."""
    stage, border, hand, cache = build(rare=True, place=4)
    start(stage, 1, 6)
    cache.fill(60)
    tick(border)
    assert stage.book.fill_limit < stage.book.num_usable
    assert border.defers(stage.book.num_free + cache.num_unused() + 1)
    tick(border)
    assert hand.moves == [(4, 5)] and stage.book.fill_limit == stage.book.num_usable
    given_up = cache.num_given_up
    finish(border, hand)
    tick(border)
    assert stage.book.num_usable == 80 and cache.num_given_up == given_up
    check(stage.coordinator)


def test_a_flush_forgets_the_verdict() -> None:
    """Goal: benchmarks and servers that flush begin anew. Method: flush while the way back is being cleared."""
    stage, border, _, cache = build(rare=True, place=4)
    cache.fill(60)
    tick(border)
    stage.coordinator.clear()
    cache.pages.clear()
    tick(border)
    assert not border.returns.are_rare and stage.book.fill_limit == stage.book.num_usable == stage.book.num_free
    check(stage.coordinator)


def test_pages_that_come_last() -> None:
    """Goal: pages above the wanted place are handed out only for want of others, and none is lost. Method: all of them, each way."""
    stage = Stage(device=12, logical=24)
    book = stage.book
    taken = book.allocate(9)
    book.fill_below(6)
    book.give_back(taken[::-1])
    assert (book.num_free, book.num_free_below, book.highest_taken()) == (24, 6, 0)
    pages = book.allocate(8)
    assert max(pages[:6]) <= 6 < min(pages[6:]) and book.highest_taken() == max(pages)
    book.give_back(pages)
    assert book.is_free_above(6) and book.is_free_above(2)
    book.fill_below(24)
    assert (book.num_free, book.num_free_below) == (24, 24) and sorted(book.allocate(24)) == list(range(1, 25))
    assert book.allocate(1) is None
