"""Host copies and their two acknowledgements: the half of the coordinator that talks to the copy stream.

Base of ResidencyCoordinator and of nothing else. A copy is *enqueued* (every later writer of its device page is ordered behind
it; decisions look at this alone, because all ranks see it in the same step) and later *completed* (the CPU may read the host
page; ranks see it at different times, so no decision looks at it). It copies nothing and knows no request.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency.page_book import PageBook
from sglang_hisparse.residency.types import PageState, PageTransfer, ResidencyCounters, ResidencyPolicy

# As plain numbers: an enum's attribute costs more than the comparison, and these run per page and step.
_DIRTY, _MIRRORING, _CLEAN = int(PageState.DIRTY), int(PageState.MIRRORING), int(PageState.CLEAN)

# After n failures in a row, eager mirroring rests for 2^n forwards, at most this many.
MAX_BACKOFF_STEPS = 64

MirrorSink = Callable[[list[PageTransfer]], Iterable[int]]


class HostCopies:
    """Planned and running copies of sealed pages, by transfer id.

    `mirror_sink` puts copies on the copy stream at once and returns the ids that it acknowledges as enqueued; the others
    may be acknowledged later through `on_enqueued`, or never (`on_failed`).
    """

    def __init__(self, policy: ResidencyPolicy, book: PageBook, mirror_sink: MirrorSink) -> None:
        self.policy = policy
        self.book = book
        self.counters = ResidencyCounters()
        self.step = 0  # forwards launched so far
        self._mirror_sink = mirror_sink
        self._next_transfer_id = 1
        self._transfers: dict[int, int] = {}  # id -> logical page, until completed
        self._completed_early: dict[int, int] = {}  # id -> logical page, completed and not yet acknowledged as enqueued
        self._in_flight: dict[int, int] = {}  # logical page -> host writes not completed (R7)
        self._erasing: Counter[int] = Counter()  # logical page -> times that the audit still overwrites its host rows (R7)
        self._sources: dict[int, int] = {}  # id -> device page, while it is neither enqueued nor failed
        # Newest copy on the copy stream that reads each device page, whoever owns the page by now.
        self._last_copy = np.zeros(book.limits.num_device_pages + 1, dtype=np.int64)
        self._dirty: dict[int, None] = {}  # DIRTY pages in the order of sealing
        self._enqueued_at: deque[tuple[int, int]] = deque()  # (step, newest id enqueued in it), not yet waited for
        self.failures_in_row = 0  # rounds of copies that failed since one did not
        self._rest_until = 0  # step before which eager mirroring rests

    def _forget_copies(self) -> None:
        """Acknowledgements of transfers begun before this change nothing (I5): their ids are gone."""
        self._transfers.clear()
        self._completed_early.clear()
        self._in_flight.clear()
        self._sources.clear()
        self._last_copy.fill(0)
        self._dirty.clear()
        self._enqueued_at.clear()

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
            self._sources[transfer_id] = int(self.book.device_page[page])
            transfers.append(PageTransfer(transfer_id, page, self._sources[transfer_id]))
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

    @property
    def has_unsent(self) -> bool:
        """Whether a copy is planned that is neither on the copy stream nor failed."""
        return bool(self._sources)

    def on_enqueued(self, transfer_ids: Iterable[int]) -> None:
        """These copies are on the copy stream: every later writer of their device pages is ordered behind them."""
        newest = 0
        for transfer_id in transfer_ids:
            if (source := self._sources.pop(transfer_id, None)) is not None:
                self._last_copy[source] = max(int(self._last_copy[source]), transfer_id)
            early = self._completed_early.pop(transfer_id, None)
            page = self._transfers.get(transfer_id, early)
            if page is None or self.book.transfer[page] != transfer_id:
                self.counters.stale_acknowledgements += 1
                continue
            self.book.enqueued[page] = True
            if not self.book.users[page]:
                self.book.moves += 1  # one page more that nobody uses can leave without a copy
            newest = max(newest, transfer_id)
            if early is not None:
                self._publish(page)
        if newest:
            self.failures_in_row = 0
            self._note_enqueued(newest)

    def _note_enqueued(self, transfer_id: int) -> None:
        marks = self._enqueued_at
        if marks and marks[-1][0] == self.step:
            transfer_id = max(transfer_id, marks.pop()[1])
        marks.append((self.step, transfer_id))

    def on_completed(self, transfer_ids: Iterable[int]) -> None:
        """These copies have been observed to be complete: their host pages may be read by the CPU."""
        for transfer_id in transfer_ids:
            if (page := self._end_transfer(transfer_id)) is None:
                continue
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
            self._sources.pop(transfer_id, None)
            if (page := self._end_transfer(transfer_id)) is None:
                continue
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

    def _end_transfer(self, transfer_id: int) -> int | None:
        """Its host write lands no more; the page that it was for, None where it is forgotten (I5)."""
        page = self._transfers.pop(transfer_id, None)
        if page is None:
            self.counters.stale_acknowledgements += 1
        elif left := self._in_flight[page] - 1:
            self._in_flight[page] = left
        else:
            del self._in_flight[page]
        return page

    def is_landing_target(self, page: int) -> bool:
        """False while a host write of an earlier owner may still land in the page's host rows (R7)."""
        return not self._in_flight.get(page) and page not in self._erasing

    def begin_erasing(self, pages: Iterable[int]) -> None:
        """The host rows of these freed pages will be overwritten: nothing may land in them before (the audit's poison)."""
        self._erasing.update(pages)

    def end_erasing(self, pages: Iterable[int]) -> None:
        """They have been, once for each page given."""
        self._erasing -= Counter(pages)

    def _is_being_sent(self, above: int) -> bool:
        """Whether a copy is planned that will read a device page above this one, and is not on the copy stream yet."""
        return any(source > above for source in self._sources.values())

    def _overdue_transfer(self) -> int:
        """The newest copy that the coming forward must wait for although nothing depends on it; 0: none.

        Waiting for it is what slows prefill down to a link that is behind.
        """
        overdue = 0
        while self._enqueued_at and self._enqueued_at[0][0] <= self.step - self.policy.mirror_lag_steps:
            overdue = self._enqueued_at.popleft()[1]
        return overdue
