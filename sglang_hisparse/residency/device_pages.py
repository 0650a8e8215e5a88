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
    WITHHELD = 3  #: nobody: its memory is leaving, or has left, for index-K


# As plain numbers: compared once for every page that moves.
_FREE, _RESIDENT, _WITHHELD = int(Owner.FREE), int(Owner.RESIDENT), int(Owner.WITHHELD)


class DevicePages:
    """Pages 1..num_pages, of which 1..num_usable can be had. `lease` and `release` are the only ways in and out; both are
    O(pages moved)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_usable = num_pages
        self.owner = np.zeros(num_pages + 1, dtype=np.int8)
        self.owner_id = np.zeros(num_pages + 1, dtype=np.int64)
        self._free: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Make every usable page free. The lowest numbers are handed out first, which is what a fresh pool does too."""
        self.owner.fill(Owner.FREE)
        self.owner[self.num_usable + 1 :] = Owner.WITHHELD
        self.owner_id.fill(0)
        self._free = list(range(self.num_usable, 0, -1))

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

    def release(self, pages: Sequence[int], owner: Owner, owner_id: int | np.ndarray | None = None) -> None:
        """Give pages back; `owner` (and `owner_id`, where given: of all, or int64 of each) must be who holds them now."""
        index = np.asarray(pages, dtype=np.int64)
        wrong = self.owner[index] != int(owner)
        if owner_id is not None:
            wrong |= self.owner_id[index] != owner_id
        if wrong.any() or len(set(pages)) != len(pages):
            at = int(np.argmax(wrong))
            raise InvariantError(
                f"I2: device page {pages[at]} belongs to {Owner(self.owner[pages[at]]).name} {self.owner_id[pages[at]]}, "
                f"{owner.name} gave it back, of {len(pages)} pages"
            )
        if self.num_usable < self.num_pages:
            self.owner[index] = np.where(index > self.num_usable, _WITHHELD, _FREE)
            self._free += [page for page in pages if page <= self.num_usable]
        else:
            self.owner[index] = _FREE
            self._free += pages

    # -- the border -------------------------------------------------------------------------------------------------

    def withhold(self, limit: int) -> list[int]:
        """Only pages 1..limit can be had from now on. Returns the others that still have an owner, lowest first: each stays
        his until it is released, or `vacate`d."""
        if not 0 < limit <= self.num_usable:
            raise InvariantError(f"I3: {limit} device pages are to remain usable, of {self.num_usable}")
        owners = self.owner[limit + 1 : self.num_usable + 1]
        owned = (np.flatnonzero(owners != _FREE) + limit + 1).tolist()
        owners[owners == _FREE] = _WITHHELD
        self._free = [page for page in self._free if page <= limit]
        self.num_usable = limit
        return owned

    def restore(self, limit: int) -> None:
        """Pages up to `limit` have memory again. They are handed out after those that are free already."""
        if not self.num_usable <= limit <= self.num_pages:
            raise InvariantError(f"I3: {limit} device pages cannot follow {self.num_usable} usable ones")
        self.owner[self.num_usable + 1 : limit + 1] = _FREE
        self._free[:0] = range(limit, self.num_usable, -1)
        self.num_usable = limit

    def vacate(self, page: int) -> int:
        """The owner of a page above the usable ones gets a free page instead; room has been made for it."""
        owner, owner_id = Owner(self.owner[page]), int(self.owner_id[page])
        if page <= self.num_usable or owner in (Owner.FREE, Owner.WITHHELD):
            raise InvariantError(f"I2: device page {page} of {self.num_usable} usable ones is {owner.name}: nothing to vacate")
        taken = self.lease(1, owner, owner_id)
        if taken is None:
            raise InvariantError(f"I7: device page {page} is to be vacated and no usable page is free")
        self.owner[page] = _WITHHELD
        return taken[0]
