"""Goal: I7, what is admitted gets its pages. Method: the budget, the allocation's own code and the spill policy over made-up
requests, by hand and at random.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from budget_calls import Cached, checked
from hypothesis import given
from hypothesis import strategies as st
from runtime_world import PAGE

from sglang_hisparse.capacity import PrefillRule
from sglang_hisparse.memory.budget import HiSparsePrefillBudget
from sglang_hisparse.memory.extends import Extends
from sglang_hisparse.residency import (
    DevicePages,
    ResidencyCoordinator,
    ResidencyLimits,
    ResidencyMode,
    ResidencyPolicy,
    SpillPolicy,
)
from sglang_hisparse.residency.invariants import check


class Device:
    """The protocol with the real ledger, without SGLang: requests with nested shared prefixes on a few device pages.

    chunk_pages: prefills longer than the device are streamed in chunks of that many pages; 0: none is.
    """

    def __init__(
        self,
        device_pages: int,
        hot_pages: int,
        mode: ResidencyMode = ResidencyMode.HYBRID,
        chunk_pages: int = 0,
        windows: bool = False,
    ) -> None:
        limits = ResidencyLimits(4000, device_pages, 40, 200, hot_pages)
        policy, pages = ResidencyPolicy(mode=mode), DevicePages(device_pages)
        self.residency = ResidencyCoordinator(limits, policy, pages, lambda batch: [t.transfer_id for t in batch])
        self.policy = SpillPolicy(self.residency)
        self.limits = limits
        rule = PrefillRule(
            num_device_pages=device_pages,
            hot_pages=hot_pages,
            smallest_pages=limits.smallest_pages,
            scratch_pages=150 if chunk_pages else 0,
            chunk_pages=chunk_pages,
            short_extend_tokens=3 * PAGE,
            has_windows=windows,
        )
        self.extends = Extends(self.residency, self.policy.make_room, rule, object() if chunk_pages else None)
        self.lengths: dict[int, int] = {}
        self.finals: dict[int, int] = {}

    def budget(self) -> HiSparsePrefillBudget:
        allocator = SimpleNamespace(
            page_size=PAGE,
            device_pages=self.residency.device_pages,
            residency=self.residency,
            available_size=lambda: 1 << 30,
            runtime=SimpleNamespace(
                defers_to_border=lambda num_pages: False,
                committed_device_pages=self.residency.book.committed_pages,
                refuses=lambda: False,
                gate=None,
                extends=self.extends,
            ),
        )
        tree: Any = SimpleNamespace(supports_mamba=lambda: False, evictable_size=lambda: 0, prefix_pages=list)
        return HiSparsePrefillBudget(allocator, tree)

    def start(self, prefix: list[int], own: int, grows: int) -> list[int] | None:
        """Admit, hold, make room, promote, allocate, prefill. None: the budget refused."""
        prompt, final = len(prefix) + own, len(prefix) + own + grows
        budget = self.budget()
        budget.consider(Cached(prefix))
        if not checked(budget, prompt * PAGE, new=grows * PAGE, extend=own * PAGE):
            return None
        residency, book, slot = self.residency, self.residency.book, len(self.lengths) + 1
        free = residency.device_pages.num_usable - book.committed_pages()
        if (prefill := self.extends.decide(prefix, prompt * PAGE, final * PAGE, free)).is_streamed:
            return self._stream(slot, prefix, own, grows, prefill.chunk_pages)
        book.hold(prefix, +1)
        on_host = [page for page in prefix if book.is_host_only(page)]
        assert self.policy.make_room(len(on_host) + own), "an admitted prefill found no device pages"
        assert not on_host or residency.promote(on_host)
        residency.attach(slot, prefix, prompt_pages=prompt, final_pages=final)
        book.hold(prefix, -1)
        assert residency.append(slot, book.allocate(own))
        self.lengths[slot], self.finals[slot] = prompt, final
        self._launch([slot])
        return book.pages(slot).tolist()

    def _stream(self, slot: int, prefix: list[int], own: int, grows: int, chunk_pages: int) -> list[int]:
        """Prefill chunk by chunk; the others decode in between."""
        residency, book, hot = self.residency, self.residency.book, self.limits.hot_pages
        final = len(prefix) + own + grows
        for done in range(0, own, chunk_pages):
            count = min(chunk_pages, own - done)
            needed = count + (hot if done == 0 else 0)
            assert self.policy.make_room(needed), "a chunk of an admitted prefill found no device pages"
            if done == 0:
                residency.attach(slot, prefix, prompt_pages=hot + chunk_pages, final_pages=final, streamed=True)
            assert residency.append(slot, book.allocate(count))
            length = len(prefix) + done + count
            self.policy.tick()
            residency.take_plan()
            residency.check_step([slot])
            residency.plan_stream([slot])
            residency.note_launch([slot], [length * PAGE], [done + count == own])
            check(residency)
            self.grow()
        self.lengths[slot], self.finals[slot] = len(prefix) + own, final
        return book.pages(slot).tolist()

    def grow(self) -> None:
        """Every request that has not reached its end takes one page more, all in one step."""
        slots = [slot for slot, length in self.lengths.items() if length < self.finals[slot]]
        assert self.policy.make_room(len(slots)), "a decode step within the ledger found no device pages"
        for slot in slots:
            assert self.residency.append(slot, self.residency.book.allocate(1))
            self.lengths[slot] += 1
        self._launch(slots)

    def _launch(self, slots: list[int]) -> None:
        self.policy.tick()
        self.residency.take_plan()
        self.residency.check_step(slots)
        self.residency.note_launch(slots, [self.lengths[slot] * PAGE for slot in slots], [True] * len(slots))
        check(self.residency)


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
