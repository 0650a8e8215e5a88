"""Goal: I7, what is admitted gets its pages. Method: the budget, the allocation's own code and the spill policy over made-up
requests, by hand and at random.
"""

from __future__ import annotations

from types import SimpleNamespace

from budget_calls import Cached, checked
from hypothesis import given
from hypothesis import strategies as st
from ledger_device import Device
from runtime_world import PAGE

from sglang_hisparse.residency import ResidencyMode


def test_a_long_prefix_of_two_leaves_though_its_first_page_serves_a_third() -> None:
    """Goal: nested sharing does not pin pages that the ledger counts as movable. Method: two share 24 pages, one shares 1."""
    device = Device(38, 8)
    row = device.start([], 26, 0)
    assert row is not None
    assert device.start(row[:24], 2, 0) and device.start(row[:1], 2, 0) and device.start([], 10, 0)
    assert sorted(device.residency.hot_lease) == [1, 2], "the short request is charged for its pages, not for a lease"


def test_short_extends_of_resident_prefixes_do_not_wait_for_each_other() -> None:
    """Goal: what the ledger cannot promise to keep resident is charged a lease and a chunk. Method: three prefixes of 12 pages that
    all are on a device of 40, next turns of one page each; without windows the third one waits."""
    for windows in (False, True):
        device = Device(40, 4, chunk_pages=4, windows=windows)
        prefixes = []
        for _ in range(3):
            slot, row = len(device.lengths) + 1, device.start([], 12, 0)
            assert row is not None
            prefixes.append(row)
            device.residency.free(device.residency.unmap(slot, 12, len(row)))
            device.residency.release(slot)
            device.lengths.pop(slot), device.finals.pop(slot)
        budget, admitted = device.budget(), []
        for prefix in prefixes:
            budget.consider(Cached(prefix))
            admitted.append(checked(budget, 13 * PAGE, new=PAGE, extend=PAGE))
            if admitted[-1]:
                budget.reserve(PAGE, PAGE)
        assert admitted == [True, True, windows] and budget.free_device_pages >= 0


def test_allocation_keeps_to_what_the_pass_has_charged() -> None:
    """Goal: pages that are freed between admission and allocation (a preempted request's) do not make a streamed extend a resident
    one, for which others of the batch would lack room. Method: a pass with fewer free pages than there are at allocation; the next
    pass forgets it."""
    device = Device(40, 4, chunk_pages=4, windows=True)
    row = device.start([], 12, 0)
    assert row is not None
    device.residency.free(device.residency.unmap(1, 12, 12))
    device.residency.release(1)
    req = SimpleNamespace(
        rid="a", full_untruncated_fill_ids=[0] * 13 * PAGE, output_ids=[], kv=SimpleNamespace(holds_kv=False),
        sampling_params=SimpleNamespace(max_new_tokens=PAGE),
    )  # fmt: skip
    tree = SimpleNamespace(prefix_pages=lambda one: row)
    batch = SimpleNamespace(reqs=[req], prefix_lens=[12 * PAGE], extend_lens=[PAGE], tree_cache=tree)
    found = []
    for passes in (1, 2):
        for _ in range(passes):
            budget = device.budget()
        budget.tree_cache.prefix_pages = lambda one: row
        if passes == 1:
            budget.free_device_pages = 9
            budget.consider(req)
            assert checked(budget, 13 * PAGE, new=PAGE, extend=PAGE)
            budget.reserve(PAGE, PAGE)
            assert budget.free_device_pages == 2
        device.extends.begin(batch)
        (request,) = device.extends._requests
        found.append((request.is_streamed, request.charged_pages))
        device.residency.book.hold([] if request.is_streamed else row, -1)
    assert found == [(True, 7), (False, 14)]


def test_always_host_leases_within_the_ledger() -> None:
    """Goal: leases of short requests do not take what others were promised. Method: short requests until none is admitted."""
    device = Device(30, 8, ResidencyMode.ALWAYS_HOST)
    while device.start([], 3, 0):
        assert device.residency.book.committed_pages() <= 30
    assert 1 <= len(device.residency.hot_lease) < len(device.lengths)


_MEMBER = st.tuples(st.integers(1, 6), st.integers(0, 6))  # pages of its own, pages that it grows by
_FAMILY = st.tuples(st.integers(0, 24), st.lists(_MEMBER, min_size=1, max_size=6))


@given(
    device_pages=st.integers(8, 60),
    hot_pages=st.integers(1, 8),
    root=st.integers(0, 6),
    families=st.lists(_FAMILY, min_size=1, max_size=4),
    mode=st.sampled_from(ResidencyMode),
    chunk_pages=st.sampled_from((0, 0, 1, 2, 5)),
    windows=st.booleans(),
)
def test_the_ledger_keeps_its_promise(
    device_pages: int,
    hot_pages: int,
    root: int,
    families: list[tuple[int, list[tuple[int, int]]]],
    mode: ResidencyMode,
    chunk_pages: int,
    windows: bool,
) -> None:
    """Goal: I7, no admitted request is short of device pages. Method: families of requests with nested prefixes, growing; those
    longer than the device, short extends of what is on the host, and short ones for which the ledger is short, are streamed."""
    device = Device(device_pages, hot_pages, mode, chunk_pages, windows)
    if device_pages < device.limits.smallest_pages:
        return
    root_pages: list[int] = []
    for shared, members in families:
        family: list[int] = []
        for own, grows in members:
            prefix = root_pages + family
            row = device.start(prefix, root - len(root_pages) + shared - len(family) + own, grows)
            if row is not None:
                root_pages, family = row[:root], row[root : root + shared]
            device.grow()
    for _ in range(8):
        device.grow()
