"""Goal: windows of a streamed extend hold what their requests read, and fit the scratch. Method: random batches of hand-made
requests, shared prefixes among them; scenes for what is too large.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError

PREFIX = 4


def batch(own: list[int], shares: list[bool], spilled: list[bool]) -> Stage:
    """Request slots 1.. over `own` cached pages each, behind a shared prefix or not; of some a page is on the host only."""
    stage = Stage(device=100, logical=100, slots=12, hot=2)
    cached = [stage.cache(9, count) for count in (PREFIX, *own)]
    stage.mirror_all()
    stage.coordinator.take_plan()
    for index, leaves in enumerate(spilled, start=1):
        if leaves:
            stage.coordinator.spill(cached[index][:1])
    for index, (share, leaves) in enumerate(zip(shares, spilled, strict=True), start=1):
        pages = [*cached[0] * share, *cached[index]]
        stage.coordinator.attach(index, pages, prompt_pages=3, final_pages=20, streamed=leaves)
    return stage


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.booleans(), st.integers(1, 9)), min_size=1, max_size=7),
    st.integers(6 + PREFIX, 30),
)
@settings(max_examples=150, deadline=None)
def test_every_request_finds_its_pages_in_its_window(requests: list[tuple[int, bool, bool, int]], num_pages: int) -> None:
    """Goal: tokens are cut between requests, in order, none left out; a window has its requests' pages once, and no others."""
    own, shares, spilled, tokens = (list(column) for column in zip(*requests, strict=True))
    stage = batch(own, shares, spilled)
    slots = list(range(1, len(requests) + 1))
    windows = stage.coordinator.plan_windows(slots, tokens, num_pages)
    assert windows[0].first == 0 and windows[-1].last == sum(tokens)
    assert all(one.last == other.first for one, other in itertools.pairwise(windows))
    starts = np.cumsum([0, *tokens])
    for number, window in enumerate(windows):
        inside = [slot for slot in slots if window.first <= starts[slot - 1] < window.last]
        assert starts[inside[0] - 1] == window.first and starts[inside[-1]] == window.last
        plan = window.plan
        assert plan is not None and plan.num_pages <= num_pages
        held = [*plan.host_pages.tolist(), *plan.resident_pages.tolist()]
        assert sorted(held) == sorted({page for slot in inside for page in stage.row(slot)})
        assert np.array_equal(plan.device_pages, stage.book.device_page[plan.resident_pages]) and plan.device_pages.all()
        if number + 1 < len(windows):
            more = {*held, *stage.row(inside[-1] + 1)}
            assert len(more) > num_pages, "the next request would have fitted"


def test_who_is_all_on_the_device_may_be_larger_than_the_scratch() -> None:
    """Goal: such a request reads the pool; one with a host-only page may not be so large (I7). Method: six pages, room for five."""
    stage = batch([2, 6, 2], [False] * 3, [True, False, True])
    windows = stage.coordinator.plan_windows([1, 2, 3], [7, 8, 9], 5)
    assert [(window.first, window.last) for window in windows] == [(0, 7), (7, 15), (15, 24)]
    assert [window.plan is None for window in windows] == [False, True, False]
    stage = batch([2, 6, 2], [False] * 3, [True] * 3)
    with pytest.raises(InvariantError, match="I7: request slot 2 streams 6 pages through a scratch of 5"):
        stage.coordinator.plan_windows([1, 2, 3], [7, 8, 9], 5)
