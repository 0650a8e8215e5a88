"""Goal: what the policy does by itself keeps every rule where pools hold many requests, cached prefixes and wide watermarks.

Method: random walks of requests over shared prefixes, with more pages promoted a step than a lease has; every table is
checked after each move. The simulator's pools are smaller: the bug planted here, which a server has met, is not within
its reach.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import PageState, ResidencyPolicy, SpillPolicy
from sglang_hisparse.residency.invariants import check

HOST = PageState.HOST
NUM_MOVES = 60
NUM_WALKS = 60


class Walk:
    """Requests of one seed. Chains are cached prefixes; a request may share one, and leaves one behind."""

    def __init__(self, seed: int, policy: type[SpillPolicy]) -> None:
        self.rng = rng = random.Random(seed)
        device, low = rng.randint(30, 60), rng.choice((0.0, 0.1))
        self.stage = Stage(
            device=device,
            logical=4 * device,
            slots=8,
            hot=rng.choice((1, 1, 1, 2)),
            tail=1,
            policy=ResidencyPolicy(
                watermark_low=low,
                watermark_high=low + rng.choice((0.1, 0.3, 0.4)),
                promote_pages_per_step=rng.choice((2, 8, 12)),
            ),
        )
        self.stage.policy = policy(self.stage.coordinator)
        self.chains: list[list[int]] = []
        self.chain_of: dict[int, list[int]] = {}  # by live slot
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        for _ in range(NUM_MOVES):
            for _ in range(self.rng.randint(1, 6)):  # requests end and start together
                self.rng.choice((self.begin, self.begin, self.grow, self.end, self.squeeze, self.drop))()
            self._count()
            self.stage.policy.tick()
            check(self.stage.coordinator)
            self.stage.coordinator.take_plan()
            self.stage.coordinator.on_completed([transfer.transfer_id for transfer in self.stage.sent])
            self.stage.sent.clear()

    def _count(self) -> None:
        leased, book = self.stage.policy._leased_decoding(), self.stage.book
        self.counts["several mixed"] += leased.size > 1
        self.counts["nothing to bring back"] += bool((book.host_counts(leased) == 0).any())
        self.counts["between the watermarks"] += (
            self.stage.policy.watermark_low_pages <= self.stage.pages.num_free < self.stage.policy.watermark_high_pages
        )

    def begin(self) -> None:
        stage, free = self.stage, [slot for slot in range(1, 8) if slot not in self.chain_of]
        prefix = self.rng.choice(self.chains) if self.chains and self.rng.random() < 0.7 else []
        count = 1 if prefix else self.rng.randint(4, 14)
        if not free or stage.book.num_free < count:
            return
        stage.book.hold(prefix, +1)
        away = [page for page in prefix if stage.book.state[page] == HOST]
        if stage.policy.make_room(count + len(away)) and stage.coordinator.promote(away):
            stage.extend(free[0], len(prefix) + count, prefix=prefix)
            self.chain_of[free[0]] = prefix
        stage.book.hold(prefix, -1)

    def grow(self) -> None:
        if self.chain_of and self.stage.policy.make_room(1) and self.stage.book.num_free:
            slot = self.rng.choice(sorted(self.chain_of))
            self.stage.grow(slot, 1)
            self.stage.launch(slot, len(self.stage.row(slot)))

    def end(self) -> None:
        """A request ends; what it has added may stay as a prefix of its own, where it shared none."""
        if not self.chain_of:
            return
        slot = self.rng.choice(sorted(self.chain_of))
        prefix, row = self.chain_of.pop(slot), self.stage.row(slot)
        keep = len(prefix) if prefix or self.rng.random() < 0.2 else len(row)
        self.stage.finish(slot, keep=keep)
        if keep and not prefix:
            self.chains.append(row[:keep])

    def squeeze(self) -> None:
        self.stage.policy.make_room(self.rng.randint(1, self.stage.pages.num_pages // 2))

    def drop(self) -> None:
        """A cached prefix that nobody uses is evicted."""
        used = [chain for chain in self.chain_of.values()]
        idle = [chain for chain in self.chains if not any(chain is other for other in used)]
        if len(idle) > 3:
            chain = self.rng.choice(idle)
            self.chains = [other for other in self.chains if other is not chain]
            self.stage.coordinator.free(chain)


class UnusedPagesSpilledTwice(SpillPolicy):
    """Room is made for every request that is looked at, also for one that brings nothing back."""

    def _promote_one_request(self) -> None:
        coordinator, book, room = self.coordinator, self.coordinator.book, self._room_to_promote()
        unused = self._unused_pages()
        sized = [(count, slot) for slot in self._leased_decoding().tolist() if (count := book.host_pages(slot)) <= room]
        for count, slot in sorted(sized, key=lambda one: (one[0] > 0, -one[0])) if room > 0 else ():
            row = book.pages(slot)
            batch = row[book.state[row] == HOST][: coordinator.policy.promote_pages_per_step].tolist()
            short = len(batch) + self.watermark_high_pages - coordinator.device_pages.num_free
            coordinator.spill(unused[: max(short, 0)].tolist())
            if batch and not coordinator.promote(batch):
                return
            if len(batch) == count:
                coordinator.release_lease(slot)
            if batch:
                return


def test_walks_keep_every_rule_and_reach_what_they_are_for() -> None:
    """Goal: I1 to I7 on walks, and the states that the planted bug needs. Method: fixed seeds; occurrences are counted."""
    totals: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        walk = Walk(seed, SpillPolicy)
        walk.run()
        totals += walk.counts
        totals.update(promoted=walk.stage.coordinator.counters.pages_promoted)
    for event in ("several mixed", "nothing to bring back", "between the watermarks", "promoted"):
        assert totals[event] >= 20, totals


def test_walks_find_pages_spilled_twice() -> None:
    """Goal: the walks can fail. Method: plant the bug; some walk of the same seeds must break I1."""
    with pytest.raises(InvariantError, match="I1: page .* is HOST"):
        for seed in range(20 * NUM_WALKS):
            Walk(seed, UnusedPagesSpilledTwice).run()
