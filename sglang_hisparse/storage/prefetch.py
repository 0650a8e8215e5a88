"""Prefetches: from a waiting request to host-only pages in the radix tree.

Scheduler's thread only. Each waiting request that wants more than the tree holds has one `Prefetch`:

    QUEUED --begin--> LOOKUP --hits--> READ --loaded--> in the tree (adopt, insert)
       ^                 |               |
       +--- the matched prefix shrank ---+--- nothing there, expired, aborted: its pages go back

Ranks see their lookups and reads end at different times, so every step is taken by what all of them have reported: one MIN over
counts and over "may still wait", once an iteration and only while there are prefetches. Logical pages are allocated before
anything is read, in the order of the calls, equal on all ranks; they count as protected until they are in the tree.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hisparse.residency import ResidencyCoordinator
from sglang_hisparse.storage.counters import StorageCounters
from sglang_hisparse.storage.loader import Loader, Lookup, Read
from sglang_hisparse.storage.page_bytes import PageBytes

#: fewer pages are recomputed sooner than they are read (HiCache asks storage from 256 tokens on, too)
MIN_PAGES = 4
#: of all logical pages, this share is left to running requests when a prefetch takes its own
RESERVE = 1 / 16

_RUNNING = -1


class Phase(Enum):
    """Where a prefetch is; see the diagram above."""

    QUEUED = "queued"
    LOOKUP = "lookup"
    READ = "read"


@dataclass(slots=True)
class Prefetch:
    """One request's wish. key: RadixKey of whole pages, as far as a match may reach; start: pages of it that the tree held.

    family: equal for prefetches that may want the same pages. deadline: None until the request could otherwise start.
    """

    key: Any
    start: int
    family: Hashable
    phase: Phase = Phase.QUEUED
    deadline: float | None = None
    lookup: Lookup | None = None
    read: Read | None = None
    is_reading: bool = False  # the read has been handed to the loader

    def report(self) -> int:
        """Pages found or loaded, or that this rank is not so far."""
        work = self.lookup if self.phase is Phase.LOOKUP else self.read
        if work is None or not work.finished:
            return _RUNNING
        return work.count if isinstance(work, Lookup) else work.loaded


class Prefetches:
    """All prefetches of a scheduler, keyed by SGLang's request handle, in the order of their arrival.

    agree: MIN over the ranks of the attention group, value by value. note_loaded(pages, hashes): these are in the tree now.
    """

    def __init__(
        self,
        tree: Any,
        residency: ResidencyCoordinator,
        loader: Loader,
        page_bytes: PageBytes,
        counters: StorageCounters,
        *,
        wait_seconds: float,
        agree: Callable[[list[int]], list[int]],
        note_loaded: Callable[[Sequence[int], Sequence[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tree, self._residency, self._loader, self._bytes, self._counters = (
            tree,
            residency,
            loader,
            page_bytes,
            counters,
        )
        self._wait_seconds, self._agree, self._note_loaded, self._clock = wait_seconds, agree, note_loaded, clock
        self._page_size = tree.page_size
        self._active: dict[Hashable, Prefetch] = {}
        self._loaded: dict[Hashable, tuple[int, int]] = {}  # handle -> (tokens, position of the first)

    # -- what SGLang's scheduler asks, through the radix cache ------------------------------------------------------

    def request(
        self, handle: Hashable, tokens: Sequence[int], matched: int, namespace: tuple[str | None, str | None]
    ) -> None:
        """A request waits whose first `matched` tokens are in the tree; `tokens`: all that a match may reach."""
        pages, start = len(tokens) // self._page_size, matched // self._page_size
        if handle in self._active or pages - start < MIN_PAGES:
            return
        whole = array("q", tokens[: pages * self._page_size])
        key = RadixKey(whole, namespace[0], cache_salt=namespace[1])
        first = tuple(whole[matched : matched + self._page_size])
        self._active[handle] = Prefetch(key, start, (namespace, start, first))

    def is_over(self, handle: Hashable) -> bool:
        """Whether the request may start; asked when it could, so its wait begins here."""
        prefetch = self._active.get(handle)
        if prefetch is not None and prefetch.deadline is None:
            prefetch.deadline = self._clock() + self._wait_seconds
        return prefetch is None

    def take_loaded(self, handle: Hashable) -> tuple[int, int | None]:
        """Tokens that were loaded for the request, and the position of the first; once."""
        return self._loaded.pop(handle, (0, None))

    def cancel(self, handle: Hashable) -> None:
        """The request is gone."""
        self._loaded.pop(handle, None)
        if handle in self._active:
            self._end(handle)

    # -- once an iteration ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Take every step that all ranks are ready for."""
        if not self._active:
            return
        handles = list(self._active)
        now = self._clock()
        reports = [self._active[handle].report() for handle in handles]
        may_wait = [int(not self._is_expired(self._active[handle], now)) for handle in handles]
        agreed = self._agree(reports + may_wait)
        for handle, count, waits in zip(handles, agreed[: len(handles)], agreed[len(handles) :], strict=True):
            if handle in self._active:
                self._advance(handle, count, bool(waits))

    def _is_expired(self, prefetch: Prefetch, now: float) -> bool:
        return prefetch.deadline is not None and now >= prefetch.deadline

    def _advance(self, handle: Hashable, count: int, waits: bool) -> None:
        prefetch = self._active[handle]
        if prefetch.phase is Phase.READ and count != _RUNNING:
            self._commit(handle, count)
        elif not waits:
            self._expire(handle)
        elif prefetch.phase is Phase.QUEUED:
            self._begin(handle)
        elif prefetch.phase is Phase.LOOKUP and count != _RUNNING:
            self._begin_read(handle, count)
        elif prefetch.phase is Phase.READ:
            self._hand_over(prefetch)

    def _expire(self, handle: Hashable) -> None:
        prefetch = self._active[handle]
        if prefetch.phase is not Phase.READ:
            self._counters.add("waits_expired")
            self._end(handle)
        elif not prefetch.read.stopped:
            # What has been loaded by now is used: the next tick agrees on how much that is.
            self._counters.add("waits_expired")
            prefetch.read.stop()

    def _begin(self, handle: Hashable) -> None:
        prefetch = self._active[handle]
        for other_handle, other in self._active.items():
            if other_handle == handle:
                break
            if other.family == prefetch.family:
                return  # it is about to bring the same pages
        prefetch.start = self._match(prefetch.key)[0]
        if len(prefetch.key) // self._page_size - prefetch.start < MIN_PAGES:
            self._end(handle)
            return
        prefetch.phase, prefetch.lookup = Phase.LOOKUP, Lookup(prefetch.key, prefetch.start)
        self._loader.submit(prefetch.lookup)

    def _begin_read(self, handle: Hashable, hits: int) -> None:
        """Allocate logical pages for what storage has beyond what the tree holds by now."""
        prefetch = self._active[handle]
        end = prefetch.start + hits
        start, node = self._match(prefetch.key)
        if start < prefetch.start:
            prefetch.phase, prefetch.lookup = Phase.QUEUED, None
            return
        self._counters.add("pages_missed", len(prefetch.key) // self._page_size - end)
        pages = self._allocate(end - start, node) if end - start >= MIN_PAGES else []
        if not pages:
            self._end(handle)
            return
        hashes = prefetch.lookup.hashes[start : start + len(pages)]
        prefetch.start, prefetch.phase = start, Phase.READ
        prefetch.read = Read(pages, hashes, self._bytes.launched(), self._bytes.guard)
        self._hand_over(prefetch)

    def _hand_over(self, prefetch: Prefetch) -> None:
        """Let the loader write, once no host copy of a former owner of the pages can land any more (R7)."""
        if prefetch.is_reading or not all(map(self._residency.is_landing_target, prefetch.read.pages)):
            return
        prefetch.is_reading = True
        self._loader.submit(prefetch.read)

    def _commit(self, handle: Hashable, loaded: int) -> None:
        """The first `loaded` pages become host-only pages of the tree, behind what it holds of the prefix now."""
        prefetch = self._active[handle]
        pages, hashes = list(prefetch.read.pages), prefetch.read.hashes
        matched, node = self._match(prefetch.key)
        # Somebody else may have brought the first of them meanwhile, or what came before them may be gone.
        skipped = matched - prefetch.start
        fresh = pages[skipped:loaded] if skipped >= 0 else []
        self._counters.add("pages_missed", len(pages) - loaded)
        if fresh:
            self._residency.adopt(fresh)
            self._insert(prefetch.key, matched, node, fresh)
            self._note_loaded(fresh, hashes[skipped:loaded])
            self._counters.add("pages_loaded", len(fresh))
            self._loaded[handle] = (len(fresh) * self._page_size, matched * self._page_size)
        prefetch.read.pages = pages[: max(skipped, 0)] + pages[max(skipped, 0) + len(fresh) :]
        self._end(handle)

    # -- logical pages and the tree ---------------------------------------------------------------------------------

    @property
    def loading_pages(self) -> int:
        """Logical pages that are allocated and not in the tree yet."""
        return sum(len(prefetch.read.pages) for prefetch in self._active.values() if prefetch.read is not None)

    def _match(self, key: Any) -> tuple[int, Any]:
        """Pages of `key` that the tree holds, and the node at their end."""
        result = self._tree.match_prefix(MatchPrefixParams(key=key))
        return result.device_prefix_len // self._page_size, result.last_device_node

    def _allocate(self, wanted: int, node: Any) -> list[int]:
        """As many logical pages as may be taken, evicting what nobody uses, but not the prefix that ends at `node`."""
        book, allocator = self._residency.book, self._tree.token_to_kv_pool_allocator
        lock = self._tree.lock(node)
        try:
            reserve = int(book.limits.num_logical_pages * RESERVE)
            room = book.num_free + self._tree.evictable_size() // self._page_size - reserve
            count = max(0, min(wanted, room))
            allocator.evict_to_free_tokens(self._tree, count * self._page_size)
        finally:
            self._tree.unlock(lock)
        count = min(count, book.num_free)
        return book.allocate(count) if count >= MIN_PAGES else []

    def _insert(self, key: Any, matched: int, node: Any, fresh: Sequence[int]) -> None:
        page_size = self._page_size
        numbers = np.asarray(fresh, dtype=np.int64)[:, None] * page_size + np.arange(page_size)
        before = UnifiedRadixCache.path_device_indices(self._tree, node)[: matched * page_size]
        value = torch.cat([before.to(torch.int64), torch.from_numpy(numbers.reshape(-1))])
        self._tree.insert(
            InsertParams(
                key=key[: len(value)],
                value=value,
                prev_prefix_len=matched * page_size,
                inserted_len=matched * page_size,
            )
        )

    def _end(self, handle: Hashable) -> None:
        """The prefetch is over; pages that it still holds are free again."""
        prefetch = self._active.pop(handle)
        if prefetch.lookup is not None:
            prefetch.lookup.cancelled = True
        if prefetch.read is not None:
            prefetch.read.stop()
            self._residency.book.give_back(prefetch.read.pages)

    # -- flush ------------------------------------------------------------------------------------------------------

    def stop_all(self) -> None:
        """Nothing is loaded any more, all pages go back (no request runs)."""
        for handle in list(self._active):
            self._end(handle)
        self._loaded.clear()
