"""Loading: the threads that look pages up and read them from storage into the host tier.

The scheduler's thread hands it a `Lookup` or a `Read` and asks from time to time whether it is finished. A read writes only into
logical pages that were allocated for it, page after page, each verified first; after `Read.stop` it writes no more. It decides
nothing: what becomes of the pages is for `prefetch` to say.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_hisparse.storage.backend import Store
from sglang_hisparse.storage.counters import StorageCounters
from sglang_hisparse.storage.page_bytes import Moment, PageBytes
from sglang_hisparse.storage.unit import UnitFormat

logger = logging.getLogger(__name__)

#: units read side by side, the memory they may take, and the threads that read and verify them
READ_UNITS, READ_BYTES, READERS = 8, 64 << 20, 4
#: keys looked up in one call of the backend; HiCache uses as many
LOOKUP_KEYS = 128


@dataclass(slots=True)
class Lookup:
    """How many pages of a token sequence storage has, from page `start` on. key: RadixKey of whole pages."""

    key: Any
    start: int
    hashes: list[str] = field(default_factory=list)  # of all pages of the key
    count: int = 0
    finished: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class Read:
    """Fill logical `pages` with the units of `hashes`, in order, up to the first that is not there whole.

    after: readers of the pages' former owners are done when it has passed. loaded: pages that are filled.
    """

    pages: Sequence[int]
    hashes: Sequence[str]
    after: Moment
    guard: threading.Lock
    loaded: int = 0
    finished: bool = False
    stopped: bool = False

    def stop(self) -> None:
        """No page is written after this returns (it waits for at most one page's copy); `loaded` is final."""
        with self.guard:
            self.stopped = self.finished = True


class Loader:
    """One for each rank: every rank fills a host tier of its own."""

    def __init__(self, unit: UnitFormat, store: Store, page_bytes: PageBytes, counters: StorageCounters) -> None:
        self._unit, self._store, self._bytes, self._counters = unit, store, page_bytes, counters
        self._num_units = max(1, min(READ_UNITS, READ_BYTES // unit.num_bytes))
        self._units = torch.empty(self._num_units, unit.num_bytes, dtype=torch.uint8)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="hisparse-read")
        self._queue: queue.SimpleQueue[Lookup | Read | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hisparse-load", daemon=True)
        self._thread.start()

    def submit(self, work: Lookup | Read) -> None:
        self._queue.put(work)

    def close(self) -> None:
        """End the threads after their work, which the caller has stopped."""
        self._queue.put(None)
        self._thread.join(timeout=2)
        self._readers.shutdown(wait=False, cancel_futures=True)

    # -- on its own thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if isinstance(work, Lookup):
                    self._look_up(work)
                else:
                    self._read(work)
            except Exception:
                self._counters.add("errors")
                logger.exception("hisparse: storage: a %s failed and counts as a miss", type(work).__name__.lower())
            finally:
                work.finished = True

    def _look_up(self, lookup: Lookup) -> None:
        page_size = self._bytes.page_size
        lookup.hashes = get_storage_hash_str(lookup.key, page_size=page_size)
        wanted = lookup.hashes[lookup.start :]
        while lookup.count < len(wanted) and not lookup.cancelled:
            keys = [self._unit.key(page_hash) for page_hash in wanted[lookup.count : lookup.count + LOOKUP_KEYS]]
            found = self._store.count_leading(keys)
            lookup.count += found
            if found < len(keys):
                break

    def _read(self, read: Read) -> None:
        if not read.after.wait(lambda: read.stopped):
            return
        for start in range(0, len(read.pages), self._num_units):
            hashes = read.hashes[start : start + self._num_units]
            units = self._units[: len(hashes)]
            fetched = [self._readers.submit(self._fetch, *pair) for pair in zip(hashes, units, strict=True)]
            try:
                for page, page_hash, unit, problem in zip(read.pages[start:], hashes, units, fetched, strict=False):
                    if self._ends_prefix(page_hash, problem.result()) or not self._fill(read, page, unit):
                        return
            finally:
                wait(fetched)  # they write to the units, which the next batch uses again

    def _fetch(self, page_hash: str, unit: torch.Tensor) -> str | None:
        """Read and verify one unit, on a reader's thread. Returns what is wrong; "" when there is none, None when it is good."""
        if not self._store.get(self._unit.key(page_hash), unit):
            return ""
        return self._unit.problem(unit.numpy(), page_hash)

    def _ends_prefix(self, page_hash: str, problem: str | None) -> bool:
        if problem:
            self._counters.add("pages_corrupt")
            logger.warning("hisparse: storage: page %s is not used: wrong %s", page_hash[:16], problem)
        return problem is not None

    def _fill(self, read: Read, page: int, unit: torch.Tensor) -> bool:
        with read.guard:
            if read.stopped or self._bytes.closed:
                return False
            self._bytes.write(page, self._unit.kv(unit), self._unit.index(unit))
            read.loaded += 1
        return True
