"""The ranks of the simulator: one coordinator, policy and GPU each, fed the same calls and compared.

Owns the two acknowledgement links. Enqueued acknowledgements are the same on all ranks (they are a decision's input);
completions are delayed, reordered, repeated and lost on each rank by itself, and may change no decision (I5, R30).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_hisparse.capacity import Prefill, PrefillRule, prefill_pages
from sglang_hisparse.residency import Border, DevicePages, Progress, ResidencyCoordinator, ResidencyMode, SpillPolicy
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.residency.misses import MissMeter, MissRounds
from sglang_hisparse.residency.sharing import Candidate, SharingPass
from sglang_hisparse.residency.types import BorderStep, PageTransfer
from sim.gpu_model import GpuModel, Violation
from sim.options import Options


class SimMover:
    """Chunks of one simulated rank: a move takes some calls, and is seen by later forwards at once."""

    def __init__(self, gpu: GpuModel, steps: Sequence[BorderStep], num_calls: int) -> None:
        self.gpu, self.steps, self.num_calls = gpu, steps, num_calls
        self.num_begun = self.num_back = self.step = self.calls_left = 0

    def begin(self, old: int, new: int) -> None:
        self.num_begun, self.step, self.calls_left = self.num_begun + 1, new, self.num_calls
        self.num_back += new < old

    def progress(self) -> Progress:
        if self.gpu.vacated < self.num_begun:
            return Progress.BEGUN
        return Progress.VACATED if self.calls_left else Progress.MOVED

    def progress_after(self) -> Progress:
        """What `progress` says after the call that follows."""
        return Progress.VACATED if self.calls_left > 1 else Progress.MOVED

    def advance(self) -> None:
        """The last call gives the memory to those who gain it; before it, the others have lost theirs."""
        self.calls_left -= 1
        step = self.steps[self.step]
        device, logical = step.device_pages, step.logical_pages
        if self.calls_left:
            device, logical = min(device, self.gpu.mapped_device), min(logical, self.gpu.mapped_logical)
        self.gpu.move_border(device, logical)


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes under test; a planted bug replaces one of them by a subclass."""

    device_pages: type[DevicePages] = DevicePages
    coordinator: type[ResidencyCoordinator] = ResidencyCoordinator
    policy: type[SpillPolicy] = SpillPolicy
    gpu: type[GpuModel] = GpuModel
    border: type[Border] = Border
    mover: type[SimMover] = SimMover
    sharing: type[SharingPass] = SharingPass


@dataclass(slots=True)
class Rank:
    """One rank; `unsent` and `late` are equal on all ranks, `completions` is its own."""

    gpu: GpuModel
    coordinator: Any = None
    policy: Any = None
    border: Any = None
    mover: Any = None
    unsent: deque[PageTransfer] = field(default_factory=deque)
    late: list[int] = field(default_factory=list)
    completions: list[tuple[int, int]] = field(default_factory=list)  # (due step, transfer id)
    completed: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)  # failed
    num_given_up: int = 0  # times that its border had cached prefixes given up
    num_asked: int = 0  # times in this iteration that it asked the others how far the border has come
    fetched: np.ndarray | None = None  # int64 [slots]: what its resolver claims to have counted, unlike any other rank's
    misses: Any = None
    sharing: type[SharingPass] = SharingPass

    def charge(self, rule: PrefillRule, prefix: list[int], prompt: int, final: int, facts: dict[str, Any]) -> Prefill | None:
        """The ledger's answer to one request, as memory/budget.py asks it; None: it waits."""
        book, usable = self.coordinator.book, self.coordinator.device_pages.num_usable
        free, need = usable - book.committed_pages(), max(prompt + 1, final)
        one, pages = self.sharing(book), np.asarray(prefix, dtype=np.int64)
        may_be_kept = self.coordinator.policy.mode != ResidencyMode.ALWAYS_HOST
        price = one.price(pages, need) if may_be_kept else None
        prefill = rule.decide(prompt, final, free_pages=free, kept_pages=price, **facts)
        if prefill.pages <= free:
            return prefill
        resident = prefill_pages(prompt, final, rule.smallest_pages)
        whole = Candidate(pages, need, resident, is_free=may_be_kept)
        if resident <= rule.num_device_pages and one.make_fit(whole, usable):
            return Prefill(resident, kept=whole.kept)
        streamed = Candidate(pages, need, prefill.pages, is_free=False)
        return prefill if prefill.is_streamed and one.make_fit(streamed, usable) else None


class RankCache:
    """What one rank's border sees of the tree, which is one for all: each must give up the same pages, at the same time."""

    def __init__(self, ranks: Ranks, rank: Rank) -> None:
        self._ranks, self._rank = ranks, rank

    def num_unused(self) -> int:
        book = self._rank.coordinator.book
        return int(np.count_nonzero((book.state != 0) & (book.users == 0)))

    def give_up(self, num_pages: int) -> None:
        known, at = self._ranks.given_up, self._rank.num_given_up
        if at == len(known):
            known.append((num_pages, self._ranks.evict(num_pages)))
            for page in known[at][1]:
                self._ranks.generation[page] += 1
        if known[at][0] != num_pages:
            raise Violation("R30", f"ranks give up {known[at][0]} and {num_pages} cached pages")
        self._rank.num_given_up += 1
        self._rank.coordinator.free(known[at][1])


class Ranks:
    """Calls every rank and demands equal answers."""

    def __init__(self, options: Options, parts: Parts, rng: random.Random, seed: int) -> None:
        self.options, self.rng, self.seed = options, rng, seed
        self.calm = False  # no more trouble: acknowledge at once
        self.generation = [0] * (options.limits.num_logical_pages + 1)
        self.transfer_of: dict[int, tuple[int, int]] = {}  # id -> (page, its generation)
        self.stale = 0
        # Of its own: the schedule of a seed does not depend on what is counted.
        self.noise = np.random.default_rng(seed)
        self.round_steps = int(self.noise.integers(1, 4))
        self.counted_steps = self.miss_rounds = 0
        self._least = self._least_after = int(Progress.BEGUN)
        self.evict: Callable[[int], list[int]] = lambda num_pages: []  # of the tree, set by the simulation
        self._verdicts = random.Random(-2 - seed)  # of its own too: whether prompts return
        self.given_up: list[tuple[int, list[int]]] = []  # pages asked for, and given up, since start
        self.members = [self._make_rank(parts) for _ in range(options.num_ranks)]
        self.first = self.members[0]

    def _make_rank(self, parts: Parts) -> Rank:
        rank = Rank(parts.gpu(self.options.limits), sharing=parts.sharing)
        pages = parts.device_pages(self.options.limits.num_device_pages)

        def sink(transfers: list[PageTransfer]) -> list[int]:
            return self._send(rank, transfers)

        rank.coordinator = parts.coordinator(self.options.limits, self.options.policy, pages, sink)
        rank.policy = parts.policy(rank.coordinator)
        rank.fetched = np.zeros(self.options.limits.num_slots, dtype=np.int64)
        book = rank.coordinator.book
        meter = MissMeter(book, lambda: (self.counted_steps, rank.fetched.copy()), self.round_steps)
        rank.misses = MissRounds(book, meter, lambda measured: self.share(rank, measured))
        limits = self.options.limits
        rank.mover = parts.mover(rank.gpu, limits.steps, 1 + self.seed % 3)
        cached = RankCache(self, rank)
        rank.border = parts.border(rank.coordinator, rank.policy.make_room, rank.mover, lambda value: self._agree(rank), cached)
        rank.border.calm_looks, rank.border.watch_looks = 1 + self.seed % 2, 1 + self.seed % 3
        rank.border.give_up_pages = 1 + self.seed % 4
        return rank

    # -- misses -----------------------------------------------------------------------------------------------------

    def share(self, rank: Rank, measured: np.ndarray) -> np.ndarray:
        """What the first rank has measured, for every rank."""
        if rank is self.first:
            self.shared = measured
        return self.shared

    def count_misses(self) -> None:
        """A decode step: each rank counts rows of its own choosing; now and then a round ends, on all of them at once."""
        self.counted_steps += 1
        for rank in self.members:
            rank.fetched += self.noise.integers(0, 100, rank.fetched.shape)
        if self.counted_steps % self.round_steps == 0:
            for rank in self.members:
                rank.misses.end_round(True)
            self.miss_rounds += bool(self.first.coordinator.book.misses.any())

    def _agree(self, rank: Rank) -> int:
        """A rank asks again when it has moved chunks; by then all have, in as many calls."""
        rank.num_asked += 1
        return self._least if rank.num_asked == 1 else self._least_after

    def observe_border(self) -> None:
        """As a collective would: every rank tells how far its move has come before any goes on. In some schedules prompts return, now and
        then, where they did not, or the other way round."""
        turns = self.seed % 3 == 0 and self._verdicts.random() < 0.15
        for rank in self.members:
            rank.border.returns.are_rare ^= turns
        self._least = min(int(rank.mover.progress()) for rank in self.members)
        self._least_after = min(int(rank.mover.progress_after()) for rank in self.members)
        for rank in self.members:
            rank.num_asked = 0

    def each(self, call: Callable[[Rank], Any]) -> Any:
        """The answer of all ranks."""
        answer = call(self.first)
        for rank in self.members[1:]:
            if (other := call(rank)) != answer:
                raise Violation("R30", f"ranks decide differently: {answer} and {other}")
        return answer

    def take_plan(self) -> None:
        """The plan of every rank is executed; they differ in nothing but in what they wait for."""
        plans = []
        for rank in self.members:
            plan = rank.coordinator.take_plan()
            rank.gpu.apply(plan)
            asks = rank.coordinator.book.take_settled()  # admission is asked again: all ranks must do so in the same iteration
            plans.append((plan.step, plan.promotions, plan.table, plan.leases, plan.relocations, plan.vacates, asks))
        if any(plan != plans[0] for plan in plans[1:]):
            raise Violation("R30", f"ranks plan differently: {plans}")

    def check_books(self, *, thoroughly: bool) -> None:
        """What the ledger has promised fits the device at any time. thoroughly: tables agree with each other too."""
        coordinator = self.first.coordinator
        if thoroughly:
            check(coordinator)
        promised, usable = coordinator.book.fresh_committed_pages(), coordinator.device_pages.num_usable
        if self.options.ledger and promised > usable:
            raise Violation("I7", f"{promised} device pages are promised, of {usable} (seed {self.seed})")

    # -- enqueued ---------------------------------------------------------------------------------------------------

    def _chance(self, transfer_id: int, salt: int) -> float:
        """A number in [0, 1) that depends on the seed and the transfer alone, hence is equal on all ranks."""
        value = (transfer_id * 0x9E3779B1 + salt * 0x85EBCA77 + self.seed * 0xC2B2AE3D) & 0xFFFFFFFF
        value ^= value >> 15
        value = value * 0x2C1B3C6D & 0xFFFFFFFF
        return ((value ^ (value >> 12)) & 0xFFFFFF) / 0x1000000

    def _send(self, rank: Rank, transfers: list[PageTransfer]) -> list[int]:
        """The mirror sink. Copies reach the stream in the order of their ids, whatever is delayed."""
        options, acknowledged = self.options, []
        for transfer in transfers:
            transfer_id, page = transfer.transfer_id, transfer.logical_page
            self.transfer_of[transfer_id] = (page, self.generation[page])
            if not self.calm and (rank.unsent or self._chance(transfer_id, 1) < options.p_unsent):
                rank.unsent.append(transfer)
                continue
            rank.gpu.enqueue(transfer)
            if not self.calm and self._chance(transfer_id, 2) < options.p_late:
                rank.late.append(transfer_id)
            else:
                acknowledged.append(transfer_id)
        return acknowledged

    def deliver_enqueued(self) -> None:
        """At a step boundary, on all ranks alike: send, fail or acknowledge some of what was held back."""
        rng, first = self.rng, self.first
        if first.unsent:
            count = len(first.unsent) if self.calm else rng.randint(0, len(first.unsent))
            for rank in self.members:
                sent, failed = [], []
                for _ in range(count):
                    transfer = rank.unsent.popleft()
                    if not self.calm and self._chance(transfer.transfer_id, 3) < self.options.p_fail:
                        failed.append(transfer.transfer_id)
                    else:
                        rank.gpu.enqueue(transfer)
                        sent.append(transfer.transfer_id)
                self._deliver(rank, "on_failed", failed)
                self._deliver(rank, "on_enqueued", sent)
        if first.late and (self.calm or rng.random() < 0.5):
            ids = first.late if self.calm else rng.sample(first.late, rng.randint(1, len(first.late)))
            ids = list(ids)
            for rank in self.members:
                self._deliver(rank, "on_enqueued", ids)
                rank.late = [transfer_id for transfer_id in rank.late if transfer_id not in ids]

    # -- completed --------------------------------------------------------------------------------------------------

    def deliver_completed(self, now: int) -> None:
        rng, options = self.rng, self.options
        for rank in self.members:
            for transfer_id in rank.gpu.completed:
                due = now + rng.randint(0, options.delay_steps)
                if rng.random() < options.p_lost:
                    due = 1 << 30
                rank.completions.append((due, transfer_id))
                if rng.random() < options.p_duplicate:
                    rank.completions.append((due + rng.randint(0, 3), transfer_id))
            rank.gpu.completed.clear()
            due_ids = [transfer_id for due, transfer_id in rank.completions if due <= now or self.calm]
            if due_ids:
                rank.completions = [] if self.calm else [item for item in rank.completions if item[0] > now]
                rng.shuffle(due_ids)
                self._deliver(rank, "on_completed", due_ids)

    def _deliver(self, rank: Rank, method: str, transfer_ids: list[int]) -> None:
        """Hand over acknowledgements one by one; a stale one may change nothing (I5)."""
        call = getattr(rank.coordinator, method)
        for transfer_id in transfer_ids:
            page, generation = self.transfer_of[transfer_id]
            # A copy may complete before its enqueued acknowledgement arrives: that one is late, not stale.
            ended = transfer_id in rank.ended or (method == "on_completed" and transfer_id in rank.completed)
            stale = ended or self.generation[page] != generation
            before = self._facts(rank, page) if stale else None
            call((transfer_id,))
            if stale:
                self.stale += 1
                if self._facts(rank, page) != before:
                    raise Violation("I5", f"stale {method} of transfer {transfer_id} changed page {page}: {before}")
            if method == "on_completed":
                rank.completed.add(transfer_id)
            elif method == "on_failed":
                rank.ended.add(transfer_id)

    @staticmethod
    def _facts(rank: Rank, page: int) -> tuple[int, ...]:
        book = rank.coordinator.book
        return (
            int(book.state[page]), int(book.device_page[page]), int(book.transfer[page]), int(book.enqueued[page]),
            rank.coordinator.device_pages.num_free, book.num_free, rank.coordinator.num_dirty,
        )  # fmt: skip

    # -- pages ------------------------------------------------------------------------------------------------------

    def free(self, pages: list[int]) -> None:
        for page in pages:
            self.generation[page] += 1
        self.each(lambda rank: rank.coordinator.free(pages))

    def allocate(self, count: int) -> list[int]:
        pages = self.each(lambda rank: rank.coordinator.book.allocate(count))
        if pages is None:
            raise Violation("I7", f"{count} logical pages were free and cannot be had")
        for rank in self.members:
            writes = {transfer.logical_page for *_, transfer in rank.gpu.copy_stream}
            writes.update(transfer.logical_page for transfer in rank.unsent)
            for page in pages:
                if page in writes and rank.coordinator.is_landing_target(page):
                    raise Violation("R7", f"page {page} is a landing target while an old host copy may still write it")
        return pages

    def clear(self) -> None:
        """Flush: drain the GPU, cancel what was not sent, forget everything; acknowledgements come afterwards or
        never."""
        forgets = self.rng.random() < 0.5
        for rank in self.members:
            rank.gpu.drain()
            cancelled = [transfer.transfer_id for transfer in rank.unsent]
            rank.unsent.clear()
            rank.coordinator.clear()
            rank.gpu.forget_all()
            rank.completions += [(0, transfer_id) for transfer_id in cancelled]
            if forgets:
                rank.completions.clear()
                rank.gpu.completed.clear()
                rank.late.clear()
        self.generation = [generation + 1 for generation in self.generation]
