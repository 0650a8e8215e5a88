"""Planted bugs of the border between KV and index-K: mutations.py for what moves memory.

They test the tests: the simulator must catch every one of them. Used by scripts/simulate.py --mutations and by
test_checkers_bite.py; nothing else may import them.
"""

from __future__ import annotations

from sglang_hisparse.residency import Border, DevicePages, Owner, Progress, ResidencyCoordinator, StepPlan
from sim.gpu_model import GpuModel
from sim.mutations import Mutation
from sim.ranks import Parts, SimMover


class UnmapBeforeMirrorEnded(ResidencyCoordinator):
    """The forward does not wait for the copies that still read the pages that leave."""

    def withhold(self, limit: int) -> None:
        self._last_copy[limit + 1 :] = 0
        super().withhold(limit)


class UnsentCopiesForgotten(ResidencyCoordinator):
    """A copy that is planned and not on the copy stream yet may read a page that leaves."""

    def can_withhold(self, limit: int) -> bool:
        return True


class UnmapUnderTheForward(SimMover):
    """Enqueued is taken for run: launched forwards still read the pages."""

    def progress(self) -> Progress:
        return Progress.VACATED if self.calls_left else Progress.MOVED


class PublishedBeforeTheMap(Border):
    """Logical pages are handed out when the move begins."""

    def _begin(self, target: int) -> None:
        before = self.begun
        super()._begin(target)
        if self.begun != before:
            self.coordinator.book.extend_to(self.steps[self.begun].logical_pages)


class PublishedWhenVacated(Border):
    """The last look at the chunks is left out."""

    def follow(self) -> None:
        if self.is_moving and self._agree(int(self._mover.progress())) != Progress.BEGUN:
            self._mover.advance()
            self.ended = self.begun
            self.coordinator.book.extend_to(self.steps[self.ended].logical_pages)


class RelocationForgetsTheTable(ResidencyCoordinator):
    def _relocate(self, page: int, source: int, target: int) -> None:
        super()._relocate(page, source, target)
        self._table_changes.pop(page, None)


class RelocationCopiesNothing(GpuModel):
    def _relocate(self, relocations: object) -> None:
        pass


class RelocationOfAPromotion(ResidencyCoordinator):
    """A page whose bytes are still to come from the host is copied as it is."""

    def _relocate(self, page: int, source: int, target: int) -> None:
        super()._relocate(page, source, target)
        if self._promotions.pop(page, None):
            self._relocations[source] = target


class RelocationAfterTheTable(GpuModel):
    """The bytes follow in the next step."""

    def apply(self, plan: StepPlan) -> None:
        kept, self._late = getattr(self, "_late", ()), plan.relocations
        super().apply(StepPlan(plan.step, plan.wait_transfer_id, plan.promotions, plan.table, plan.leases, kept, plan.vacates))


class LeaseStaysAbove(ResidencyCoordinator):
    """The hot buffer's table keeps the page that was taken away."""

    def withhold(self, limit: int) -> None:
        announced = dict(self._lease_changes)
        super().withhold(limit)
        self._lease_changes = announced


class WithheldPagesLeased(DevicePages):
    """Pages above the border go back to the free list."""

    def release(self, pages: object, owner: Owner, owner_id: int | None = None) -> None:
        usable, self.num_usable = self.num_usable, self.num_pages
        super().release(pages, owner, owner_id)  # type: ignore[arg-type]
        self.num_usable = usable

    def withhold(self, limit: int) -> list[int]:
        free = self._free
        owned = super().withhold(limit)
        self._free = free
        return owned


class BorderIgnoresTheLedger(Border):
    """A move takes pages that live requests were promised."""

    def _fits(self, step: int) -> bool:
        return True

    def _keeps_within(self, limit: int) -> bool:
        return True


class RankMovesAlone(Border):
    """A rank goes on by what it has seen itself."""

    def follow(self) -> None:
        agree, self._agree = self._agree, lambda value: value
        super().follow()
        self._agree = agree


class DevicePagesBeforeTheMap(Border):
    """On the way back device pages are handed out when the move begins."""

    def _go_back(self) -> None:
        super()._go_back()
        self.coordinator.device_pages.restore(self.steps[0].device_pages)


class WithdrawnPagesHandedOut(ResidencyCoordinator):
    """Logical pages whose index-K leaves stay in the free list."""

    def withdraw(self, limit: int) -> None:
        self._vacates = True


class BackUnderPagesInUse(Border):
    """The border goes back whatever is cached."""

    def _may_go_back(self) -> bool:
        return True


class RankGoesBackAlone(Border):
    """A rank goes back only where its own copies have ended."""

    def _may_go_back(self) -> bool:
        return super()._may_go_back() and not self.coordinator.has_transfers


class BackUnderLoadToTheWish(Border):
    """Under load the border goes to where it should be, whoever is above."""

    def _clear_above(self) -> None:
        limit = self.coordinator.book.fill_limit
        self._go_back(next(n for n, step in enumerate(self.steps) if step.logical_pages >= limit))


class RankGivesUpAlone(Border):
    """A rank goes back under load only where its own copies have ended."""

    def _clear_above(self) -> None:
        if not self.coordinator.has_transfers:
            super()._clear_above()


class RankJudgesAlone(Border):
    """A rank counts cached prefixes by what it has seen of its own copies."""

    def _used(self) -> tuple[int, int]:
        used, given_up = super()._used()
        return used, 0 if self.coordinator.has_transfers else given_up


BORDER_MUTATIONS: tuple[Mutation, ...] = (
    Mutation("unmap before the mirror ended", "I10", Parts(coordinator=UnmapBeforeMirrorEnded)),
    Mutation("unsent copies forgotten", "I10", Parts(coordinator=UnsentCopiesForgotten)),
    Mutation("unmap under the forward", "I10", Parts(mover=UnmapUnderTheForward)),
    Mutation("logical pages before the map", "I10", Parts(border=PublishedBeforeTheMap)),
    Mutation("logical pages when vacated", "I10", Parts(border=PublishedWhenVacated)),
    Mutation("relocation forgets the page table", "I10", Parts(coordinator=RelocationForgetsTheTable)),
    Mutation("relocation copies nothing", "I6", Parts(gpu=RelocationCopiesNothing)),
    Mutation("relocation of a promotion", "I6", Parts(coordinator=RelocationOfAPromotion)),
    Mutation("relocation after the table", "I6", Parts(gpu=RelocationAfterTheTable)),
    Mutation("lease stays above the border", "I10", Parts(coordinator=LeaseStaysAbove)),
    Mutation("withheld pages leased", "I10", Parts(device_pages=WithheldPagesLeased)),
    Mutation("border ignores the ledger", "I7", Parts(border=BorderIgnoresTheLedger)),
    Mutation("rank moves its border alone", "R30", Parts(border=RankMovesAlone)),
    Mutation("device pages before the map back", "I10", Parts(border=DevicePagesBeforeTheMap)),
    Mutation("withdrawn logical pages handed out", "I10", Parts(coordinator=WithdrawnPagesHandedOut)),
    Mutation("border goes back under pages in use", "I10", Parts(border=BackUnderPagesInUse)),
    Mutation("rank goes back alone", "R30", Parts(border=RankGoesBackAlone)),
    Mutation("border goes back under load under pages in use", "I10", Parts(border=BackUnderLoadToTheWish)),
    Mutation("rank gives cached prefixes up alone", "R30", Parts(border=RankGivesUpAlone)),
    Mutation("rank judges alone what is cached", "R30", Parts(border=RankJudgesAlone)),
)
