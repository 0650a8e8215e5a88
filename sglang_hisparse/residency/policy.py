"""Which pages leave the device, which come back, and when.

Called by the runtime at two moments: `make_room` before an allocation that needs more device pages than are free, and
`tick` before each forward. Both only call the coordinator's transactions; what they keep are figures of the book that hold
until it notes a move, and they look at nothing that differs between the ranks of a tensor-parallel group (completion of
copies in particular).

Order of victims (design section 3): pages that no running request uses, least recently used first; then older pages of
requests that already hold a lease; then the request that gains most by going mixed, where the pages it gives back exceed
its lease; then requests that share pages and gain only together.
"""

from __future__ import annotations

import numpy as np

from sglang_hisparse.residency.coordinator import ResidencyCoordinator
from sglang_hisparse.residency.sharing import settle
from sglang_hisparse.residency.types import Mirroring, PageState, ResidencyMode

# As plain numbers: an enum's attribute costs more than the comparison, and these run per page and step.
_DIRTY, _HOST = int(PageState.DIRTY), int(PageState.HOST)


class SpillPolicy:
    """Decides for one coordinator."""

    def __init__(self, coordinator: ResidencyCoordinator) -> None:
        self.coordinator = coordinator
        self._watermarks = (-1, (0, 0))  # of so many usable device pages
        self._looked_at = -1  # `moves` of the book when these were counted:
        self._fewest_host_pages: int | None = None  # of a request that could be promoted; None: there is none
        self._num_unused = 0
        self._rested_with: tuple[int, int, int] | None = None  # figures that leave a tick nothing to do

    @property
    def watermark_low_pages(self) -> int:
        """Pages are spilled when fewer than this are free."""
        return self._watermark_pages()[0]

    @property
    def watermark_high_pages(self) -> int:
        """A spill goes on until this many are free."""
        return self._watermark_pages()[1]

    def _watermark_pages(self) -> tuple[int, int]:
        num_usable = self.coordinator.device_pages.num_usable
        if self._watermarks[0] != num_usable:
            self._watermarks = num_usable, self.coordinator.policy.watermark_pages(num_usable)
        return self._watermarks[1]

    # -- before an allocation ---------------------------------------------------------------------------------------

    def make_room(self, num_pages: int) -> bool:
        """Spill until `num_pages` device pages are free; False when nothing more can leave (the caller queues or retracts)."""
        done = self._spill_until_free(num_pages)
        if not done:
            self.coordinator.counters.refusals += 1
        return done

    def _spill_until_free(self, num_pages: int) -> bool:
        if self._short(num_pages) <= 0:
            return True
        self._spill_unclaimed(num_pages)
        while self._short(num_pages) > 0 and (
            self._mix_best_request(num_pages) or self._mix_best_cluster(num_pages) or self._mix_all_that_may()
        ):
            pass
        return self._short(num_pages) <= 0

    def _short(self, num_pages: int) -> int:
        return num_pages - self.coordinator.device_pages.num_free

    def _releasable_of(self, pages: np.ndarray) -> np.ndarray:
        """Mirror those of `pages` that are DIRTY and return the ones whose host copy is now on its way."""
        book = self.coordinator.book
        dirty = pages[book.state[pages] == _DIRTY]
        if dirty.size:
            self.coordinator.mirror(dirty.tolist())
        return pages[book.releasable()[pages]]

    def _spill_unclaimed(self, num_pages: int) -> None:
        """Spill pages that cost no lease: those of no running request, then those whose users all hold one."""
        book = self.coordinator.book
        pages = np.flatnonzero(book.sealed_resident() & (book.holds == 0) & (book.unleased == 0))
        # Pages with a host copy on its way go before DIRTY ones: they cost no transfer now.
        order = np.lexsort((pages, book.last_use[pages], book.users[pages] > 0, book.state[pages] == _DIRTY))
        victims = pages[order]
        while victims.size and (short := self._short(num_pages)) > 0:
            batch, victims = victims[:short], victims[short:]
            self.coordinator.spill(self._releasable_of(batch).tolist())

    def _beyond_tail(self, slot: int) -> np.ndarray:
        """Resident pages of a request that could leave if all their users held a lease, oldest first."""
        book = self.coordinator.book
        row = book.slot_pages[slot, : book.held_from[slot]]
        return row[book.sealed_resident()[row] & (book.holds[row] == 0)]

    def _mixable(self, slot: int) -> np.ndarray:
        """Pages of a request without a lease that could leave if it alone took one, oldest first."""
        pages = self._beyond_tail(slot)
        return pages[self.coordinator.book.unleased[pages] == 1]

    def _unleased_decoding(self) -> list[int]:
        book = self.coordinator.book
        return np.flatnonzero(book.live & ~book.prefilling & ~book.leased).tolist()

    def _mix_best_request(self, num_pages: int) -> bool:
        """The request that gains most takes a lease and gives back its oldest pages. False: none gains.

        A request that the ledger keeps must give back as much as it is charged for with a lease: the sum may not rise.
        """
        limits = self.coordinator.limits
        hot, kept = limits.hot_pages, self.coordinator.book.kept
        candidates = [
            (pages.size, slot, pages)
            for slot in self._unleased_decoding()
            if (pages := self._mixable(slot)).size > (limits.smallest_pages - 1 if kept[slot] else hot)
        ]
        for size, slot, pages in sorted(candidates, key=lambda item: (-item[0], item[1])):
            # At least one page more than the lease costs; beyond that, what is short and up to the high watermark.
            wanted = max(hot + 1, self._short(num_pages + self.watermark_high_pages) + hot)
            if self._mix([slot], pages[: min(size, wanted)]):
                return True
        return False

    def _mix_best_cluster(self, num_pages: int) -> bool:
        """Requests that share pages go mixed together, where the pages they give back exceed all their leases.

        Candidates are the sets of users of the pages themselves: a long prefix that two requests share may leave although
        the first page of it serves a hundred others. Requests too short to be charged for a lease (`worst_pages`), and those
        that are kept, never take part: the ledger pays for every page that they use, and could not pay for their leases.
        """
        book, hot = self.coordinator.book, self.coordinator.limits.hot_pages
        slots = self._charged_for_a_lease()
        rows = {slot: book.slot_pages[slot, : book.held_from[slot]] for slot in slots}
        users = np.zeros(book.users.shape, dtype=np.int32)
        for row in rows.values():
            np.add.at(users, row, 1)
        leavable = book.sealed_resident() & (book.holds == 0) & (book.unleased > 1) & (users == book.unleased)
        first_pages: dict[int, None] = {}  # of the runs of pages with the same users: rows share prefixes, so sets only shrink
        for row in rows.values():
            own = row[leavable[row]]
            first_pages.update(dict.fromkeys(own[np.diff(users[own], prepend=-1) != 0].tolist()))
        candidates = []
        for page in first_pages:
            cluster = [slot for slot in slots if (rows[slot] == page).any()]
            pages = self._pages_of_cluster([rows[slot] for slot in cluster])
            if (gain := pages.size - hot * len(cluster)) > 0:
                candidates.append((-gain, cluster, pages))
        return any(self._mix(cluster, pages) for _, cluster, pages in sorted(candidates, key=lambda item: item[:2]))

    def _charged_for_a_lease(self) -> list[int]:
        """Decoding requests without a lease for which the ledger has paid one."""
        book = self.coordinator.book
        is_charged = (book.worst_pages() == self.coordinator.limits.smallest_pages) & ~book.kept
        return [slot for slot in self._unleased_decoding() if is_charged[slot]]

    def _mix_all_that_may(self) -> bool:
        """All of these at once: what is left then is what the ledger has charged. Where that gains nothing, no more than that is
        in use already, so `make_room` reaches the sum whatever shape the prefixes have (I7)."""
        if not (slots := self._charged_for_a_lease()):
            return False
        book = self.coordinator.book
        pages = self._pages_of_cluster([book.slot_pages[slot, : book.held_from[slot]] for slot in slots])
        return pages.size > self.coordinator.limits.hot_pages * len(slots) and self._mix(slots, pages)

    def _pages_of_cluster(self, rows: list[np.ndarray]) -> np.ndarray:
        """Pages of `rows` that could leave if just the requests of these rows took leases."""
        book = self.coordinator.book
        inside = np.zeros(book.users.shape, dtype=np.int32)
        for row in rows:
            np.add.at(inside, row, 1)
        members = np.unique(np.concatenate(rows))
        return members[(book.sealed_resident() & (book.holds == 0) & (inside == book.unleased))[members]]

    def _mix(self, slots: list[int], pages: np.ndarray) -> bool:
        """One transaction: `slots` take leases, funded by the pages that they give back (R20). All or nothing."""
        coordinator, hot = self.coordinator, self.coordinator.limits.hot_pages
        releasable = self._releasable_of(pages)
        if releasable.size <= hot * len(slots):
            return False
        book, missing = coordinator.book, hot * len(slots) - coordinator.device_pages.num_free
        # The leases are marked first, so that the pages may leave, and funded by them.
        for slot in slots:
            book.set_leased(slot, True)
        allowed = releasable[book.unleased[releasable] == 0]
        if allowed.size <= max(missing, 0):
            for slot in slots:
                book.set_leased(slot, False)
            return False
        coordinator.spill(allowed.tolist())
        for slot in slots:
            if not coordinator.acquire_lease(slot):
                raise AssertionError(f"{allowed.size} pages given back do not fund the lease of slot {slot}")
        return True

    # -- before each forward ----------------------------------------------------------------------------------------

    def is_at_rest(self) -> bool:
        """Whether `tick` would do what it did last: nothing."""
        return not self.coordinator.num_dirty and self._rested_with == self._figures()

    def _figures(self) -> tuple[int, int, int]:
        """What `tick` goes by while no page is DIRTY, and none is to be acknowledged that may leave then."""
        pages = self.coordinator.device_pages
        return self.coordinator.book.moves, pages.num_free, pages.num_usable

    def tick(self) -> None:
        """Mirror what is sealed, keep the watermark, promote when there is room. The budget bounds the work of one step."""
        if self.is_at_rest():
            return
        before, is_clean = self._figures(), not self.coordinator.num_dirty
        self._tick()
        # In need of pages, acknowledgements that are no move of the book may let some leave in the next step. With none to come a
        # device that is full of pages that must stay is no reason to look at them in every step.
        is_settled = before[1] >= self.watermark_low_pages or not self.coordinator.has_unsent
        has_rest = is_clean and is_settled and before == self._figures()
        self._rested_with = before if has_rest and self.coordinator.policy.mode != ResidencyMode.ALWAYS_HOST else None

    def _tick(self) -> None:
        coordinator = self.coordinator
        policy = coordinator.policy
        if coordinator.num_dirty and policy.mirroring == Mirroring.EAGER and not coordinator.link_rests:
            coordinator.mirror(coordinator.mirror_backlog(policy.mirror_pages_per_step))
        if policy.mode == ResidencyMode.ALWAYS_HOST:
            self._send_all_to_host()
        elif coordinator.device_pages.num_free < self.watermark_low_pages:
            self._spill_until_free(self.watermark_high_pages)
        elif policy.promote_pages_per_step:
            self._promote_one_request()

    def _send_all_to_host(self) -> None:
        """`always_host`: every sealed page of a decoding request beyond its tail leaves, however much is free."""
        coordinator, book = self.coordinator, self.coordinator.book
        worst, smallest = book.worst_pages(), coordinator.limits.smallest_pages
        spare = coordinator.device_pages.num_usable - int(worst.sum())
        for slot in self._unleased_decoding():
            # Also where every such page is shared: its other users get their leases in this very loop.
            if not self._beyond_tail(slot).size or (extra := smallest - int(worst[slot])) > spare:
                continue  # a lease beyond what the ledger has charged would take pages that others were promised
            if coordinator.device_pages.num_free >= coordinator.limits.hot_pages:
                coordinator.acquire_lease(slot)
                spare -= extra
            else:
                self._mix([slot], self._mixable(slot))
        used = book.sealed_resident() & (book.holds == 0) & (book.unleased == 0) & (book.users > 0)
        coordinator.spill(self._releasable_of(np.flatnonzero(used)).tolist())

    def _promote_one_request(self) -> None:
        """The request that misses most for each page that must come back becomes fully resident, if that leaves the high
        watermark free. Where misses are unknown or equal: the one with the fewest host-only pages.

        A part of a request is never the goal: only a whole one gives back its lease, and the resolver counts by request.
        Pages that no request uses make room for it first: they are colder than any page of a running one. What comes back
        that way is spilled again only for want of free pages, after every unused one, so the two do not chase each other.
        Bounded per step, newest pages first; its lease ends with its last host-only page. A request is begun only when all
        of it fits. One that is still being prefilled by streaming is passed over: its pages leave as fast as they come.
        """
        coordinator, book = self.coordinator, self.coordinator.book
        room = self._room_to_promote()
        if room <= 0:
            return
        leased, unused = self._leased_decoding(), self._unused_pages()
        counts = zip(book.host_counts(leased).tolist(), leased.tolist(), strict=True)
        sized = [(count, slot) for count, slot in counts if count <= room]
        # First those that have nothing left to bring back: their leases end.
        for count, slot in sorted(sized, key=lambda item: (item[0] > 0, -book.misses[item[1]] / max(item[0], 1), item)):
            row = book.pages(slot)
            on_host = row[book.state[row] == _HOST][::-1]
            batch = on_host[: coordinator.policy.promote_pages_per_step].tolist()
            if not batch:
                self._end_lease(slot)
                continue
            # Spilled once a call: `unused` is not looked up again.
            short = len(batch) + self.watermark_high_pages - coordinator.device_pages.num_free
            if short > 0:
                coordinator.spill(unused[:short].tolist())
            if coordinator.promote(batch) and len(batch) == count:
                self._end_lease(slot)
            return

    def _end_lease(self, slot: int) -> None:
        """All of the request is back. Beside others that share its pages it may be cheaper to keep it: then the ledger has shrunk,
        and admission is asked again."""
        self.coordinator.release_lease(slot)
        settle(self.coordinator.book, slot)

    def _room_to_promote(self) -> int:
        """Device pages that could be had for what comes back, the high watermark left free; 0 where no request fits.

        Most steps move nothing: they ask with the figures of the last one that did.
        """
        book = self.coordinator.book
        if self._looked_at != book.moves:
            self._looked_at, leased = book.moves, self._leased_decoding()
            self._fewest_host_pages = int(book.host_counts(leased).min()) if leased.size else None
            self._num_unused = int(np.count_nonzero(self._is_unused())) if leased.size else 0
        if self._fewest_host_pages is None:
            return 0
        room = self.coordinator.device_pages.num_free + self._num_unused - self.watermark_high_pages
        return room if room > 0 and self._fewest_host_pages <= room else 0

    def _leased_decoding(self) -> np.ndarray:
        book = self.coordinator.book
        return np.flatnonzero(book.leased & book.live & ~book.prefilling)

    def _is_unused(self) -> np.ndarray:
        """Bool per page: resident, of no request, and it could leave without a copy."""
        book = self.coordinator.book
        return book.releasable() & (book.users == 0) & (book.holds == 0)

    def _unused_pages(self) -> np.ndarray:
        """Such pages, least recently used first."""
        pages = np.flatnonzero(self._is_unused())
        return pages[np.lexsort((pages, self.coordinator.book.last_use[pages]))]
