"""The replay's stand-in for the radix tree: which full pages outlive their request.

Used by the engine alone. It owns names (key -> logical pages, in order of last use) and the rule when a logical page is
freed: when no entry names it and no running request maps it. It never touches residency: a named page may be anywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from sglang_hisparse.residency import ResidencyCoordinator

Key = tuple[str, int]


class PrefixCache:
    """Entries may share pages; every page counts the entries that name it."""

    def __init__(self, coordinator: ResidencyCoordinator) -> None:
        self._coordinator = coordinator
        self._entries: OrderedDict[Key, tuple[int, ...]] = OrderedDict()
        self._names = np.zeros(coordinator.limits.num_logical_pages + 1, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._entries)

    def keys_by_use(self) -> list[Key]:
        """Least recently used first."""
        return list(self._entries)

    def pages(self, key: Key) -> tuple[int, ...]:
        """Logical pages of an entry, () where there is none; does not count as a use."""
        return self._entries.get(key, ())

    def match(self, key: Key) -> tuple[int, ...]:
        if key not in self._entries:
            return ()
        self._entries.move_to_end(key)
        return self._entries[key]

    def store(self, key: Key, pages: Sequence[int]) -> None:
        """Name `pages`; an entry of the same key is replaced, pages that it alone named are freed."""
        pages = tuple(pages)
        self._names[list(pages)] += 1
        self.drop(key)
        if pages:
            self._entries[key] = pages

    def drop(self, key: Key) -> None:
        pages = list(self._entries.pop(key, ()))
        self._names[pages] -= 1
        self.free_unused(pages)

    def free_unused(self, pages: Iterable[int]) -> None:
        """Free those of `pages` that nothing names and no request maps."""
        users = self._coordinator.book.users
        self._coordinator.free([page for page in pages if not self._names[page] and not users[page]])

    def is_named(self, page: int) -> bool:
        return bool(self._names[page])

    @contextmanager
    def protect(self, pages: Sequence[int]) -> Iterator[None]:
        """Within it, `pages` are not freed, whatever happens to their entries."""
        self._names[list(pages)] += 1
        try:
            yield
        finally:
            self._names[list(pages)] -= 1
            self.free_unused(pages)

    def make_logical_room(self, num_pages: int) -> bool:
        """Drop entries, oldest first, until `num_pages` logical ids are free; False when that is not enough."""
        book = self._coordinator.book
        for key in self.keys_by_use():
            if book.num_free >= num_pages:
                break
            pages = np.asarray(self._entries[key])
            # An entry that a running request uses whole would free nothing now and cost a prefix later.
            if (book.users[pages] == 0).any():
                self.drop(key)
        return book.num_free >= num_pages
