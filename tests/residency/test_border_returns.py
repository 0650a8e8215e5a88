"""Goal: the border of a resting server goes back to its first place, never from under anybody, and stays there.

Method: as in test_border.py, a coordinator with a hand-driven mover.
"""

from __future__ import annotations

import pytest

from residency.stage import Stage
from residency.test_border import Hand, build, finish, tick
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import Border, BorderStep, Progress
from sglang_hisparse.residency.border import CALM_LOOKS
from sglang_hisparse.residency.invariants import check


def at_the_end() -> tuple[Stage, Border, Hand]:
    """The border has gone all its way."""
    stage, border, hand = build()
    while not border.is_at_end:
        border.want(stage.book.num_free + 1)
        tick(border)
        stage.coordinator.take_plan()
        finish(border, hand)
    assert (stage.book.num_free, stage.pages.num_free) == (24, 6)
    hand.moves.clear()
    return stage, border, hand


def rest(border: Border, looks: int) -> None:
    for _ in range(looks):
        border.follow()
        border.rest()


def test_the_way_back() -> None:
    """Goal: a server that rests gets its device pages back, no sooner than their memory. Method: look at both pools at each moment,
    and go the way again."""
    stage, border, hand = at_the_end()
    rest(border, CALM_LOOKS - 1)
    assert not hand.moves
    rest(border, 1)
    assert hand.moves == [(3, 0)] and border.is_moving and not border.is_at_end
    assert stage.coordinator.take_plan().vacates, "launched forwards pass it before index-K leaves"
    assert (stage.book.num_free, stage.pages.num_free) == (12, 6)
    check(stage.coordinator)
    hand.state = Progress.VACATED
    rest(border, 3)
    assert (stage.book.num_free, stage.pages.num_free, hand.calls) == (12, 6, 3)
    hand.state = Progress.MOVED
    rest(border, 2 * CALM_LOOKS)
    assert (stage.book.num_free, stage.pages.num_free, len(hand.moves)) == (12, 12, 1) and not border.is_moving
    check(stage.coordinator)
    assert stage.extend(1, 9) == list(range(1, 10)), "pages that were there all the time come first"
    tick(border)
    assert hand.moves[1:] == [(0, 1)]


def test_what_keeps_the_border_where_it_is() -> None:
    """Goal: no way back under pages in use, or between two requests. Method: a page beyond the first place, a wish, a forward;
    then pages below it."""
    stage, border, hand = at_the_end()
    taken = stage.book.allocate(14)
    rest(border, 2 * CALM_LOOKS)
    stage.book.give_back(taken[12:13])
    rest(border, 2 * CALM_LOOKS)
    assert not hand.moves and taken[13] > border.steps[0].logical_pages
    border.look()
    stage.book.give_back(taken[13:])
    for _ in range(2):
        border.look()
        rest(border, CALM_LOOKS - 1)
        border.want(1)
        rest(border, CALM_LOOKS)
    assert not hand.moves
    rest(border, 1)
    assert hand.moves == [(3, 0)] and stage.book.num_free == 0
    hand.state = Progress.MOVED
    rest(border, 1)
    assert stage.pages.num_usable == 12
    check(stage.coordinator)


def test_the_border_stays_where_it_came_back_to() -> None:
    """Goal: a resting server does not move memory to and fro. Method: steps that more than double the pages, so that a border would
    begin a move ahead of need with nothing in use; then a forward."""
    stage, border, hand = build((BorderStep(12, 3), BorderStep(11, 7), BorderStep(10, 14)))
    hand.state = Progress.MOVED
    for _ in range(4):
        rest(border, CALM_LOOKS)
        hand.state = Progress.MOVED
    assert hand.moves == [(0, 1), (1, 0)]
    assert (border.ended, len(hand.moves), stage.pages.num_free) == (0, 2, 12)
    border.look()
    assert hand.moves[2:] == [(0, 1)]


def test_a_request_that_comes_while_the_border_goes_back() -> None:
    """Goal: it waits for the way back and for the way again, with nothing evicted. Method: more pages than the first place has."""
    stage, border, hand = at_the_end()
    rest(border, CALM_LOOKS)
    stage.coordinator.take_plan()
    assert border.defers(14) and not border.defers(12)
    finish(border, hand)
    border.want(14)
    tick(border)
    assert hand.moves[-1][0] == 0
    finish(border, hand)
    assert stage.book.num_usable >= 16 and not border.defers(14)


def test_pages_are_never_taken_from_under_anybody() -> None:
    """Goal: I10, and I3, on the way back. Method: ask for what may not be."""
    stage, _, _ = at_the_end()
    stage.book.allocate(14)
    with pytest.raises(InvariantError, match="I10: logical pages 13..24 are in use"):
        stage.coordinator.withdraw(12)
    for limit in (5, 13):
        with pytest.raises(InvariantError, match=f"I3: {limit} device pages cannot follow 6"):
            stage.pages.restore(limit)
