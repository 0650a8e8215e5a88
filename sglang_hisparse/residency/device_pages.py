"""The device page pool: one free list, one owner a page.

Owned by the token-to-KV allocator, used by the residency coordinator. It knows nothing of what KV means: it hands out
pages and takes them back, and refuses to do either twice (I2).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from sglang_hisparse.errors import InvariantError


class Owner(IntEnum):
    """Kind of a device page's one owner."""

    FREE = 0
    RESIDENT = 1  #: a logical page; `owner_id` is its number
    HOT = 2  #: a hot lease; `owner_id` is the request slot


_FREE, _RESIDENT = int(Owner.FREE), int(Owner.RESIDENT)  # plain numbers: compared once for every page that moves


class DevicePages:
    """Pages 1..num_pages. `lease` and `release` are the only ways in and out; both are O(pages moved)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.owner = np.zeros(num_pages + 1, dtype=np.int8)
        self.owner_id = np.zeros(num_pages + 1, dtype=np.int64)
        self._free: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Make every page free. The lowest numbers are handed out first, which is what a fresh pool does too."""
        self.owner.fill(Owner.FREE)
        self.owner_id.fill(0)
        self._free = list(range(self.num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, owner: Owner) -> int:
        return int(np.count_nonzero(self.owner[1:] == owner))

    def lease(self, count: int, owner: Owner, owner_id: int) -> list[int] | None:
        """Take `count` pages for one owner, or None when fewer are free (nothing is taken then)."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        self.owner[pages] = owner
        self.owner_id[pages] = owner_id
        return pages

    def transfer(self, page: int, owner_id: int) -> None:
        """A resident page changes its logical page (re-homing); it never passes through the free list."""
        if self.owner[page] != _RESIDENT:
            raise InvariantError(f"I2: device page {page} is {Owner(self.owner[page]).name}, only a resident page moves")
        self.owner_id[page] = owner_id

    def release(self, pages: Sequence[int], owner: Owner, owner_id: int | None = None) -> None:
        """Give pages back; `owner` (and `owner_id`, where given) must be who holds them now."""
        for page in pages:
            held = self.owner[page]
            if held != owner or (owner_id is not None and self.owner_id[page] != owner_id):
                raise InvariantError(
                    f"I2: device page {page} belongs to {Owner(held).name} {self.owner_id[page]}, "
                    f"{owner.name} {owner_id} gave it back"
                )
            self.owner[page] = _FREE
            self._free.append(page)
