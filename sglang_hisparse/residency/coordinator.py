"""The residency coordinator: the only writer of page states.

Called by the SGLang side (allocator, radix cache, runtime) on the scheduler's thread; it plans, a transfer worker copies.
Pure CPU: no torch, no device, no clock. Everything it decides follows from calls that all ranks make in the same order and
from *enqueued* acknowledgements, which come at step boundaries; *completed* ones change no decision (they may differ
between ranks), they only publish.

The spill transaction of one page, with the call that makes each move:

    OPEN --note_launch--> DIRTY --mirror--> MIRRORING --on_completed--> CLEAN --spill--> HOST
                                               |                          ^                |
                                               +--on_enqueued, then spill-+--------------->|
                                                                          +----promote-----+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency.device_pages import DevicePages, Owner
from sglang_hisparse.residency.page_book import PageBook
from sglang_hisparse.residency.types import (
    LeaseChange,
    PageState,
    PageTransfer,
    Promotion,
    Residency,
    ResidencyCounters,
    ResidencyLimits,
    ResidencyPolicy,
    StepPlan,
)

# As plain numbers: an enum's attribute costs more than the comparison, and these run per page and step.
_FREE, _OPEN, _DIRTY, _MIRRORING, _CLEAN, _HOST = (int(state) for state in PageState)

# After n failures in a row, eager mirroring rests for 2^n forwards, at most this many.
MAX_BACKOFF_STEPS = 64

MirrorSink = Callable[[list[PageTransfer]], Iterable[int]]


class ResidencyCoordinator:
    """Page states, leases and the spill transaction.

    `mirror_sink` puts copies on the copy stream at once and returns the ids that it acknowledges as enqueued; the others
    may be acknowledged later through `on_enqueued`, or never (`on_failed`).
    """

    def __init__(
        self,
        limits: ResidencyLimits,
        policy: ResidencyPolicy,
        device_pages: DevicePages,
        mirror_sink: MirrorSink,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.device_pages = device_pages
        self.book = PageBook(limits)
        self.counters = ResidencyCounters()
        self.step = 0  # forwards launched so far
        self._mirror_sink = mirror_sink
        self._next_transfer_id = 1
        self._transfers: dict[int, int] = {}  # id -> logical page, until completed
        self._completed_early: dict[int, int] = {}  # id -> logical page, completed and not yet acknowledged as enqueued
        self._in_flight: dict[int, int] = {}  # logical page -> host writes not completed (R7)
        self._dirty: dict[int, None] = {}  # DIRTY pages in the order of sealing
        self._enqueued_at: deque[tuple[int, int]] = deque()  # (step, newest id enqueued in it), not yet waited for
        self.failures_in_row = 0  # rounds of copies that failed since one did not
        self._rest_until = 0  # step before which eager mirroring rests
        self.hot_lease: dict[int, list[int]] = {}  # slot -> device pages
        self._reset_plan()

    def _reset_plan(self) -> None:
        self._table_changes: dict[int, None] = {}
        self._promotions: dict[int, int] = {}
        self._lease_changes: dict[int, None] = {}
        self._wait_transfer_id = 0

    def clear(self) -> None:
        """Everything is free again. Acknowledgements of transfers begun before this change nothing (I5): their ids are gone.

        The caller has drained the copy stream and rewrites the whole page table and all leases itself.
        """
        self.book.clear()
        self.device_pages.clear()
        self._transfers.clear()
        self._completed_early.clear()
        self._in_flight.clear()
        self._dirty.clear()
        self._enqueued_at.clear()
        self.hot_lease.clear()
        self._reset_plan()

    # -- requests ---------------------------------------------------------------------------------------------------

    def attach(
        self, slot: int, prefix_pages: Sequence[int], *, final_pages: int, prompt_pages: int = 0, prefilling: bool = True
    ) -> None:
        """A request takes `slot`, with the prefix pages it shares. All its pages are held while it is being prefilled.

        `prompt_pages` and `final_pages` are what it will have at the end of its prefill and at its own end: the admission
        ledger counts with them (`PageBook.committed_pages`).
        """
        self.book.open_slot(slot, prefilling=prefilling, prompt_pages=prompt_pages, final_pages=final_pages)
        self.book.map_pages(slot, prefix_pages)
        self.book.sealed[slot] = len(prefix_pages)
        if not prefilling:
            self._hold_tail_only(slot)

    def append(self, slot: int, pages: Sequence[int]) -> bool:
        """New logical pages for the slot's next tokens, each with a device page. False: too few device pages are free."""
        device_pages = self.device_pages.lease(len(pages), Owner.RESIDENT, 0)
        if device_pages is None:
            return False
        for page, device_page in zip(pages, device_pages, strict=True):
            self.device_pages.transfer(device_page, page)
            self._set_device_page(page, device_page)
            self.book.state[page] = _OPEN
            self.book.last_use[page] = self.step
        self.book.map_pages(slot, pages)
        if not self.book.prefilling[slot]:
            self._hold_tail_only(slot)
        return True

    def note_launch(self, slots: Sequence[int], seq_lens: Sequence[int], prefill_ends: Sequence[bool]) -> None:
        """A forward that writes tokens [.., seq_len) of each slot has just been launched: seal the pages it fills.

        `prefill_ends[i]`: this forward is the request's last prefill chunk, or a decode step. Sealed means written by
        launched forwards and never rewritten (R8, R9); a copy of a sealed page waits for the last launched forward.
        """
        self.step += 1
        book = self.book
        slot_array = np.asarray(slots, dtype=np.int64)
        full_pages = np.minimum(np.asarray(seq_lens, dtype=np.int64) // self.limits.page_size, book.num_pages[slot_array])
        ended = np.asarray(prefill_ends, dtype=bool) & book.prefilling[slot_array]
        # Most decode steps fill no page: only the rows that do are looked at one by one.
        for index in np.flatnonzero((full_pages > book.sealed[slot_array]) | ended).tolist():
            slot, full = int(slot_array[index]), int(full_pages[index])
            for page in book.slot_pages[slot, book.sealed[slot] : full].tolist():
                if book.state[page] == _OPEN:
                    book.state[page] = _DIRTY
                    self._dirty[page] = None
            book.sealed[slot] = max(int(book.sealed[slot]), full)
            if ended[index]:
                book.prefilling[slot] = False
                self._hold_tail_only(slot)

    def unmap(self, slot: int, start: int, end: int) -> list[int]:
        """Take positions [start, end) out of the slot's row, before they are freed; returns the pages that were there."""
        return self.book.unmap_pages(slot, start, end)

    def replace(self, slot: int, start: int, pages: Sequence[int]) -> list[int]:
        """The radix tree has replaced the slot's pages from `start` on by its own; returns the slot's old ones, to be freed.

        A tree page that is host-only takes over the device page of the resident duplicate (same bytes), so that the request
        keeps its residency (R22). Hot rows are forgotten: they were copied from rows of the old pages.
        """
        old_pages = []
        for position, page in enumerate(pages, start):
            if self.book.slot_pages[slot, position] == page:
                continue
            old = self.book.replace_page(slot, position, page)
            if self.book.state[page] == _HOST and _DIRTY <= self.book.state[old] <= _CLEAN:
                self._rehome(old, page)
            old_pages.append(old)
        if old_pages and self.book.leased[slot]:
            self._lease_changes[slot] = None
        return old_pages

    def release(self, slot: int) -> None:
        """The request is gone (finished, aborted, retracted, flushed): its lease and holds end. Idempotent (R12).

        Pages are not freed here: they leave through `free` alone (R11).
        """
        self.release_lease(slot)
        if self.book.live[slot]:
            self.book.last_use[self.book.pages(slot)] = self.step
            self.book.close_slot(slot)

    # -- pages ------------------------------------------------------------------------------------------------------

    def free(self, pages: Iterable[int]) -> None:
        """Logical pages end. Their ids and device pages may be handed out at once: every change of what a launched forward
        reads is queued for the next plan, which runs behind that forward."""
        for page in pages:
            state = self.book.state[page]
            if state == _FREE:
                raise InvariantError(f"logical page {page} is freed twice")
            if state != _HOST:
                self.device_pages.release((int(self.book.device_page[page]),), Owner.RESIDENT, page)
            self.book.state[page] = _FREE
            self._set_device_page(page, 0)
            self.book.forget_transfer(page)
            self._dirty.pop(page, None)
            self.book.give_back(page)

    def is_landing_target(self, page: int) -> bool:
        """False while a host write of an earlier owner may still land in the page's host rows (R7)."""
        return not self._in_flight.get(page)

    def _set_device_page(self, page: int, device_page: int) -> None:
        self.book.device_page[page] = device_page
        self._table_changes[page] = None
        self._promotions.pop(page, None)

    def _rehome(self, old: int, page: int) -> None:
        device_page = int(self.book.device_page[old])
        is_promoted = old in self._promotions  # its bytes are still to come, from either host row
        self.device_pages.transfer(device_page, page)
        self._set_device_page(page, device_page)
        if is_promoted:
            self._promotions[page] = device_page
        # The tree page's host copy is complete or ordered before any reader, so it is CLEAN; the old id lives on the host
        # until `free` ends it, and nobody reads it.
        self.book.state[page] = _CLEAN if not self.book.transfer[page] else _MIRRORING
        self.book.state[old] = _HOST
        self._set_device_page(old, 0)
        self.book.forget_transfer(old)
        self._dirty.pop(old, None)
        self.counters.pages_rehomed += 1

    def _hold_tail_only(self, slot: int) -> None:
        self.book.set_held_from(slot, max(0, int(self.book.num_pages[slot]) - self.limits.tail_pages))

    # -- mirror -----------------------------------------------------------------------------------------------------

    def mirror(self, pages: Iterable[int]) -> None:
        """Plan host copies of DIRTY pages and put them on the copy stream. Others are passed over."""
        transfers = []
        for page in pages:
            if self.book.state[page] != _DIRTY:
                continue
            transfer_id = self._next_transfer_id
            self._next_transfer_id += 1
            self.book.state[page] = _MIRRORING
            self.book.transfer[page] = transfer_id
            self._dirty.pop(page, None)
            self._transfers[transfer_id] = page
            self._in_flight[page] = self._in_flight.get(page, 0) + 1
            transfers.append(PageTransfer(transfer_id, page, int(self.book.device_page[page])))
        if transfers:
            self.counters.pages_mirrored += len(transfers)
            self.on_enqueued(self._mirror_sink(transfers))

    def mirror_backlog(self, limit: int) -> list[int]:
        """The oldest DIRTY pages, at most `limit`."""
        return [page for page, _ in zip(self._dirty, range(limit))]

    @property
    def link_rests(self) -> bool:
        """Whether copies have failed so recently that only pressure should try again."""
        return self.step < self._rest_until

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    @property
    def has_transfers(self) -> bool:
        """Whether a host copy is planned or under way: the system is not idle (R29)."""
        return bool(self._transfers)

    def on_enqueued(self, transfer_ids: Iterable[int]) -> None:
        """These copies are on the copy stream: every later writer of their device pages is ordered behind them."""
        for transfer_id in transfer_ids:
            early = self._completed_early.pop(transfer_id, None)
            page = self._transfers.get(transfer_id, early)
            if page is None or self.book.transfer[page] != transfer_id:
                self.counters.stale_acknowledgements += 1
                continue
            self.book.enqueued[page] = True
            self.failures_in_row = 0
            self._note_enqueued(transfer_id)
            if early is not None:
                self._publish(page)

    def _note_enqueued(self, transfer_id: int) -> None:
        marks = self._enqueued_at
        if marks and marks[-1][0] == self.step:
            transfer_id = max(transfer_id, marks.pop()[1])
        marks.append((self.step, transfer_id))

    def on_completed(self, transfer_ids: Iterable[int]) -> None:
        """These copies have been observed to be complete: their host pages may be read by the CPU."""
        for transfer_id in transfer_ids:
            page = self._transfers.pop(transfer_id, None)
            if page is None:
                self.counters.stale_acknowledgements += 1
                continue
            self._land(page)
            if self.book.transfer[page] != transfer_id:
                self.counters.stale_acknowledgements += 1
            elif self.book.enqueued[page]:
                self._publish(page)
            else:
                # Other ranks may not have seen it yet; a page becomes releasable by *enqueued*, on all ranks at once.
                self._completed_early[transfer_id] = page

    def _publish(self, page: int) -> None:
        """The host copy of `page` is complete."""
        self.book.forget_transfer(page)
        if self.book.state[page] == _MIRRORING:
            self.book.state[page] = _CLEAN

    def on_failed(self, transfer_ids: Iterable[int]) -> None:
        """These copies never reached the copy stream: their pages are DIRTY again and will be planned anew, by pressure at
        once, by eager mirroring after a rest that grows with each failure."""
        failed_before = self.counters.copies_failed
        for transfer_id in transfer_ids:
            page = self._transfers.pop(transfer_id, None)
            if page is None:
                self.counters.stale_acknowledgements += 1
                continue
            self._land(page)
            if self.book.transfer[page] != transfer_id:
                continue
            if self.book.state[page] != _MIRRORING or self.book.enqueued[page]:
                raise InvariantError(f"I1: transfer {transfer_id} of page {page} failed after it was enqueued")
            self.book.forget_transfer(page)
            self.book.state[page] = _DIRTY
            self._dirty[page] = None
            self.counters.copies_failed += 1
        if self.counters.copies_failed > failed_before:
            self.failures_in_row += 1
            self._rest_until = self.step + min(2**self.failures_in_row, MAX_BACKOFF_STEPS)

    def _land(self, page: int) -> None:
        left = self._in_flight[page] - 1
        if left:
            self._in_flight[page] = left
        else:
            del self._in_flight[page]

    # -- spill, promote, lease --------------------------------------------------------------------------------------

    def spill(self, pages: Iterable[int]) -> None:
        """Give up the device pages of `pages`, whose host copies are complete or on the copy stream (I1, R19)."""
        book = self.book
        for page in pages:
            if not (book.state[page] == _CLEAN or (book.state[page] == _MIRRORING and book.enqueued[page])):
                raise InvariantError(f"I1: page {page} is {PageState(book.state[page]).name}, its host copy is not on its way")
            if book.holds[page] or book.unleased[page]:
                raise InvariantError(f"R19: page {page} has {book.holds[page]} holds, {book.unleased[page]} users without a lease")
            self.device_pages.release((int(book.device_page[page]),), Owner.RESIDENT, page)
            self._wait_transfer_id = max(self._wait_transfer_id, int(book.transfer[page]))
            self._set_device_page(page, 0)
            book.state[page] = _HOST
            self.counters.pages_spilled += 1

    def promote(self, pages: Sequence[int]) -> bool:
        """Bring host-only pages back before the next forward. False: too few device pages are free; nothing is done then."""
        device_pages = self.device_pages.lease(len(pages), Owner.RESIDENT, 0)
        if device_pages is None:
            return False
        for page, device_page in zip(pages, device_pages, strict=True):
            if self.book.state[page] != _HOST:
                raise InvariantError(f"page {page} is {PageState(self.book.state[page]).name}, only a host-only page is promoted")
            self.device_pages.transfer(device_page, page)
            self._set_device_page(page, device_page)
            self._promotions[page] = device_page
            # A copy of it that is still in flight was enqueued (I1): MIRRORING tells that, CLEAN that there is none.
            self.book.state[page] = _MIRRORING if self.book.transfer[page] else _CLEAN
            self.counters.pages_promoted += 1
        return True

    def acquire_lease(self, slot: int) -> bool:
        """Give `slot` a hot buffer. False: too few device pages are free. A slot that holds one keeps it."""
        if slot in self.hot_lease:
            return True
        pages = self.device_pages.lease(self.limits.hot_pages, Owner.HOT, slot)
        if pages is None:
            return False
        self.hot_lease[slot] = pages
        self.book.set_leased(slot, True)
        self._lease_changes[slot] = None
        self.counters.leases_acquired += 1
        return True

    def release_lease(self, slot: int) -> None:
        """Take the slot's hot buffer back. The caller has made its pages resident, or the request is gone."""
        pages = self.hot_lease.pop(slot, None)
        if pages is None:
            return
        self.device_pages.release(pages, Owner.HOT, slot)
        self.book.set_leased(slot, False)
        self._lease_changes[slot] = None
        self.counters.leases_released += 1

    # -- the step ---------------------------------------------------------------------------------------------------

    def take_plan(self) -> StepPlan:
        """Everything that the next forward must find done on its stream; the plan is empty when nothing changed."""
        while self._enqueued_at and self._enqueued_at[0][0] <= self.step - self.policy.mirror_lag_steps:
            # Nothing depends on this copy. Waiting for it is what slows prefill down to a link that is behind.
            self._wait_transfer_id = max(self._wait_transfer_id, self._enqueued_at.popleft()[1])
        plan = StepPlan(
            step=self.step,
            wait_transfer_id=self._wait_transfer_id,
            promotions=tuple(Promotion(page, device_page) for page, device_page in self._promotions.items()),
            table=tuple((page, int(self.book.device_page[page])) for page in self._table_changes),
            leases=tuple(LeaseChange(slot, tuple(self.hot_lease.get(slot, ()))) for slot in self._lease_changes),
        )
        self._reset_plan()
        return plan

    def residency(self, slot: int) -> Residency:
        """FULL: no page is host-only; NONE: no page beyond the held tail is resident; MIXED: between."""
        row = self.book.pages(slot)
        on_host = self.book.state[row] == _HOST
        if not on_host.any():
            return Residency.FULL
        return Residency.NONE if on_host[: self.book.held_from[slot]].all() else Residency.MIXED

    def check_step(self, slots: Sequence[int]) -> None:
        """Every request of the coming forward that has a host-only page holds a lease (R19)."""
        leased = self.book.leased[np.asarray(slots, dtype=np.int64)]
        for slot in np.asarray(slots)[~leased].tolist():
            if self.book.host_pages(slot):
                raise InvariantError(f"R19: request slot {slot} has host-only pages and no hot lease")
