"""Goal: whether prompts return is judged by what a moving border could gain, early enough, and never by first turns that fit.

Method: keys by hand; a border whose first place has 100 pages and whose last has 400.
"""

from __future__ import annotations

import itertools

import pytest

from sglang_hisparse.residency.returns import PrefixReturns


def fresh() -> PrefixReturns:
    return PrefixReturns(100, 400)


def once(returns: PrefixReturns, num_pages: int, keys: itertools.count = itertools.count(10**6)) -> None:  # noqa: B008 (one for all)
    """A prompt that nobody has sent before."""
    returns.note(itertools.islice(keys, num_pages))


def turn(returns: PrefixReturns, agents: int, num_pages: int, first: int = 0) -> None:
    """Each of several conversations sends its prompt, that of the last turn."""
    for agent in range(first, first + agents):
        returns.note(range(agent * 1000, agent * 1000 + num_pages))


def test_prompts_that_are_sent_once() -> None:
    """Goal: the verdict comes with as many pages as would push everything out. Method: one prompt less, and that one."""
    returns = fresh()
    for _ in range(34):
        once(returns, 10)
    assert not returns.are_rare
    once(returns, 10)
    assert returns.are_rare


@pytest.mark.parametrize(("agents", "rare"), [(8, False), (32, False), (36, True)])
def test_first_turns_are_no_evidence(agents: int, rare: bool) -> None:
    """Goal: conversations lose nothing at their beginning if they fit. Method: first turns of a fifth, of four fifths and of nine
    tenths of the last place, then the second ones."""
    returns = fresh()
    turn(returns, agents, 10)
    assert returns.are_rare == rare
    turn(returns, agents, 10)
    assert not returns.are_rare


def test_conversations_after_prompts_that_are_sent_once() -> None:
    """Goal: their second turn turns the verdict, before the last of its prompts comes. Method: look at it after each of them."""
    returns = fresh()
    for _ in range(40):
        once(returns, 10)
    turn(returns, 20, 10)
    assert returns.are_rare, "a first turn is like a prompt that is sent once"
    verdicts = []
    for agent in range(20):
        turn(returns, 1, 10, agent)
        verdicts.append(returns.are_rare)
    assert verdicts == [True] * 2 + [False] * 18


def test_a_common_beginning_is_no_return() -> None:
    """Goal: what is cached wherever the border stands does not move it. Method: prompts half of which is a common instruction, and the
    count of pages that were not near; then the same with prompts between that push it out."""
    returns = fresh()
    for _ in range(60):
        returns.note(range(10))
        once(returns, 10)
    assert returns.are_rare and returns._clock == 10 + 60 * 10
    returns = fresh()
    for _ in range(60):
        returns.note(range(10))
        once(returns, 60)
    assert not returns.are_rare and returns._clock == 60 * (10 + 60)


def test_what_no_border_could_keep_is_no_return() -> None:
    """Goal: conversations that do not fit the last place give nothing to keep. Method: a cycle of half as many pages again."""
    returns = fresh()
    for _ in range(4):
        turn(returns, 60, 10)
    assert returns.are_rare and returns._far == 0 < returns._new and len(returns._touched) == 400


def test_between_the_two_shares_nothing_changes() -> None:
    """Goal: the verdict does not go to and fro. Method: a tenth of the pages returns, after either verdict."""
    def mixed(returns: PrefixReturns, old: itertools.count) -> None:
        for _ in range(60):
            once(returns, 18)
            page = next(old) % 8
            returns.note(range(page * 1000, page * 1000 + 2))

    for rare in (False, True):
        returns = fresh()
        for page in range(8):
            returns.note(range(page * 1000, page * 1000 + 2))
        if rare:
            for _ in range(36):
                once(returns, 9)
            assert not returns.are_rare
            once(returns, 20)
        assert returns.are_rare == rare
        before = returns._clock
        mixed(returns, itertools.count())
        assert returns.are_rare == rare and returns._clock - before > 60 * 19, "what came back was far, but for the first times"


def test_a_flush_restarts() -> None:
    """Goal: nothing of what was before counts. Method: before the first verdict, and after it; pages of before come again."""
    for pages in (300, 400):
        returns = fresh()
        turn(returns, 1, pages)
        returns.restart()
        assert not returns.are_rare
        turn(returns, 1, 340)
        assert not returns.are_rare and returns._far == 0, "no window has ended, and no page has returned"
