"""Planted bugs of the ledger that counts shared pages once. Used as mutations.py is."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_hisparse.residency import ResidencyCoordinator, SpillPolicy
from sglang_hisparse.residency.page_book import PageBook
from sglang_hisparse.residency.sharing import SharingPass
from sim.mutations import Mutation
from sim.ranks import Parts


class PaidForLife(SharingPass):
    """A page that somebody has paid for once costs nothing, though the payer has ended or is kept no longer."""

    def price(self, prefix: np.ndarray, need: int) -> int:
        self._book.was_paid = paid = getattr(self._book, "was_paid", np.zeros_like(self._book.keepers)) | self._book.keepers
        return need - len(prefix) + int(np.count_nonzero(paid[prefix] == 0))


class PaidByAnybody(SharingPass):
    """A page that a running request uses costs nothing, whether that request is kept or not."""

    def price(self, prefix: np.ndarray, need: int) -> int:
        return need - len(prefix) + int(np.count_nonzero(self._book.users[prefix] == 0))


class KeptPagesSpilledTogether(SpillPolicy):
    """Requests that share pages go mixed together, kept ones too: leases that the ledger has not charged."""

    def _charged_for_a_lease(self) -> list[int]:
        worst = self.coordinator.book.worst_pages()
        return [slot for slot in self._unleased_decoding() if worst[slot] == self.coordinator.limits.smallest_pages]


class KeptPagesSpilled(SpillPolicy):
    """Pages leave that only kept requests use, as if those held leases."""

    def _spill_unclaimed(self, num_pages: int) -> None:
        book = self.coordinator.book
        pages = np.flatnonzero(book.sealed_resident() & (book.holds == 0) & (book.unleased == book.keepers))
        pages = self._releasable_of(pages)[: max(self._short(num_pages), 0)]
        unleased = book.unleased[pages].copy()
        book.unleased[pages] = 0
        self.coordinator.spill(pages.tolist())
        book.unleased[pages] = unleased


class GrowthIsFree(PageBook):
    """A kept request is charged the pages that it has, and not those that it grows by."""

    def growth_pages(self) -> np.ndarray:
        return super().growth_pages() * self.prefilling


class _CoordinatorOfGrowthIsFree(ResidencyCoordinator):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.book = GrowthIsFree(self.limits)


SHARING_MUTATIONS: tuple[Mutation, ...] = (
    Mutation("paid pages outlive their payer", "I7", Parts(sharing=PaidForLife)),
    Mutation("paid by a request that is not kept", "I7", Parts(sharing=PaidByAnybody)),
    Mutation("kept requests go mixed together", "I7", Parts(policy=KeptPagesSpilledTogether)),
    Mutation("page of a kept request spilled", "R19", Parts(policy=KeptPagesSpilled)),
    Mutation("growth of kept requests not charged", "I7", Parts(coordinator=_CoordinatorOfGrowthIsFree)),
)
