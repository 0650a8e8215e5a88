"""The book of pages: who uses which logical page, and where its KV lives.

Held by the residency coordinator and by nobody else. It keeps identity (request slot -> logical pages) and the counts
that the spill policy needs (users, users without a lease, holds) exact under every change, and it decides nothing.
All of it is CPU state: no scheduler decision reads a device tensor (rules R1 and R17).

Ownership of a request's pages, by index into its row, for a slot with n pages:

    [0, held_from)   may leave the device (if sealed, and if every user has a lease)
    [held_from, n)   held: the tail of a decoding request, everything of a request that is being prefilled; of one whose
                     prefill is streamed, the pages that are not sealed yet

The ledger counts a request in one of two forms: *kept*, when all its pages stay resident and pages that several kept requests use
count once; else by what it needs when all of it that can leave has left (`worst_pages`). Which form is sharing.py's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency.types import NO_TRANSFER, PAD_PAGE, PageState, ResidencyLimits

# As plain numbers: an enum's attribute costs more than the comparison, and these run per page and step.
_DIRTY, _MIRRORING, _CLEAN, _HOST = (int(state) for state in list(PageState)[PageState.DIRTY :])


class PageBook:
    """Arrays indexed by logical page, and tables indexed by request slot."""

    def __init__(self, limits: ResidencyLimits) -> None:
        self.limits = limits
        pages, slots = limits.num_logical_pages + 1, limits.num_slots
        self.state = np.zeros(pages, dtype=np.int8)
        self.device_page = np.zeros(pages, dtype=np.int32)
        self.users = np.zeros(pages, dtype=np.int32)  # slots that map the page
        self.unleased = np.zeros(pages, dtype=np.int32)  # of these, slots without a hot lease
        self.keepers = np.zeros(pages, dtype=np.int32)  # of these, slots that are kept
        self.holds = np.zeros(pages, dtype=np.int32)  # reasons for which the page may not leave the device
        self.last_use = np.zeros(pages, dtype=np.int64)  # step of the last forward that could read it
        self.transfer = np.zeros(pages, dtype=np.int64)  # id of the host copy in flight, 0: none
        self.enqueued = np.zeros(pages, dtype=bool)  # that copy is on the copy stream
        # Owners that the page has had: whoever reads it on another thread compares before and after. Never goes back.
        self.generation = np.zeros(pages, dtype=np.int64)
        self.slot_pages = np.zeros((slots, limits.max_pages_per_slot), dtype=np.int32)
        self.num_pages = np.zeros(slots, dtype=np.int64)
        self.held_from = np.zeros(slots, dtype=np.int64)
        self.sealed = np.zeros(slots, dtype=np.int64)  # leading pages known to be sealed
        self.live = np.zeros(slots, dtype=bool)
        self.prefilling = np.zeros(slots, dtype=bool)
        self.leased = np.zeros(slots, dtype=bool)
        self.prompt_pages = np.zeros(slots, dtype=np.int64)  # device pages that its prefill needs, but for one to grow into
        self.final_pages = np.zeros(slots, dtype=np.int64)  # pages at the end of the request, an upper estimate
        self.bounded = np.zeros(slots, dtype=bool)  # no request of it can have more than `final_pages`: it may be kept
        self.kept = np.zeros(slots, dtype=bool)  # none of its pages leaves the device, as the ledger counts
        self.misses = np.zeros(slots)  # rows that its request fetches per decode step, equal on all ranks; 0: few, or unknown
        # Requests that the slot has had, so that counts of one are not taken for another's. Never goes back.
        self.lives = np.zeros(slots, dtype=np.int64)
        # Rises with every change on which figures that are kept between two steps depend: host-only pages of slots, their
        # leases and needs, pages that nobody uses. Steps that only fill pages leave it as it is. Never goes back.
        self.moves = 0
        self._host_counts = np.zeros(slots, dtype=np.int64)
        self._counted_at = np.full(slots, -1, dtype=np.int64)  # `moves` when the slot's host-only pages were counted
        self._committed = (-1, 0)  # `moves`, and what the ledger charged all live requests then
        self.least_committed = (-1, 0)  # `moves`, and the least that it could charge them then (sharing.py)
        self.has_settled = False  # a prefill or a lease has ended since `take_settled` was last asked
        self.num_usable = limits.steps[0].logical_pages  # logical pages 1..num_usable have index-K, and may be handed out
        # Pages above this one are handed out only when none below is free: a border that is to come back waits for them.
        self.fill_limit = self.num_usable
        self.flushes = 0  # times that everything was forgotten
        self._free: list[int] = []
        self._free_above: list[int] = []  # of `fill_limit`
        self.clear()

    def clear(self) -> None:
        """Forget everything: all logical pages free, no slot live."""
        for array in (
            self.state, self.device_page, self.users, self.unleased, self.keepers, self.holds, self.last_use, self.transfer,
            self.enqueued, self.slot_pages, self.num_pages, self.held_from, self.sealed, self.live, self.prefilling,
            self.leased, self.prompt_pages, self.final_pages, self.bounded, self.kept, self.misses,
        ):  # fmt: skip
            array.fill(0)
        self.generation += 1
        self.moves += 1
        self.flushes += 1
        self.fill_limit = self.num_usable
        self._free, self._free_above = list(range(self.num_usable, 0, -1)), []

    # -- logical ids ------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_above)

    @property
    def num_free_below(self) -> int:
        """Those that are handed out first: up to `fill_limit`."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """All of them, those that are handed out last first."""
        return self._free_above + self._free

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` logical pages in a fixed order (equal on all ranks), or None when fewer are free."""
        if count > self.num_free:
            return None
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        if (missing := count - len(pages)) > 0:
            pages += self._free_above[-missing:][::-1]
            del self._free_above[-missing:]
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Return logical pages whose state is FREE and that no slot maps."""
        index = np.asarray(pages, dtype=np.int64)
        for page in index[(self.users[index] != 0) | (self.holds[index] != 0)].tolist():
            raise InvariantError(f"logical page {page} is freed with {self.users[page]} users, {self.holds[page]} holds")
        self.moves += 1
        self.generation[index] += 1
        if self.fill_limit == self.num_usable:
            self._free += pages
        else:
            self._free += [page for page in pages if page <= self.fill_limit]
            self._free_above += [page for page in pages if page > self.fill_limit]

    def fill_below(self, limit: int) -> None:
        """Hand out pages above `limit` only when none up to it is free; `num_usable`: no page comes last."""
        if limit == self.fill_limit:
            return
        free, self.fill_limit = self.free_pages(), limit
        self._free = [page for page in free if page <= limit]
        self._free_above = [page for page in free if page > limit]

    def highest_taken(self) -> int:
        """The highest logical page that is not free; 0: all are."""
        taken = np.ones(self.num_usable + 1, dtype=bool)
        taken[self.free_pages()] = taken[PAD_PAGE] = False
        return int(np.flatnonzero(taken)[-1]) if taken.any() else 0

    def unused_above(self, limit: int) -> int:
        """Pages above `limit` that somebody keeps and no request uses."""
        above = slice(limit + 1, self.num_usable + 1)
        return int(np.count_nonzero((self.state[above] != 0) & (self.users[above] == 0)))

    def extend_to(self, num_usable: int) -> None:
        """Logical pages up to this one have index-K now. They are handed out after those that are free already."""
        if not self.num_usable <= num_usable <= self.limits.num_logical_pages:
            raise InvariantError(f"I10: {num_usable} logical pages cannot follow {self.num_usable}")
        self.fill_below(self.num_usable)
        self._free[:0] = range(num_usable, self.num_usable, -1)
        self.num_usable = self.fill_limit = num_usable

    def is_free_above(self, limit: int) -> bool:
        """Whether nobody has a logical page above `limit`."""
        above = self.num_usable - limit
        free = self._free_above if limit >= self.fill_limit else self.free_pages()
        return len(free) >= above and int(np.count_nonzero(np.asarray(free, dtype=np.int64) > limit)) == above

    def shrink_to(self, num_usable: int) -> None:
        """Logical pages above this one are about to lose their index-K; nobody has one."""
        if not 0 < num_usable <= self.num_usable or not self.is_free_above(num_usable):
            raise InvariantError(f"I10: logical pages {num_usable + 1}..{self.num_usable} are in use and cannot lose their index-K")
        self._free = [page for page in self._free if page <= num_usable]
        self._free_above = [page for page in self._free_above if page <= num_usable]
        self.num_usable, self.fill_limit = num_usable, min(self.fill_limit, num_usable)

    # -- slots ------------------------------------------------------------------------------------------------------

    def pages(self, slot: int) -> np.ndarray:
        """The slot's logical pages in position order, int32; 0 where a page has been given up (being released)."""
        return self.slot_pages[slot, : self.num_pages[slot]]

    def open_slot(
        self, slot: int, *, prefilling: bool, prompt_pages: int, final_pages: int, bounded: bool = False, kept: bool = False
    ) -> None:
        if self.live[slot]:
            raise InvariantError(f"request slot {slot} still has the pages of its last request")
        self.moves += 1
        self.live[slot] = True
        self.lives[slot] += 1
        self.prefilling[slot] = prefilling
        self.prompt_pages[slot] = prompt_pages
        self.final_pages[slot] = final_pages
        self.bounded[slot] = bounded
        self.set_kept(slot, kept)

    def map_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Append `pages` to the slot's row; they are held until `set_held_from` lets them go."""
        if not len(pages):
            return
        start, end = int(self.num_pages[slot]), int(self.num_pages[slot]) + len(pages)
        if end > self.limits.max_pages_per_slot:
            raise InvariantError(f"request slot {slot} would have {end} pages, {self.limits.max_pages_per_slot} fit")
        index = np.asarray(pages, dtype=np.int32)
        self.slot_pages[slot, start:end] = index
        self.num_pages[slot] = end
        if end > self.final_pages[slot]:
            self.moves += 1  # it needs more than was estimated
        np.add.at(self.users, index, 1)
        if not self.leased[slot]:
            np.add.at(self.unleased, index, 1)
        if self.kept[slot]:
            np.add.at(self.keepers, index, 1)
        np.add.at(self.holds, index, 1)

    def unmap_pages(self, slot: int, start: int, end: int) -> list[int]:
        """Take the slot's pages [start, end) out of its row (the row keeps its length); returns those that were there."""
        end = min(end, int(self.num_pages[slot]))
        if start >= end:
            return []
        self.moves += 1
        row = self.slot_pages[slot, start:end]
        mapped = row != PAD_PAGE
        index = row[mapped]
        np.subtract.at(self.users, index, 1)
        if not self.leased[slot]:
            np.subtract.at(self.unleased, index, 1)
        if self.kept[slot]:
            np.subtract.at(self.keepers, index, 1)
        held = row[mapped & (np.arange(start, end) >= self.held_from[slot])]
        np.subtract.at(self.holds, held, 1)
        taken = index.tolist()
        row[:] = PAD_PAGE
        return taken

    def replace_page(self, slot: int, position: int, page: int) -> int:
        """Put `page` at `position` of the slot's row and return the page that was there."""
        self.moves += 1
        old = int(self.slot_pages[slot, position])
        held = int(position >= self.held_from[slot])
        for target, sign in ((old, -1), (page, 1)):
            if target == PAD_PAGE:
                continue
            self.users[target] += sign
            self.holds[target] += sign * held
            if not self.leased[slot]:
                self.unleased[target] += sign
            self.keepers[target] += sign * int(self.kept[slot])
        self.slot_pages[slot, position] = page
        return old

    def close_slot(self, slot: int) -> None:
        """The slot maps nothing any more."""
        self.moves += 1
        self.unmap_pages(slot, 0, int(self.num_pages[slot]))
        for array in (
            self.num_pages, self.held_from, self.sealed, self.live, self.prefilling, self.prompt_pages, self.final_pages,
            self.bounded, self.kept, self.misses,
        ):  # fmt: skip
            array[slot] = 0

    def note_misses(self, misses: np.ndarray) -> None:
        """Rows fetched per decode step, float64 [num_slots], the same on all ranks; they end with the requests of now."""
        self.misses[:] = np.where(self.live, misses, 0.0)

    def set_held_from(self, slot: int, position: int) -> None:
        """Move the border between pages that may leave and pages that are held."""
        old = int(self.held_from[slot])
        if position == old:
            return
        low, high, sign = (old, position, -1) if position > old else (position, old, 1)
        row = self.slot_pages[slot, low : min(high, int(self.num_pages[slot]))]
        np.add.at(self.holds, row[row != PAD_PAGE], sign)
        self.held_from[slot] = position

    def set_leased(self, slot: int, leased: bool) -> None:
        if bool(self.leased[slot]) == leased:
            return
        if leased:
            self.set_kept(slot, False)
        self.moves += 1
        self.leased[slot] = leased
        row = self.pages(slot)
        np.add.at(self.unleased, row[row != PAD_PAGE], -1 if leased else 1)

    def set_kept(self, slot: int, kept: bool) -> None:
        """Count the slot's request in the one form or in the other."""
        if bool(self.kept[slot]) == kept:
            return
        if kept and (self.leased[slot] or not self.bounded[slot]):
            raise InvariantError(f"I7: request slot {slot} holds a lease, or may outgrow its estimate, and cannot be kept")
        self.moves += 1
        self.kept[slot] = kept
        row = self.pages(slot)
        np.add.at(self.keepers, row[row != PAD_PAGE], 1 if kept else -1)

    def hold(self, pages: Sequence[int], sign: int) -> None:
        """Keep `pages` on the device (+1), or let them go again (-1): a batch's prefixes while it is being allocated."""
        if len(pages):
            self.moves += 1
            np.add.at(self.holds, np.asarray(pages, dtype=np.int32), sign)

    def end_prefill(self, slot: int) -> None:
        """The slot decodes from now on."""
        self.moves += 1
        self.prefilling[slot] = False

    def streams(self, slot: int) -> bool:
        """Whether the slot is being prefilled by extends that may read host-only pages: only those hold a lease by then."""
        return bool(self.prefilling[slot] and self.leased[slot])

    # -- page facts -------------------------------------------------------------------------------------------------

    def releasable(self) -> np.ndarray:
        """Bool per page: its host copy is complete or on the copy stream, so its device page may be given up (I1)."""
        return (self.state == _CLEAN) | ((self.state == _MIRRORING) & self.enqueued)

    def sealed_resident(self) -> np.ndarray:
        """Bool per page: resident and never written again."""
        return (self.state >= _DIRTY) & (self.state <= _CLEAN)

    def host_pages(self, slot: int) -> int:
        """Number of the slot's pages that have no device page."""
        row = self.pages(slot)
        return int(np.count_nonzero(self.state[row] == _HOST))

    def host_counts(self, slots: np.ndarray) -> np.ndarray:
        """`host_pages` of slots int64 [n], int64 [n]; counted anew only after a move."""
        stale = slots[self._counted_at[slots] != self.moves]
        if stale.size:
            rows = self.slot_pages[stale, : self.num_pages[stale].max()]
            self._host_counts[stale] = np.count_nonzero(self.state[rows] == _HOST, axis=1)
            self._counted_at[stale] = self.moves
        return self._host_counts[slots]

    def is_host_only(self, page: int) -> bool:
        return self.state[page] == _HOST

    def worst_pages(self) -> np.ndarray:
        """Per slot, int64: device pages that its request needs when everything that can be spilled is spilled.

        A request that is being prefilled keeps its whole prompt, or a hot lease and one chunk where its prefill is streamed; a
        decoding one can shrink to a hot lease, its tail and one page to grow into, if it is longer than that, and holds no less
        once it has the lease.
        """
        smallest = self.limits.smallest_pages
        decoding = np.minimum(np.maximum(self.final_pages, self.num_pages), smallest)
        decoding = np.where(self.leased, smallest, decoding)
        return np.where(self.prefilling, np.maximum(self.prompt_pages + 1, decoding), decoding) * self.live

    def growth_pages(self) -> np.ndarray:
        """Per slot, int64: device pages that its request takes beyond those it has, if it is kept."""
        prompt = np.where(self.prefilling, self.prompt_pages + 1, 0)
        return np.maximum(np.maximum(self.final_pages, prompt) - self.num_pages, 0) * self.live

    def fresh_committed_pages(self) -> int:
        """`committed_pages`, looked up: each request in its form, the pages of the kept ones once."""
        charged = np.where(self.kept, self.growth_pages(), self.worst_pages()) if self.kept.any() else self.worst_pages()
        return int(charged.sum()) + int(np.count_nonzero(self.keepers))

    def committed_pages(self) -> int:
        """Device pages that the live requests need at worst."""
        if self._committed[0] != self.moves:
            self._committed = self.moves, self.fresh_committed_pages()
        return self._committed[1]

    def take_settled(self) -> bool:
        """Whether a prefill or a lease has ended since this was last asked: whom the ledger has kept back may fit now, though its sum
        has not fallen. What a request gives back at the end of its prefill, its own admission has added in the same iteration; and
        other choices of who is kept have opened, at the same sum."""
        had, self.has_settled = self.has_settled, False
        return had

    def forget_transfer(self, page: int | np.ndarray) -> None:
        """Of one page, or of several."""
        self.transfer[page] = NO_TRANSFER
        self.enqueued[page] = False
