"""Goal: a tick that the policy leaves out would have changed nothing.

Method: random walks in which pages are begun and filled apart, copies are acknowledged late, in part or as failed, the border moves and
misses change, in every mode, with several ticks between two moves: once with the policy, once with one that looks in every tick.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from residency.stage import Stage
from residency.test_policy_walks import Walk
from sglang_hisparse.residency import Mirroring, ResidencyMode, ResidencyPolicy, SpillPolicy
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.residency.types import PageTransfer

NUM_WALKS = 40
NUM_MOVES = 120


class SlowWalk(Walk):
    """One seed's requests. `seen`: books and counters after each tick; `rests`: ticks that were left out."""

    def __init__(self, seed: int, policy: type[SpillPolicy]) -> None:
        super().__init__(seed, policy)
        self.rng = rng = random.Random(seed)
        self.device, low = rng.randint(30, 60), rng.choice((0.0, 0.1, 0.3))
        self.acknowledges_late = rng.random() < 0.5
        self.stage = Stage(
            device=self.device,
            logical=4 * self.device,
            slots=8,
            hot=rng.choice((1, 1, 1, 2)),
            tail=rng.choice((1, 2)),
            policy=ResidencyPolicy(
                mode=ResidencyMode.ALWAYS_HOST if rng.random() < 0.15 else ResidencyMode.HYBRID,
                mirroring=Mirroring.ON_PRESSURE if rng.random() < 0.25 else Mirroring.EAGER,
                watermark_low=low,
                watermark_high=low + rng.choice((0.0, 0.1, 0.3)),
                mirror_pages_per_step=rng.choice((1, 2, 8)),
                promote_pages_per_step=rng.choice((0, 1, 2, 8)),
            ),
        )
        self.stage.policy = policy(self.stage.coordinator)
        self.stage.coordinator._mirror_sink = self._send
        self.unsent: list[int] = []  # copies that are planned and not acknowledged as enqueued
        self.under_way: list[int] = []
        self.open: set[int] = set()  # slots whose last page is being filled
        self.seen: list[tuple[object, ...]] = []
        self.rests = self.withheld = 0

    def _send(self, transfers: Sequence[PageTransfer]) -> list[int]:
        ids = [transfer.transfer_id for transfer in transfers]
        self.stage.sent.extend(transfers)
        (self.unsent if self.acknowledges_late else self.under_way).extend(ids)
        return [] if self.acknowledges_late else ids

    def run(self) -> None:
        moves = (self.begin, self.grow, self.open_page, self.open_page, self.fill, self.fill, self.end, self.squeeze, self.drop,
                 self.acknowledge, self.complete, self.withhold, self.restore, self.miss)  # fmt: skip
        for _ in range(NUM_MOVES):
            self.rng.choice(moves)()
            for number in range(4):
                if number and self.rng.random() < 0.3:
                    self.rng.choice((self.acknowledge, self.complete, self.miss))()
                self._tick()
            check(self.stage.coordinator)

    def _tick(self) -> None:
        stage = self.stage
        self.rests += stage.policy.is_at_rest()
        stage.policy.tick()
        stage.coordinator.note_quiet_launch()
        stage.coordinator.take_plan()
        book = stage.book
        leases = sorted(stage.coordinator.hot_lease)
        self.seen.append((book.state.tobytes(), book.moves, stage.pages.num_free, str(stage.coordinator.counters), leases))

    def _growing(self) -> list[int]:
        has_room = self.stage.policy.make_room(1) and self.stage.book.num_free
        return sorted(set(self.chain_of) - self.open) if has_room else []

    def grow(self) -> None:
        if slots := self._growing():
            slot = self.rng.choice(slots)
            self.stage.grow(slot, 1)
            self._fill(slot)

    def open_page(self) -> None:
        if slots := self._growing():
            slot, stage = self.rng.choice(slots), self.stage
            before = len(stage.row(slot))
            stage.grow(slot, 1)
            stage.launch(slot, before, rows=1)
            self.open.add(slot)

    def fill(self) -> None:
        if self.open:
            self._fill(self.rng.choice(sorted(self.open)))

    def _fill(self, slot: int) -> None:
        self.open.discard(slot)
        self.stage.launch(slot, len(self.stage.row(slot)))

    def end(self) -> None:
        for slot in sorted(self.open):
            self._fill(slot)
        super().end()

    def acknowledge(self) -> None:
        count = self.rng.randint(0, len(self.unsent))
        ids, self.unsent = self.unsent[:count], self.unsent[count:]
        if ids and self.rng.random() < 0.3:
            self.stage.coordinator.on_failed(ids)
        else:
            self.stage.coordinator.on_enqueued(ids)
            self.under_way += ids

    def complete(self) -> None:
        count = self.rng.randint(0, len(self.under_way))
        ids, self.under_way = self.under_way[:count], self.under_way[count:]
        self.stage.coordinator.on_completed(ids)

    def withhold(self) -> None:
        coordinator, pages = self.stage.coordinator, self.stage.pages
        limit = pages.num_usable - self.rng.randint(1, 4)
        if limit < self.device // 2 or not coordinator.can_withhold(limit):
            return
        if self.stage.policy.make_room(pages.num_usable - limit) and coordinator.can_withhold(limit):
            coordinator.withhold(limit)
            self.withheld += 1

    def restore(self) -> None:
        pages = self.stage.pages
        if pages.num_usable < self.device:
            pages.restore(self.rng.randint(pages.num_usable, self.device))

    def miss(self) -> None:
        misses = self.stage.book.misses
        self.stage.book.note_misses(np.array([self.rng.random() * 9 for _ in range(misses.size)]))


class Restless(SpillPolicy):
    """Looks in every tick."""

    def is_at_rest(self) -> bool:
        return False


class IgnoresDirtyPages(SpillPolicy):
    """Rests though a page waits to be mirrored."""

    def is_at_rest(self) -> bool:
        return self._rested_with == self._figures()


class RestsInNeed(SpillPolicy):
    """Takes standing still below the low watermark for having nothing to do."""

    def tick(self) -> None:
        before = self._figures()
        super().tick()
        if before == self._figures() and not self.coordinator.num_dirty:
            self._rested_with = before


class RestsWhereAllMustLeave(RestsInNeed):
    """The same in `always_host` alone."""

    def tick(self) -> None:
        if self.coordinator.policy.mode == ResidencyMode.ALWAYS_HOST:
            super().tick()
        else:
            SpillPolicy.tick(self)


class IgnoresMoves(SpillPolicy):
    """Goes by the free pages alone."""

    def _figures(self) -> tuple[int, int, int]:
        return (0, *super()._figures()[1:])


class IgnoresFreePages(SpillPolicy):
    """Goes by the moves alone."""

    def _figures(self) -> tuple[int, int, int]:
        moves, _, usable = super()._figures()
        return moves, self.coordinator.device_pages.num_usable, usable


def differs(seed: int, policy: type[SpillPolicy]) -> bool:
    walk, restless = SlowWalk(seed, policy), SlowWalk(seed, Restless)
    walk.run()
    restless.run()
    return walk.seen != restless.seen


def test_a_policy_at_rest_misses_nothing() -> None:
    """Goal: books and counters agree after each tick, and many ticks are left out. Method: the same walks with both policies."""
    rests = withheld = 0
    for seed in range(NUM_WALKS):
        walk, restless = SlowWalk(seed, SpillPolicy), SlowWalk(seed, Restless)
        walk.run()
        restless.run()
        assert walk.seen == restless.seen, seed
        assert restless.rests == 0
        rests, withheld = rests + walk.rests, withheld + walk.withheld
    assert rests > 100 * NUM_WALKS and withheld > NUM_WALKS, (rests, withheld)


@pytest.mark.parametrize(
    "policy", [IgnoresDirtyPages, RestsInNeed, RestsWhereAllMustLeave, IgnoresMoves, IgnoresFreePages]
)
def test_a_policy_that_rests_too_much_is_found(policy: type[SpillPolicy]) -> None:
    """Goal: the comparison can fail. Method: one condition of resting left out at a time."""
    assert any(differs(seed, policy) for seed in range(4 * NUM_WALKS))
