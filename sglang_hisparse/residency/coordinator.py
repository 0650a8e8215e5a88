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

from collections.abc import Iterable, Sequence

import numpy as np

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import sharing, streams
from sglang_hisparse.residency.device_pages import DevicePages, Owner
from sglang_hisparse.residency.host_copies import HostCopies, MirrorSink
from sglang_hisparse.residency.page_book import PageBook
from sglang_hisparse.residency.types import (
    LeaseChange,
    PageState,
    Promotion,
    Relocation,
    Residency,
    ResidencyLimits,
    ResidencyPolicy,
    StepPlan,
    StreamPlan,
    StreamWindow,
)

# As plain numbers: an enum's attribute costs more than the comparison, and these run per page and step.
_FREE, _OPEN, _DIRTY, _MIRRORING, _CLEAN, _HOST = (int(state) for state in PageState)
_NO_CHANGE = StepPlan(0, 0, (), (), ())


class ResidencyCoordinator(HostCopies):
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
        super().__init__(policy, PageBook(limits), mirror_sink)
        self.limits = limits
        self.device_pages = device_pages
        self.hot_lease: dict[int, list[int]] = {}  # slot -> device pages
        self._checked: tuple[int, Sequence[int]] = -1, ()  # moves of the book and request slots of the last step that was checked
        self._reset_plan()

    def _reset_plan(self) -> None:
        self._table_changes: dict[int, None] = {}
        self._promotions: dict[int, int] = {}
        self._lease_changes: dict[int, None] = {}
        self._relocations: dict[int, int] = {}  # device page -> the one that takes its bytes over
        self._vacates = False
        self._wait_transfer_id = 0

    def clear(self) -> None:
        """Everything is free again. Acknowledgements of transfers begun before this change nothing (I5): their ids are gone.

        The caller has drained the copy stream and rewrites the whole page table and all leases itself.
        """
        self.book.clear()
        self.device_pages.clear()
        self._forget_copies()
        self.hot_lease.clear()
        self._reset_plan()

    # -- requests ---------------------------------------------------------------------------------------------------

    def attach(
        self,
        slot: int,
        prefix_pages: Sequence[int],
        *,
        final_pages: int,
        prompt_pages: int = 0,
        prefilling: bool = True,
        streamed: bool = False,
        bounded: bool = False,
        kept: bool = False,
    ) -> None:
        """A request takes `slot`, with the prefix pages it shares. All its pages are held while it is being prefilled.

        `prompt_pages`: device pages that its prefill needs at worst, without the one to grow into (all of its prompt, unless it
        is streamed); `final_pages`: pages at its own end, and never more where that is `bounded`. The admission ledger counts with
        them (`PageBook.committed_pages`), in the form that admission has said (`kept`). `streamed`: its extends read host-only
        pages through the scratch, so it holds a lease from now on, and no page but those that are still being written; room
        for the lease has been made.
        """
        if streamed and not self.acquire_lease(slot):
            raise InvariantError(f"I7: request slot {slot} was promised a hot lease and too few device pages are free")
        form = {"bounded": bounded, "kept": kept and not streamed}
        self.book.open_slot(slot, prefilling=prefilling, prompt_pages=prompt_pages, final_pages=final_pages, **form)
        self.book.map_pages(slot, prefix_pages)
        self.book.sealed[slot] = len(prefix_pages)
        if not prefilling:
            self._hold_tail_only(slot)
        elif streamed:
            self.book.set_held_from(slot, len(prefix_pages))

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
        full_pages = np.asarray(seq_lens, dtype=np.int64) // self.limits.page_size
        moving = (full_pages > book.sealed[slot_array]) | book.prefilling[slot_array]
        # Most decode steps fill no page: only the rows that do are looked at one by one.
        for index in moving.nonzero()[0].tolist():
            slot = int(slot_array[index])
            full, ended = min(int(full_pages[index]), int(book.num_pages[slot])), bool(prefill_ends[index] and book.prefilling[slot])
            for page in book.slot_pages[slot, book.sealed[slot] : full].tolist():
                if book.state[page] == _OPEN:
                    book.state[page] = _DIRTY
                    self._dirty[page] = None
            book.sealed[slot] = max(int(book.sealed[slot]), full)
            if ended:
                book.end_prefill(slot)
                sharing.settle(book, slot)
                self._hold_tail_only(slot)
            elif book.streams(slot):
                book.set_held_from(slot, int(book.sealed[slot]))

    def note_quiet_launch(self) -> None:
        """A decode step has just been launched that fills no page and is not the first of any of its requests."""
        self.step += 1

    def unmap(self, slot: int, start: int, end: int) -> list[int]:
        """Take positions [start, end) out of the slot's row, before they are freed; returns the pages that were there."""
        return self.book.unmap_pages(slot, start, end)

    def replace(self, slot: int, start: int, pages: Sequence[int]) -> list[int]:
        """The radix tree has replaced the slot's pages from `start` on by its own; returns the slot's old ones, to be freed.

        A tree page that is host-only takes over the device page of the resident duplicate (same bytes), so that the request
        keeps its residency (R22). Hot rows are forgotten: they were copied from rows of the old pages.
        """
        old_pages = []
        row = self.book.slot_pages[slot, start : start + len(pages)]
        for index in np.flatnonzero(row != np.asarray(pages, dtype=np.int32)).tolist():
            position, page = start + index, pages[index]
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
        book, ended = self.book, list(pages)
        if not ended:
            return
        index = np.asarray(ended, dtype=np.int64)
        state = book.state[index]
        if (state == _FREE).any() or len(set(ended)) != len(ended):
            page = next(page for at, page in enumerate(ended) if state[at] == _FREE or page in ended[:at])
            raise InvariantError(f"logical page {page} is freed twice")
        resident = index[state != _HOST]
        self.device_pages.release(book.device_page[resident].tolist(), Owner.RESIDENT, resident)
        book.state[index] = _FREE
        self._forget_device_pages(ended, index)
        book.forget_transfer(index)
        for page in ended:
            self._dirty.pop(page, None)
        book.give_back(ended)

    def adopt(self, pages: Iterable[int]) -> None:
        """Pages that `book.allocate` gave, whose host rows have been filled by the CPU, begin their life host-only.

        The caller has waited for readers and host writes of their former owners (`is_landing_target`, R7).
        """
        self.book.moves += 1
        for page in pages:
            if self.book.state[page] != _FREE or not self.is_landing_target(page):
                raise InvariantError(f"logical page {page} is {PageState(self.book.state[page]).name} and cannot be adopted")
            self.book.state[page] = _HOST
            self.book.last_use[page] = self.step

    def _set_device_page(self, page: int, device_page: int) -> None:
        self.book.device_page[page] = device_page
        self._table_changes[page] = None
        self._promotions.pop(page, None)

    def _forget_device_pages(self, pages: list[int], index: np.ndarray) -> None:
        """`_set_device_page` to none, of many pages; index: the same as an array."""
        self.book.device_page[index] = 0
        self._table_changes.update(dict.fromkeys(pages))
        if self._promotions:
            for page in pages:
                self._promotions.pop(page, None)

    def _rehome(self, old: int, page: int) -> None:
        self.book.moves += 1
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

    # -- spill, promote, lease --------------------------------------------------------------------------------------

    def spill(self, pages: Iterable[int]) -> None:
        """Give up the device pages of `pages`, whose host copies are complete or on the copy stream (I1, R19)."""
        book, spilled = self.book, list(pages)
        if not spilled:
            return
        index = np.asarray(spilled, dtype=np.int64)
        state = book.state[index]
        for page in index[(state != _CLEAN) & ~((state == _MIRRORING) & book.enqueued[index])].tolist():
            raise InvariantError(f"I1: page {page} is {PageState(book.state[page]).name}, its host copy is not on its way")
        for page in index[(book.holds[index] != 0) | (book.unleased[index] != 0)].tolist():
            raise InvariantError(f"R19: page {page} has {book.holds[page]} holds, {book.unleased[page]} users without a lease")
        book.moves += 1
        self.device_pages.release(book.device_page[index].tolist(), Owner.RESIDENT, index)
        self._wait_transfer_id = max(self._wait_transfer_id, int(book.transfer[index].max()))
        book.state[index] = _HOST
        self._forget_device_pages(spilled, index)
        self.counters.pages_spilled += len(spilled)

    def promote(self, pages: Sequence[int]) -> bool:
        """Bring host-only pages back before the next forward. False: too few device pages are free; nothing is done then."""
        device_pages = self.device_pages.lease(len(pages), Owner.RESIDENT, 0)
        if device_pages is None:
            return False
        self.book.moves += 1
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

    # -- the border -------------------------------------------------------------------------------------------------

    def can_withhold(self, limit: int) -> bool:
        """Whether the device pages above `limit` could be vacated now: no copy of one is still to be put on the copy stream."""
        return not self._is_being_sent(limit)

    def withhold(self, limit: int) -> None:
        """Device pages above `limit` lose their owners: what lies there moves below, by the next plan.

        Called just before `take_plan`, with as many pages free as leave: a copy to the host planned between the two would read a
        page to which nothing has been copied yet. Copies that read the old pages are waited for by the same plan.
        """
        pages = self.device_pages
        leaving = slice(limit + 1, pages.num_usable + 1)
        self._wait_transfer_id = max(self._wait_transfer_id, int(self._last_copy[leaving].max(initial=0)))
        for source in pages.withhold(limit):
            owner, owner_id = pages.owner[source], int(pages.owner_id[source])
            target = pages.vacate(source)
            if owner == Owner.RESIDENT:
                self._relocate(owner_id, source, target)
            else:
                lease = self.hot_lease[owner_id]
                lease[lease.index(source)] = target
                self._lease_changes[owner_id] = None  # its hot rows are forgotten, so that none need be copied
        self._vacates = True

    def withdraw(self, limit: int) -> None:
        """Logical pages above `limit`, which nobody has, lose their index-K: launched forwards pass the next plan first."""
        self.book.shrink_to(limit)
        self._vacates = True

    def _relocate(self, page: int, source: int, target: int) -> None:
        is_promoted = page in self._promotions  # its bytes are still to come: to the new page then
        self._set_device_page(page, target)
        if is_promoted:
            self._promotions[page] = target
        else:
            self._relocations[source] = target
        self.counters.pages_relocated += 1

    # -- the step ---------------------------------------------------------------------------------------------------

    def take_plan(self) -> StepPlan:
        """Everything that the next forward must find done on its stream; the plan is empty when nothing changed."""
        wait_transfer_id = max(self._wait_transfer_id, self._overdue_transfer())
        if not (wait_transfer_id or self._table_changes or self._lease_changes or self._vacates):
            return _NO_CHANGE  # who promotes or moves a page changes the table
        plan = StepPlan(
            step=self.step,
            wait_transfer_id=wait_transfer_id,
            promotions=tuple(Promotion(page, device_page) for page, device_page in self._promotions.items()),
            table=tuple((page, int(self.book.device_page[page])) for page in self._table_changes),
            leases=tuple(LeaseChange(slot, tuple(self.hot_lease.get(slot, ()))) for slot in self._lease_changes),
            relocations=tuple(Relocation(source, target) for source, target in self._relocations.items()),
            vacates=self._vacates,
        )
        self._reset_plan()
        return plan

    def plan_stream(self, slots: Sequence[int]) -> StreamPlan | None:
        """Where the coming extend of `slots` finds its pages, each page once; None when all of them are resident.

        Asked after `take_plan`: host rows and device pages are those that the forward stream has then.
        """
        return streams.plan_of(self.book, slots)

    def plan_windows(self, slots: Sequence[int], new_tokens: Sequence[int], num_pages: int) -> list[StreamWindow]:
        """The same for a scratch of `num_pages` pages that does not hold them all: window after window."""
        return streams.windows_of(self.book, slots, new_tokens, num_pages)

    def residency(self, slot: int) -> Residency:
        """FULL: no page is host-only; NONE: no page beyond the held tail is resident; MIXED: between."""
        row = self.book.pages(slot)
        on_host = self.book.state[row] == _HOST
        if not on_host.any():
            return Residency.FULL
        return Residency.NONE if on_host[: self.book.held_from[slot]].all() else Residency.MIXED

    def check_step(self, slots: Sequence[int]) -> None:
        """Every request of the coming forward that has a host-only page holds a lease (R19)."""
        if self._checked[1] is slots and self._checked[0] == self.book.moves:
            return  # as it was in the step before
        self._checked = self.book.moves, slots
        slot_array = np.asarray(slots, dtype=np.int64)
        unleased = slot_array[~self.book.leased[slot_array]]
        for slot in unleased[self.book.host_counts(unleased) != 0].tolist():
            raise InvariantError(f"R19: request slot {slot} has host-only pages and no hot lease")
