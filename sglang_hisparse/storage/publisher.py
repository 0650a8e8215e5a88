"""Publishing: pages of the radix tree whose host copy is complete go to storage, a batch at a time.

The scheduler's thread notes pages and starts batches (`tick`); a thread of its own copies a page into a buffer, makes sure that
the page had not ended meanwhile, and hands the buffer to the backend. It holds nothing: a page may be freed at any time, which
raises its generation, and what was read of it is then dropped. It must never make the scheduler wait.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_hisparse.residency.page_book import PageBook
from sglang_hisparse.residency.types import NO_TRANSFER, PageState
from sglang_hisparse.storage.backend import Store
from sglang_hisparse.storage.counters import StorageCounters
from sglang_hisparse.storage.page_bytes import Moment, PageBytes
from sglang_hisparse.storage.unit import UnitFormat

logger = logging.getLogger(__name__)

#: noted pages that one tick looks at: the oldest, which are the first to be complete
LOOK_AT = 512
_COMPLETE = (int(PageState.CLEAN), int(PageState.HOST))


@dataclass(frozen=True, slots=True)
class _Item:
    """One page to publish, as it was when its batch was started."""

    page: int
    generation: int
    page_hash: str


@dataclass(frozen=True, slots=True)
class _Batch:
    """items[i] has its index-K in slot i of the staging memory once `pulled` has passed."""

    items: tuple[_Item, ...]
    pulled: Moment


class Publisher:
    """One for the rank that publishes."""

    def __init__(
        self,
        book: PageBook,
        unit: UnitFormat,
        store: Store,
        page_bytes: PageBytes,
        counters: StorageCounters,
        *,
        batch: int,
    ) -> None:
        self._book, self._unit, self._store, self._bytes, self._counters = book, unit, store, page_bytes, counters
        self._batch_pages = batch
        self._noted: dict[int, tuple[int, str]] = {}  # page -> (generation, hash), in the order of noting
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._in_flight: _Batch | None = None
        self._done = threading.Event()
        self._buffer = torch.empty(unit.num_bytes, dtype=torch.uint8)
        self._thread = threading.Thread(target=self._run, name="hisparse-publish", daemon=True)
        self._thread.start()

    # -- on the scheduler's thread ----------------------------------------------------------------------------------

    def note(self, pages: Sequence[int], hashes: Sequence[str]) -> None:
        """The radix tree now owns these pages: publish them once their host copies are complete."""
        for page, page_hash in zip(pages, hashes, strict=True):
            self._noted[page] = (int(self._book.generation[page]), page_hash)

    def tick(self) -> None:
        """Start the next batch, if none is under way and pages are ready. Cheap when there is nothing to do."""
        if self._in_flight is not None:
            if not self._done.is_set():
                return
            self._in_flight = None
        if not self._noted:
            return
        items = self._take_ready()
        if items:
            self._done.clear()
            self._in_flight = _Batch(tuple(items), self._bytes.pull_index([item.page for item in items]))
            self._queue.put(self._in_flight)

    def _take_ready(self) -> list[_Item]:
        """The oldest noted pages that are complete, a batch at most; those that have ended are dropped."""
        book = self._book
        first = list(itertools.islice(self._noted.items(), LOOK_AT))
        index = np.fromiter((page for page, _ in first), dtype=np.int64, count=len(first))
        generations = np.fromiter((noted[0] for _, noted in first), dtype=np.int64, count=len(first))
        ended = book.generation[index] != generations
        complete = np.isin(book.state[index], _COMPLETE) & (book.transfer[index] == NO_TRANSFER) & ~ended
        for page in index[ended].tolist():
            del self._noted[page]
        self._counters.add("pages_dropped", int(np.count_nonzero(ended)))
        items = []
        for page in index[complete][: self._batch_pages].tolist():
            generation, page_hash = self._noted.pop(page)
            items.append(_Item(page, generation, page_hash))
        if not items:
            # None of the oldest is complete (their copies wait for pressure): look at the next ones another time.
            for page, noted in itertools.islice(first, len(first) if len(self._noted) > LOOK_AT else 0):
                if page in self._noted:
                    del self._noted[page]
                    self._noted[page] = noted
        return items

    @property
    def backlog(self) -> int:
        """Pages noted and not yet handed to the backend, those of the running batch included."""
        running = self._in_flight
        return len(self._noted) + (0 if running is None or self._done.is_set() else len(running.items))

    @property
    def reads_index_keys(self) -> bool:
        """Whether a copy of index-K is under way on the device."""
        return self._in_flight is not None and not self._in_flight.pulled.has_passed

    def forget(self) -> None:
        """The tree was emptied: what is not under way is not published any more."""
        self._counters.add("pages_dropped", len(self._noted))
        self._noted.clear()

    def settle(self) -> None:
        """Wait until no copy of index-K is under way (the device's memory may be released next)."""
        if self._in_flight is not None:
            self._in_flight.pulled.wait()

    def drain(self, seconds: float) -> bool:
        """Publish what is complete, for at most `seconds` (shutdown only). False: something was left."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.tick()
            if self._in_flight is None:
                return not self._noted
            self._done.wait(0.01)
        return False

    def close(self) -> None:
        """End the thread after its batch; the caller has closed the page bytes, so it copies nothing more."""
        self._queue.put(None)
        self._thread.join(timeout=2)

    # -- on its own thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                batch.pulled.wait(lambda: self._bytes.closed)
                for slot, item in enumerate(batch.items):
                    self._publish(slot, item)
            except Exception:
                self._counters.add("errors")
                logger.exception("hisparse: storage: a batch of pages was not published")
            finally:
                self._done.set()

    def _publish(self, slot: int, item: _Item) -> None:
        key = self._unit.key(item.page_hash)
        if self._store.count_leading([key]):
            return
        with self._bytes.guard:
            if self._bytes.closed:
                self._counters.add("pages_dropped")
                return
            self._bytes.read_kv(item.page, self._unit.kv(self._buffer))
            self._bytes.pulled_index(slot, self._unit.index(self._buffer))
        # A page keeps its bytes until it is freed. Freed before this line: what was read may be the next owner's.
        if self._book.generation[item.page] != item.generation:
            self._counters.add("pages_dropped")
            return
        self._unit.seal(self._buffer.numpy(), item.page_hash)
        published = self._store.put(key, self._buffer)
        self._counters.add("pages_published" if published else "pages_dropped")
