"""The border between KV and index-K: when it moves, and which device pages give up their memory for which logical ones.

Owned by the runtime beside the policy. It follows a move before each batch is chosen, and looks for the next one just before a
plan is taken. It decides; the chunks themselves are moved by a `Mover`. A move from more device pages to more logical ones:

    BEGIN      device pages above the new border are withheld: spilling makes room below, what must stay resident is copied
               there by the next plan, with page table and leases
    VACATED    the forward stream has passed that plan, on every rank: nothing launched touches those pages any more, copies to
               the host included, for the plan has waited for them
    MOVED      their chunks are unmapped from every layer and mapped behind index-K, on every rank
    END        only now may the logical pages that this backs be handed out

A request that needs more logical pages than are free waits for the border rather than have cached prefixes evicted for it, and
while it waits nothing is prefilled. So a move begins ahead of need, by one step; by several while requests have had to wait.

At each of these moments the system is a valid one with fewer device pages or more logical ones, so what admission has promised
holds all the time (I7): a move begins only if the live requests' worst case fits what remains. Nothing here waits for the device.

While the server rests, and nobody has a logical page beyond those of the first place, one move goes back there, through the same
moments. At its BEGIN those logical pages are taken out of the free list; VACATED means that nothing launched touches their index-K
any more; at its END the device pages can be had again.

Where prompts do not return (returns.py), cached prefixes that nobody uses count for nothing: they are given up before the border moves,
and it goes back under load to what requests have needed. Pages above that place are handed out last from then on, cached prefixes are given
up, least recently used first, until those above have gone, and the move begins when requests have left the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import numpy as np

from sglang_hisparse.residency.coordinator import ResidencyCoordinator
from sglang_hisparse.residency.returns import PrefixReturns
from sglang_hisparse.residency.sharing import fits, least_committed_pages
from sglang_hisparse.residency.types import BorderStep

MAX_STEPS_AT_ONCE = 4
"""Steps of one move: a bigger one would spill more at once than the next forwards can bear."""

REST_LOOKS = 16
"""Looks without another try after room could not be made, which only failing copies cause, or after no choice of who is kept was found
that the estimate of its cost had promised."""

HURRY_LOOKS = 64
"""So many looks after a request had to wait, moves begin MAX_STEPS_AT_ONCE ahead of need: prefills take logical pages faster than
single steps give them."""

CALM_LOOKS = 2_000
"""So many iterations without a forward or a wish, in a row, and no move begins ahead of need any more, and the border goes back if it
may: a short pause is no reason."""

WATCH_LOOKS = 256
"""Forwards, at least, over which the need of requests is watched for a way back under load."""

CLEAR_LOOKS = 16
"""Forwards between two looks at how far requests already let the border go back."""

GIVE_UP_PAGES = 256
"""Cached pages given up at once on the way back, before a forward; kept free below the place where the border is to go, which has
room for them."""

CACHED_SHARE = 1 / 16
"""Of what requests need, cached pages that have room there beside that. What is found again soon stays cached on the way back and after it."""

MAX_DEFERRALS = 256
"""Times in a row that a request is asked to wait for a move, before cached prefixes are given up for it after all."""


class Progress(IntEnum):
    """How far a move has come on one rank; what counts is the least of all ranks."""

    BEGUN = 0
    VACATED = 1
    MOVED = 2


class Mover(Protocol):
    """Moves the chunks of one rank."""

    def begin(self, old: int, new: int) -> None:
        """The border is to go from step `old` to step `new`, which comes before it on the way back; the next plan vacates the
        pages between them."""

    def progress(self) -> Progress:
        """Of that move, as this rank observes it."""

    def advance(self) -> None:
        """Every rank has VACATED them: move some chunks, as many on every rank."""


class CachedPrefixes(Protocol):
    """What the radix tree holds and no request uses, the same on all ranks."""

    def num_unused(self) -> int:
        """Logical pages of it."""

    def give_up(self, num_pages: int) -> None:
        """Free so many, or somewhat more, least recently used first."""


class NothingCached:
    """Without a radix tree."""

    def num_unused(self) -> int:
        return 0

    def give_up(self, num_pages: int) -> None:
        pass


class Border:
    """Moves for one coordinator.

    make_room(n): make n device pages free, False when they cannot be had. agree: the least of a number over the ranks that
    schedule together (R30). cached: what could be given up instead of moving. `returns` is told of prompts by the owner.
    """

    def __init__(
        self,
        coordinator: ResidencyCoordinator,
        make_room: Callable[[int], bool],
        mover: Mover,
        agree: Callable[[int], int] = lambda value: value,
        cached: CachedPrefixes | None = None,
    ) -> None:
        self.coordinator, self._make_room = coordinator, make_room
        self.steps = self.coordinator.limits.steps
        self._places = [step.logical_pages for step in self.steps]
        self.begun = self.ended = 0  # steps; they differ while a move is under way
        self._mover, self._agree = mover, agree
        self._cached = NothingCached() if cached is None else cached
        self.returns = PrefixReturns(self.steps[0].logical_pages, self.steps[-1].logical_pages)
        self._flushes = self.coordinator.book.flushes
        self.watch_looks, self.give_up_pages, self._watched = WATCH_LOOKS, GIVE_UP_PAGES, 0
        self._most_needed, self._needed_before = 0, 0  # logical pages of requests at most, now and in the watch before
        self._goes_back = False  # whether a way back under load is being cleared
        self._wanted = 0  # logical pages that somebody would have use for, since the last look
        self._deferrals = 0
        self._hurry = 0  # looks
        self._rest = 0
        self.calm_looks, self.num_returns = CALM_LOOKS, 0
        self._calm = 0  # looks
        self._in_use_at = -1  # `moves` of the book when pages beyond the first place were last found in use

    # -- questions --------------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        return self.begun != self.ended

    @property
    def is_at_end(self) -> bool:
        """Whether every logical page has its index-K, or is about to."""
        return self.begun == len(self.steps) - 1

    def _can_begin(self) -> bool:
        return not (self.is_at_end or self.is_moving or self._rest) and self._fits(self.begun + 1)

    def _fits(self, step: int) -> bool:
        """Whether what the live requests may need at worst fits the device pages of `step` (I7), kept or not as is cheapest."""
        return least_committed_pages(self.coordinator.book) <= self.steps[step].device_pages

    # -- wishes -----------------------------------------------------------------------------------------------------

    def _used(self) -> tuple[int, int]:
        """Logical pages in use, and those of them that are given up before the border moves."""
        book = self.coordinator.book
        return book.num_usable - book.num_free, self._cached.num_unused() if self.returns.are_rare else 0

    def _note_need(self, num_pages: int) -> None:
        """Requests need what they have and `num_pages` more."""
        book = self.coordinator.book
        needed = book.num_usable - book.num_free - self._cached.num_unused() + num_pages
        self._most_needed = max(self._most_needed, needed)

    def want(self, num_pages: int) -> None:
        """Somebody would use `num_pages` free logical pages."""
        used, given_up = self._used()
        self._wanted = max(self._wanted, used - given_up + num_pages)
        self._note_need(num_pages)

    def defers(self, num_pages: int) -> bool:
        """Whether a request that needs `num_pages` free logical pages should wait for the border, rather than let cached
        prefixes be evicted for it. Counts its answers, and changes nothing else but the wish."""
        if num_pages <= self.coordinator.book.num_free + self._used()[1]:
            self._note_need(num_pages)
            return False
        self.want(num_pages)
        if self._deferrals >= MAX_DEFERRALS or not (self.is_moving or self._can_begin()):
            return False
        self._deferrals += 1
        self._hurry = HURRY_LOOKS
        return True

    # -- moves ------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Before each batch is chosen: the ranks agree on how far the move under way has come, and go on together."""
        if not self.is_moving:
            return
        agreed = self._agree(int(self._mover.progress()))
        if agreed == Progress.VACATED:
            self._mover.advance()
            agreed = self._agree(int(self._mover.progress()))
        if agreed == Progress.MOVED:
            goes_back, self.ended = self.begun < self.ended, self.begun
            if goes_back:
                self.coordinator.device_pages.restore(self.steps[self.ended].device_pages)
            else:
                self.coordinator.book.extend_to(self.steps[self.ended].logical_pages)
            self._deferrals = 0

    def look(self) -> None:
        """Just before `take_plan`: begin a move if somebody wants more logical pages, or if few are left, since a move takes a
        few forwards."""
        self._calm = 0
        self._look()
        if not self.is_moving:
            self._recede()

    def _look(self) -> None:
        if self._flushes != self.coordinator.book.flushes:
            self._flushes = self.coordinator.book.flushes
            self.returns.restart()
        self._rest, self._hurry = max(0, self._rest - 1), max(0, self._hurry - 1)
        if self.is_moving:
            return
        wanted, self._wanted = self._wanted, 0
        if self.is_at_end or self._rest:
            return
        now = self.steps[self.begun].logical_pages
        reserve = self.steps[min(self.begun + self._steps_ahead(), len(self.steps) - 1)].logical_pages - now
        used, given_up = self._used()
        wanted = max(wanted, used - given_up + reserve)
        # Asked last: after a move of pages it looks at every request slot, and most looks end here.
        if wanted > now and self._fits(self.begun + 1):
            self._begin(self._target(wanted))

    def _steps_ahead(self) -> int:
        """How far ahead of need moves begin. Once it is calm not at all, or the border would leave its first place as soon as it is back;
        nor where there are cached prefixes to give up meanwhile."""
        if self._calm >= self.calm_looks or (self.returns.are_rare and not self._hurry):
            return 0
        return MAX_STEPS_AT_ONCE if self._hurry and not self.returns.are_rare else 1

    def rest(self) -> None:
        """Instead of `look`, in an iteration to which no forward comes: the border may also go back."""
        self._calm = 0 if self._wanted else self._calm + 1
        self._look()
        if self._calm >= self.calm_looks and self.begun and not self.is_moving and self._may_go_back():
            self._go_back(0)

    def _may_go_back(self) -> bool:
        """Whether nobody has a logical page beyond those of the first place; asked anew only after pages have been freed."""
        book = self.coordinator.book
        if self._in_use_at == book.moves:
            return False
        is_free = book.is_free_above(self.steps[0].logical_pages)
        self._in_use_at = -1 if is_free else book.moves
        return is_free

    def _go_back(self, step: int) -> None:
        self.coordinator.withdraw(self.steps[step].logical_pages)
        self._mover.begin(self.begun, step)
        self.begun = step
        self.num_returns += 1

    # -- the way back under load ------------------------------------------------------------------------------------

    def _recede(self) -> None:
        """Before a forward: where prompts do not return, go back to what requests have needed lately, and soon will."""
        book = self.coordinator.book
        self._watched += 1
        has_watched = self._watched % self.watch_looks == 0
        self._note_need(self._soon_needed() if has_watched else 0)
        if not (self.returns.are_rare and self.begun):
            self._stay()
        elif has_watched or not self._goes_back:
            needed = max(self._most_needed, self._needed_before)
            room = needed + int(CACHED_SHARE * needed) + self.give_up_pages
            step = min(bisect_left(self._places, room), self.begun)
            book.fill_below(self._places[step])
            self._goes_back = step < self.begun
        if has_watched:
            self._needed_before, self._most_needed = self._most_needed, 0
        if self._goes_back:
            self._clear_above()

    def _soon_needed(self) -> int:
        """Pages by which the live requests will have grown when the next two watches end. Not all up to their final pages: most answers
        end long before their limit, and a page kept for one that does is a part of a device page that nobody has."""
        book = self.coordinator.book
        soon = -(-2 * self.watch_looks // book.limits.page_size)
        return int(np.clip(book.final_pages - book.num_pages, 0, soon).sum())

    def _stay(self) -> None:
        """No way back is being cleared."""
        self.coordinator.book.fill_below(self.coordinator.book.num_usable)
        self._goes_back = False

    def _clear_above(self) -> None:
        """Pages above `fill_limit` become free by and by: the border goes there when they are, and before that as far as the requests
        let it that have pages above."""
        book, limit = self.coordinator.book, self.coordinator.book.fill_limit
        if not book.is_free_above(limit):
            if (book.unused_above(limit) or book.num_free_below < self.give_up_pages) and self._cached.num_unused():
                self._cached.give_up(self.give_up_pages)
            if self._watched % CLEAR_LOOKS and not book.is_free_above(limit):
                return
        step = bisect_left(self._places, max(limit, book.highest_taken()))
        if step < self.begun:
            self._go_back(step)
            self._goes_back = limit < book.num_usable

    def _keeps_within(self, limit: int) -> bool:
        """Choose who is kept so that the live requests are charged no more than `limit` (I7)."""
        return fits(self.coordinator.book, limit)

    def _target(self, wanted: int) -> int:
        """The nearest step with so many logical pages that the live requests leave room for."""
        last = min(len(self.steps) - 1, self.begun + MAX_STEPS_AT_ONCE)
        target = self.begun + 1
        while target < last and self.steps[target].logical_pages < wanted and self._fits(target + 1):
            target += 1
        return target

    def _begin(self, target: int) -> None:
        coordinator, limit = self.coordinator, self.steps[target].device_pages
        if not coordinator.can_withhold(limit):
            return
        if not self._keeps_within(limit) or not self._make_room(coordinator.device_pages.num_usable - limit):
            self._rest = REST_LOOKS
            return
        if not coordinator.can_withhold(limit):  # making room has planned copies that are not acknowledged yet
            return
        coordinator.withhold(limit)
        self._stay()
        self._mover.begin(self.begun, target)
        self.begun = target


def border_steps(
    *,
    device_pages: int,
    logical_pages: int,
    page_bytes: int,
    index_page_bytes: int,
    num_layers: int,
    num_leaders: int,
    chunk_bytes: int,
) -> tuple[BorderStep, ...]:
    """Places of the border for such pools, from `device_pages` device pages to `logical_pages` logical ones.

    At first index-K of as many logical pages as device pages has memory, in whole chunks a leader layer. With each step every
    layer gives up the topmost chunk of its KV; every leader gets one more chunk whenever there are enough for all of them, and
    what is left over is kept for the next step. Pad pages count in; a page has memory when all its bytes have.
    """
    kv_chunks = -(-(device_pages + 1) * page_bytes // chunk_bytes)
    index_chunks = -(-(device_pages + 1) * index_page_bytes // chunk_bytes)
    kv = np.arange(kv_chunks, 0, -1)
    index = index_chunks + np.arange(kv.size) * num_layers // num_leaders
    device = np.minimum(kv * chunk_bytes // page_bytes - 1, device_pages)
    logical = np.minimum(index * chunk_bytes // index_page_bytes - 1, logical_pages)
    needed = int(np.argmax(logical >= logical_pages)) if (logical >= logical_pages).any() else kv.size - 1
    device, logical = device[: needed + 1], logical[: needed + 1]
    return tuple(BorderStep(int(d), int(n)) for d, n in zip(device, logical, strict=True))
