"""Planted protocol bugs: each replaces a part of the system by a subclass that breaks one rule.

They test the tests: the simulator must catch every one of them. Used by scripts/simulate.py --mutations and by
test_checkers_bite.py; nothing else may import them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_hisparse.residency import DevicePages, Owner, PageState, ResidencyCoordinator, SpillPolicy, StepPlan
from sglang_hisparse.residency.types import PageTransfer, StreamPlan
from sim.gpu_model import ForwardItem, GpuModel, Violation
from sim.ranks import Parts, Ranks
from sim.side_stream import StreamedExtend
from sim.simulator import Simulation


@dataclass(frozen=True, slots=True)
class Mutation:
    """`breaks` is the rule that the bug violates, not necessarily the one whose checker sees it first."""

    name: str
    breaks: str
    parts: Parts = field(default_factory=Parts)
    simulation: type[Simulation] = Simulation


# -- host copies and their acknowledgements ----------------------------------------------------------------------------


class ReleaseBeforeEnqueue(ResidencyCoordinator):
    """A planned copy is taken for one that is on the copy stream."""

    def mirror(self, pages: Iterable[int]) -> None:
        super().mirror(pages)
        self.book.enqueued[self.book.state == PageState.MIRRORING] = True


class StaleAcknowledgement(ResidencyCoordinator):
    """Acknowledgements are applied to the page, whoever owns it now."""

    def on_enqueued(self, transfer_ids: Iterable[int]) -> None:
        for transfer_id in transfer_ids:
            if page := self._transfers.get(transfer_id):
                self.book.enqueued[page] = True

    def on_completed(self, transfer_ids: Iterable[int]) -> None:
        for transfer_id in transfer_ids:
            if page := self._transfers.pop(transfer_id, None):
                self._land(page)
                self._publish(page)


class PublishAtEnqueue(ResidencyCoordinator):
    """Enqueued is taken for completed."""

    def on_enqueued(self, transfer_ids: Iterable[int]) -> None:
        ids = list(transfer_ids)
        super().on_enqueued(ids)
        for transfer_id in ids:
            page = self._transfers.get(transfer_id)
            if page and self.book.transfer[page] == transfer_id:
                self._publish(page)


class EarlyCompletionPublishes(ResidencyCoordinator):
    """A completion makes a page releasable on the rank that saw it, before enqueued does so on all."""

    def on_completed(self, transfer_ids: Iterable[int]) -> None:
        for transfer_id in transfer_ids:
            if page := self._transfers.get(transfer_id):
                self.book.enqueued[page] |= self.book.transfer[page] == transfer_id
            super().on_completed((transfer_id,))


class FailedTakenAsEnqueued(ResidencyCoordinator):
    def on_failed(self, transfer_ids: Iterable[int]) -> None:
        self.on_enqueued(transfer_ids)


class FailedForgotten(ResidencyCoordinator):
    """A failed copy is never planned again."""

    def on_failed(self, transfer_ids: Iterable[int]) -> None:
        for transfer_id in transfer_ids:
            if page := self._transfers.pop(transfer_id, None):
                self._land(page)


class FreedKeepsTransfer(ResidencyCoordinator):
    """The next owner of a logical page inherits the copy of the last one."""

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            kept = self.book.transfer[page], self.book.enqueued[page]
            super().free((page,))
            self.book.transfer[page], self.book.enqueued[page] = kept


class AlwaysLandingTarget(ResidencyCoordinator):
    def is_landing_target(self, page: int) -> bool:
        return True


class CopyAheadOfForward(GpuModel):
    """The copy stream does not wait for the last launched forward."""

    def enqueue(self, transfer: PageTransfer) -> None:
        self.copy_stream.append((0, 0, transfer))


# -- sealing and the tail ----------------------------------------------------------------------------------------------


class MirrorUnsealed(ResidencyCoordinator):
    """A page is sealed when its first row is written."""

    def note_launch(self, slots: Sequence[int], seq_lens: Sequence[int], prefill_ends: Sequence[bool]) -> None:
        size = self.limits.page_size
        super().note_launch(slots, [-(-length // size) * size for length in seq_lens], prefill_ends)


class SealedOneRowEarly(ResidencyCoordinator):
    """`kv_committed_len` is taken for a seal: it runs one row ahead (R9)."""

    def note_launch(self, slots: Sequence[int], seq_lens: Sequence[int], prefill_ends: Sequence[bool]) -> None:
        super().note_launch(slots, [length + 1 for length in seq_lens], prefill_ends)


class TailNotHeld(ResidencyCoordinator):
    def _hold_tail_only(self, slot: int) -> None:
        self.book.set_held_from(slot, int(self.book.num_pages[slot]))


# -- the step's order --------------------------------------------------------------------------------------------------


class WaitSkipped(ResidencyCoordinator):
    def take_plan(self) -> StepPlan:
        return replace(super().take_plan(), wait_transfer_id=0)


class WaitForLastSpilledOnly(ResidencyCoordinator):
    """The plan waits for the copy of the page spilled last, which need not be the latest copy."""

    def spill(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._wait_transfer_id = 0
            super().spill((page,))


class PromotionBeforeWait(GpuModel):
    def apply(self, plan: StepPlan) -> None:
        super().apply(replace(plan, wait_transfer_id=0, table=(), leases=()))
        super().apply(replace(plan, promotions=()))


class PromotionNotCopied(GpuModel):
    def apply(self, plan: StepPlan) -> None:
        super().apply(replace(plan, promotions=()))


class TableWrittenAtOnce(GpuModel):
    """The page table is written when the plan is made, under the forward that is still running."""

    def apply(self, plan: StepPlan) -> None:
        super().apply(replace(plan, table=()))
        self._write_table(plan.table)


class _RanksThatZeroTheTable(Ranks):
    def free(self, pages: list[int]) -> None:
        super().free(pages)
        for rank in self.members:
            for page in pages:
                rank.gpu.table[page] = 0


class FreeWritesTheTable(Simulation):
    """`free` zeroes the table of launched forwards (R5)."""

    ranks_class = _RanksThatZeroTheTable


# -- leases and hot rows -----------------------------------------------------------------------------------------------


class LeaseNotReturned(ResidencyCoordinator):
    def release(self, slot: int) -> None:
        if self.book.live[slot]:
            self.book.close_slot(slot)


class LeaseEndedEarly(ResidencyCoordinator):
    """A promotion ends the lease of its users though other pages of theirs are still host-only."""

    def promote(self, pages: Sequence[int]) -> bool:
        done = super().promote(pages)
        for slot in list(self.hot_lease) if done else ():
            if np.isin(self.book.pages(slot), pages).any():
                self.release_lease(slot)
        return done


class HotRowsKeptAfterDedup(ResidencyCoordinator):
    """The ids of replaced pages stay in the hot buffer's tags, and come back as other pages' ids."""

    def replace(self, slot: int, start: int, pages: Sequence[int]) -> list[int]:
        announced = slot in self._lease_changes
        old = super().replace(slot, start, pages)
        if not announced:
            self._lease_changes.pop(slot, None)
        return old


class HotRowsKeptOnLeaseChange(GpuModel):
    def _write_leases(self, leases: Sequence[object]) -> None:
        kept = dict(self.tags)
        super()._write_leases(leases)
        self.tags = kept


class DedupWithoutRehome(ResidencyCoordinator):
    def _rehome(self, old: int, page: int) -> None:
        pass


class SpillIgnoresUnleasedUsers(SpillPolicy):
    def _spill_unclaimed(self, num_pages: int) -> None:
        book = self.coordinator.book
        pages = np.flatnonzero(book.sealed_resident() & (book.holds == 0))
        pages = self._releasable_of(pages)[: max(self._short(num_pages), 0)]
        kept = book.unleased[pages].copy()
        book.unleased[pages] = 0
        self.coordinator.spill(pages.tolist())
        book.unleased[pages] = kept


class LeasesBeyondTheLedger(SpillPolicy):
    """Every request gets a lease while pages are free, short ones too: pages that others were promised."""

    def tick(self) -> None:
        super().tick()
        for slot in self._unleased_decoding():
            self.coordinator.acquire_lease(slot)


class HoldsLeaked(ResidencyCoordinator):
    """A page that leaves a request's row keeps the hold of its tail."""

    def unmap(self, slot: int, start: int, end: int) -> list[int]:
        self.book.held_from[slot] = self.book.num_pages[slot]
        return super().unmap(slot, start, end)


class SlotKeepsSealBorder(ResidencyCoordinator):
    """The next request of a slot finds how much the last one had sealed."""

    def release(self, slot: int) -> None:
        kept = self.book.sealed[slot]
        super().release(slot)
        self.book.sealed[slot] = kept


# -- streamed prefills -------------------------------------------------------------------------------------------------


class StreamAheadOfTheForward(GpuModel):
    """The side stream waits for nothing: it reads host rows whose copies have not landed."""

    def fetch(self, extend: StreamedExtend, layer: int) -> None:
        self.side.fetches.append((0, extend, layer))


class ScratchOverwrittenEarly(GpuModel):
    """Every layer's host pages are fetched behind what preceded the extend, not behind the half's last reader."""

    def _launch_streamed(self, items: Sequence[ForwardItem], extend: StreamedExtend) -> None:
        self._begun = self.num_put
        super()._launch_streamed(items, extend)

    def fetch(self, extend: StreamedExtend, layer: int) -> None:
        self.side.fetches.append((self._begun, extend, layer))


class AttentionAheadOfTheStream(GpuModel):
    """Attention reads the scratch before the layer's host pages have arrived."""

    def stage(self, extend: StreamedExtend, layer: int) -> bool:
        fetched, extend.fetched = extend.fetched, layer
        super().stage(extend, layer)
        extend.fetched = max(fetched, extend.fetched) if fetched >= layer else fetched
        return True


class StreamWithoutResidentPages(ResidencyCoordinator):
    """The scratch gets the host-only pages alone."""

    def plan_stream(self, slots: Sequence[int]) -> StreamPlan | None:
        plan = super().plan_stream(slots)
        return plan and StreamPlan(plan.host_pages, plan.resident_pages[:0], plan.device_pages[:0])


class StreamForgetsANeighbour(ResidencyCoordinator):
    """Only the pages of requests that have host-only ones go to the scratch; attention of all reads it."""

    def plan_stream(self, slots: Sequence[int]) -> StreamPlan | None:
        return super().plan_stream([slot for slot in slots if self.book.host_pages(slot)])


class StreamHoldsAll(ResidencyCoordinator):
    """A streamed prefill holds its whole prompt, which the device cannot."""

    def note_launch(self, slots: Sequence[int], seq_lens: Sequence[int], prefill_ends: Sequence[bool]) -> None:
        super().note_launch(slots, seq_lens, prefill_ends)
        for slot in slots:
            if self.book.streams(slot):
                self.book.set_held_from(slot, 0)


class StreamWithoutLease(ResidencyCoordinator):
    """A streamed prefill ends without a hot buffer, and decodes."""

    def note_launch(self, slots: Sequence[int], seq_lens: Sequence[int], prefill_ends: Sequence[bool]) -> None:
        ended = [slot for slot, ends in zip(slots, prefill_ends, strict=True) if ends and self.book.streams(slot)]
        super().note_launch(slots, seq_lens, prefill_ends)
        for slot in ended:
            self.release_lease(slot)


# -- pools, ranks and flush --------------------------------------------------------------------------------------------


class _TrustingDevicePages(DevicePages):
    def release(self, pages: Sequence[int], owner: Owner, owner_id: int | None = None) -> None:
        for page in pages:
            self.owner[page] = Owner.FREE
            self._free.append(page)


class DoubleFreeAccepted(ResidencyCoordinator):
    """Every freed page is given back twice, and the pool takes it."""

    def free(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        device_pages = [int(page) for page in self.book.device_page[pages] if page]
        super().free(pages)
        self.device_pages.release(device_pages, Owner.RESIDENT)


class PromotionLeaksPage(ResidencyCoordinator):
    def promote(self, pages: Sequence[int]) -> bool:
        done = super().promote(pages)
        if done:
            self.device_pages.lease(1, Owner.RESIDENT, 0)
        return done


class CompletionDecides(ResidencyCoordinator):
    """Only completed copies are releasable: ranks see completions at different times."""

    def take_plan(self) -> StepPlan:
        self.book.releasable = lambda: self.book.state == PageState.CLEAN  # type: ignore[method-assign]
        return super().take_plan()


class TableKeptByFlush(GpuModel):
    """After a flush the page table still maps the pages of before."""

    def forget_all(self) -> None:
        pass


class ClearKeepsTransfers(ResidencyCoordinator):
    def clear(self) -> None:
        kept = dict(self._transfers), dict(self._in_flight)
        super().clear()
        self._transfers.update(kept[0])
        self._in_flight.update(kept[1])


def _coordinator(name: str, breaks: str, cls: type[ResidencyCoordinator]) -> Mutation:
    return Mutation(name, breaks, Parts(coordinator=cls))


def _gpu(name: str, breaks: str, cls: type[GpuModel]) -> Mutation:
    return Mutation(name, breaks, Parts(gpu=cls))


MUTATIONS: tuple[Mutation, ...] = (
    _coordinator("release before enqueue", "I1", ReleaseBeforeEnqueue),
    _coordinator("stale acknowledgement accepted", "I5", StaleAcknowledgement),
    _coordinator("publish at enqueue", "I6", PublishAtEnqueue),
    _coordinator("early completion publishes", "R30", EarlyCompletionPublishes),
    _coordinator("failed copy taken as enqueued", "I1", FailedTakenAsEnqueued),
    _coordinator("failed copy forgotten", "I3", FailedForgotten),
    _coordinator("freed page keeps its transfer", "I5", FreedKeepsTransfer),
    _coordinator("always a landing target", "R7", AlwaysLandingTarget),
    _gpu("copy ahead of the forward", "I1", CopyAheadOfForward),
    _coordinator("mirror of an unsealed page", "I1", MirrorUnsealed),
    _coordinator("sealed one row early", "R9", SealedOneRowEarly),
    _coordinator("tail not held", "R19", TailNotHeld),
    _coordinator("wait event skipped", "I6", WaitSkipped),
    _coordinator("wait for the last spilled page only", "I6", WaitForLastSpilledOnly),
    _gpu("promotion before the wait", "I6", PromotionBeforeWait),
    _gpu("promotion not copied", "I6", PromotionNotCopied),
    _gpu("table written under a running forward", "R4", TableWrittenAtOnce),
    Mutation("free writes the table", "R5", simulation=FreeWritesTheTable),
    _coordinator("lease not returned", "I3", LeaseNotReturned),
    _coordinator("lease ended early", "R19", LeaseEndedEarly),
    _coordinator("hot rows kept after dedup", "I4", HotRowsKeptAfterDedup),
    _gpu("hot rows kept on lease change", "I4", HotRowsKeptOnLeaseChange),
    _coordinator("dedup without re-homing", "R22", DedupWithoutRehome),
    Mutation("shared page spilled with an unleased user", "R19", Parts(policy=SpillIgnoresUnleasedUsers)),
    Mutation("leases beyond the ledger", "R20", Parts(policy=LeasesBeyondTheLedger)),
    _coordinator("holds leaked", "R19", HoldsLeaked),
    _coordinator("slot keeps its seal border", "R12", SlotKeepsSealBorder),
    _gpu("stream ahead of the forward", "I6", StreamAheadOfTheForward),
    _gpu("scratch overwritten early", "I6", ScratchOverwrittenEarly),
    _gpu("attention ahead of the stream", "I6", AttentionAheadOfTheStream),
    _coordinator("stream without resident pages", "I6", StreamWithoutResidentPages),
    _coordinator("stream forgets a neighbour", "I6", StreamForgetsANeighbour),
    _coordinator("stream holds all", "I7", StreamHoldsAll),
    _coordinator("stream without a lease", "R19", StreamWithoutLease),
    Mutation("double free accepted", "I2", Parts(device_pages=_TrustingDevicePages, coordinator=DoubleFreeAccepted)),
    _coordinator("promotion leaks a page", "I3", PromotionLeaksPage),
    _coordinator("completion decides", "R30", CompletionDecides),
    _gpu("table kept by a flush", "I2", TableKeptByFlush),
    _coordinator("flush keeps the transfers", "I5", ClearKeepsTransfers),
)


def hunt(mutation: Mutation, seed: int, limit: int) -> tuple[int, str] | None:
    """Schedules until the bug was seen, and the invariant that saw it; None: not within `limit`."""
    for count in range(limit):
        try:
            mutation.simulation(seed + count, mutation.parts).run()
        except Violation as violation:
            return count + 1, violation.invariant
    return None
