"""Which requests the device ledger keeps whole, so that pages that they share are charged once.

The ledger counts each live request in one of two forms (`PageBook`): *kept*, with all its pages resident to its end, or as one
that can shrink to a hot lease. Kept requests pay for the union of their pages; the others pay each for itself. Whatever the forms
are, the sum is a state that spilling reaches: kept requests as they are, all others that are long enough with leases
(`SpillPolicy.make_room`). So any choice is safe whose sum fits the device, and the one that costs least is the best.

A `SharingPass` belongs to one admission pass: its candidates see what the kept requests of the book have paid for, and the
kept candidates before them. Pure CPU, equal on all ranks: it looks at nothing but the book.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hisparse.residency.page_book import PageBook


@dataclass(slots=True, eq=False)
class Candidate:
    """A request that admission asks about, `prefix`: pages that it finds in the cache, int64.

    need: pages that it has at its end, and while it is prefilled; other: what it is charged where it is not kept. `is_free`: it may be
    kept or not; one that is streamed, or may outgrow its estimate, is not.
    """

    prefix: np.ndarray
    need: int
    other: int
    is_free: bool
    kept: bool = False

    @property
    def least(self) -> int:
        """What it is charged at least, whoever shares its prefix."""
        return min(self.other, self.need - len(self.prefix)) if self.is_free else self.other


@dataclass(slots=True, eq=False)
class _Rows:
    """Requests that may be kept. pages [n, m]: the first lengths[i] of a row; to_come, other int64 [n]: pages beyond these if it is
    kept, and the charge if it is not."""

    pages: np.ndarray
    lengths: np.ndarray
    to_come: np.ndarray
    other: np.ndarray


def cheapest(rows: _Rows, counts: np.ndarray) -> tuple[int, np.ndarray]:
    """(the least sum of charges, bool [n]: who is kept then). counts: per page, how many of the rows have it, or more.

    Rows are paths in a tree of pages, as prefixes are: who shares a page shares all before it. So the cheapest choice is found from
    the leaves up: below a stretch of pages with the same users either some are kept, who pay for it once, or none. Where rows are
    no such paths the choice is a worse one and the sum may be too small: `exact_sum` has the last word.
    """
    num = len(rows.lengths)
    shared = _first(rows, np.arange(num), rows.lengths, counts, np.ones(num, dtype=np.int64))
    alone = rows.lengths - shared + rows.to_come
    least = np.minimum(alone, rows.other)
    below = np.where(shared > 0, rows.pages[np.arange(num), shared - 1], 0)
    ends, first, which = np.unique(below, return_index=True, return_inverse=True)
    inside = dict(zip(ends.tolist(), np.bincount(which, weights=least).astype(np.int64).tolist(), strict=True))
    apart = dict(zip(ends.tolist(), np.bincount(which, weights=rows.other).astype(np.int64).tolist(), strict=True))
    stretches = _stretches(rows, counts, ends, first, shared[first])
    inside.setdefault(0, 0)
    chosen: dict[int, bool] = {0: True}
    for end, (start, stop, parent) in sorted(stretches.items(), key=lambda item: (-item[1][1], item[0])):
        with_it, without = inside.get(end, 0) + stop - start, apart.get(end, 0)
        chosen[end] = with_it <= without
        inside[parent] = inside.get(parent, 0) + min(with_it, without)
        apart[parent] = apart.get(parent, 0) + without
    for end, (_, _, parent) in sorted(stretches.items(), key=lambda item: (item[1][1], item[0])):
        chosen[end] = chosen[end] and chosen[parent]
    paid = np.array([chosen[end] for end in ends.tolist()], dtype=bool)
    return inside[0], paid[which] & (alone <= rows.other)


def _first(rows: _Rows, at: np.ndarray, lengths: np.ndarray, counts: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Per row of `at`: the first position below its length whose page has at most `most` users; the length where there is none.
    Users only get fewer along a row."""
    low, high = np.zeros_like(lengths), lengths.copy()
    while (low < high).any():
        middle = (low + high) // 2
        is_more = (counts[rows.pages[at, np.minimum(middle, rows.pages.shape[1] - 1)]] > most) & (low < high)
        low, high = np.where(is_more, middle + 1, low), np.where(is_more | (low >= high), high, middle)
    return low


def _stretches(
    rows: _Rows, counts: np.ndarray, ends: np.ndarray, at: np.ndarray, stops: np.ndarray
) -> dict[int, tuple[int, int, int]]:
    """Stretches of pages with the same users, by their last page: (first position, position behind it, last page of the stretch
    before, 0: none). ends: pages on which shared parts of rows end, `at`: a row that has each, stops: its length up to there."""
    found: dict[int, tuple[int, int, int]] = {}
    while (is_page := ends > 0).any():
        ends, at, stops = ends[is_page], at[is_page], stops[is_page]
        starts = _first(rows, at, stops, counts, counts[ends])
        parents = np.where(starts > 0, rows.pages[at, starts - 1], 0)
        found.update(zip(ends.tolist(), zip(starts.tolist(), stops.tolist(), parents.tolist(), strict=True), strict=True))
        ends, first = np.unique(parents, return_index=True)
        at, stops = at[first], starts[first]
        is_new = np.array([page not in found for page in ends.tolist()], dtype=bool)
        ends, at, stops = ends[is_new], at[is_new], stops[is_new]
    return found


def _rows_of(book: PageBook, slots: np.ndarray) -> _Rows:
    lengths = book.num_pages[slots]
    pages = book.slot_pages[slots, : max(int(lengths.max(initial=0)), 1)]
    return _Rows(pages, lengths, book.growth_pages()[slots], book.worst_pages()[slots])


def _free_slots(book: PageBook) -> np.ndarray:
    """Slots whose requests may be kept or not."""
    return np.flatnonzero(book.live & book.bounded & ~book.leased)


def _fixed_pages(book: PageBook) -> int:
    """Charges of the others."""
    return int(book.worst_pages()[~(book.bounded & ~book.leased)].sum())


def least_committed_pages(book: PageBook) -> int:
    """What the live requests are charged when the best of them are kept; looked up anew only after a move."""
    if book.least_committed[0] != book.moves:
        slots = _free_slots(book)
        least = cheapest(_rows_of(book, slots), book.unleased)[0] if slots.size else 0
        book.least_committed = book.moves, min(_fixed_pages(book) + least, book.committed_pages())
    return book.least_committed[1]


def _adopt(book: PageBook, slots: np.ndarray, kept: np.ndarray) -> None:
    for slot in slots[book.kept[slots] & ~kept].tolist():
        book.set_kept(slot, False)
    for slot in slots[kept & ~book.kept[slots]].tolist():
        book.set_kept(slot, True)


def fits(book: PageBook, num_pages: int) -> bool:
    """Whether the live requests can be charged at most `num_pages`; who is kept changes where that takes it."""
    return book.committed_pages() <= num_pages or (
        least_committed_pages(book) <= num_pages and SharingPass(book)._rearrange(None, num_pages)
    )


def settle(book: PageBook, slot: int) -> None:
    """Count the slot's request in the cheaper form, all others as they are: its prefill has ended, or its lease."""
    book.has_settled = True
    if not book.bounded[slot] or book.leased[slot]:
        return
    others = book.keepers[book.pages(slot)] - int(book.kept[slot])
    kept = int(np.count_nonzero(others == 0) + book.growth_pages()[slot])
    worst = int(book.worst_pages()[slot])
    if kept != worst:
        book.set_kept(slot, kept < worst)


class SharingPass:
    """Candidates of one admission pass, taken one after the other. `can_keep`: False where every page leaves as soon as it may."""

    def __init__(self, book: PageBook, can_keep: bool = True) -> None:
        self._book, self.can_keep = book, can_keep
        self._taken: list[Candidate] = []
        self._paid: np.ndarray | None = None  # bool per page: a kept candidate has paid for it

    def price(self, prefix: np.ndarray, need: int) -> int:
        """Device pages that a request of `need` pages is charged beyond what is charged already, if it is kept."""
        unpaid = self._book.keepers[prefix] == 0
        if self._paid is not None:
            unpaid &= ~self._paid[prefix]
        return need - len(prefix) + int(np.count_nonzero(unpaid))

    def take(self, candidate: Candidate) -> None:
        """It starts."""
        self._taken.append(candidate)
        if candidate.kept:
            self._pay(candidate.prefix)

    def _pay(self, prefix: np.ndarray) -> None:
        if self._paid is None:
            self._paid = np.zeros(self._book.keepers.shape, dtype=bool)
        self._paid[prefix] = True

    def could_fit(self, least: int, num_pages: int) -> bool:
        """Whether a candidate that is charged `least` at least can fit `num_pages` device pages beside all others, whoever is kept;
        True may be wrong."""
        return least_committed_pages(self._book) + sum(one.least for one in self._taken) + least <= num_pages

    def make_fit(self, candidate: Candidate, num_pages: int) -> bool:
        """Choose anew who is kept, of the live requests, of those taken and the candidate, so that all of them are charged at most
        `num_pages`. False: there is no such choice, and nothing changes."""
        return self.could_fit(candidate.least, num_pages) and self._rearrange(candidate, num_pages)

    def charged_pages(self) -> int:
        """By the live requests and those taken."""
        book, kept = self._book, [one for one in self._taken if one.kept]
        others = sum(one.other for one in self._taken if not one.kept)
        prefixes = np.unique(np.concatenate([one.prefix for one in kept])) if kept else np.zeros(0, dtype=np.int64)
        own = sum(one.need - len(one.prefix) for one in kept)
        return book.committed_pages() + others + own + int(np.count_nonzero(book.keepers[prefixes] == 0))

    def _rearrange(self, candidate: Candidate | None, num_pages: int) -> bool:
        book, ones = self._book, [*self._taken, *([] if candidate is None else [candidate])]
        slots, free = _free_slots(book), [one for one in ones if one.is_free]
        rows, counts = _with(_rows_of(book, slots), free), book.unleased
        if free:
            counts = counts.copy()
            for one in free:
                counts[one.prefix] += 1
        total, kept = cheapest(rows, counts)
        total += _fixed_pages(book) + sum(one.other for one in ones if not one.is_free)
        if total > num_pages:
            return False
        before = book.kept[slots], [one.kept for one in free]
        self._set(slots, kept[: slots.size], free, kept[slots.size :].tolist())
        # The last word has the union of the pages themselves, whatever shape the rows have.
        taken, self._taken = self._taken, ones
        is_right = self.charged_pages() <= num_pages
        self._taken = taken
        if not is_right:
            self._set(slots, before[0], free, before[1])
        return is_right

    def _set(self, slots: np.ndarray, kept: np.ndarray, free: Sequence[Candidate], are_kept: Sequence[bool]) -> None:
        _adopt(self._book, slots, kept)
        self._paid = None
        for one, is_kept in zip(free, are_kept, strict=True):
            one.kept = is_kept
        for one in self._taken:
            if one.kept:
                self._pay(one.prefix)


def _with(rows: _Rows, candidates: Sequence[Candidate]) -> _Rows:
    """The rows of candidates behind those of the book."""
    if not candidates:
        return rows
    lengths = np.array([len(one.prefix) for one in candidates], dtype=np.int64)
    width = max(rows.pages.shape[1], int(lengths.max()))
    pages = np.zeros((len(rows.lengths) + len(candidates), width), dtype=np.int64)
    pages[: len(rows.lengths), : rows.pages.shape[1]] = rows.pages
    for index, one in enumerate(candidates, start=len(rows.lengths)):
        pages[index, : len(one.prefix)] = one.prefix
    return _Rows(
        pages,
        np.concatenate([rows.lengths, lengths]),
        np.concatenate([rows.to_come, [one.need - len(one.prefix) for one in candidates]]),
        np.concatenate([rows.other, [one.other for one in candidates]]),
    )
