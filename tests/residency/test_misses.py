"""Goal: what misses most comes back first, by the first rank's figures, and no request is judged by another's.

Method: counts and figures are injected; small coordinators are driven by hand, and whole schedules by the simulator.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.mutations import Mutation, hunt
from sim.options import Options
from sim.ranks import Parts, Rank, Ranks
from sim.simulator import Simulation

from residency.stage import Stage
from sglang_hisparse.residency import Residency, ResidencyMode, ResidencyPolicy, SpillPolicy
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.residency.misses import MissMeter, MissRounds
from sglang_hisparse.residency.page_book import PageBook

ROUND = 32


def mixed(host_pages: dict[int, int], device: int = 48) -> Stage:
    """Leased requests with so many host-only pages by slot, and much room."""
    stage = Stage(
        device=device, logical=64, policy=ResidencyPolicy(watermark_low=0.0, watermark_high=0.0, promote_pages_per_step=2)
    )
    for slot, count in host_pages.items():
        pages = stage.extend(slot, count + 2)
        stage.coordinator.acquire_lease(slot)
        stage.mirror_all()
        stage.coordinator.spill(pages[:count])
    return stage


def figures(stage: Stage, misses: dict[int, float]) -> np.ndarray:
    return np.array([misses.get(slot, 0.0) for slot in range(stage.limits.num_slots)])


def order_of_return(stage: Stage) -> list[int]:
    """The slots in the order in which they become fully resident, each begun one finished before the next."""
    order: list[int] = []
    for _ in range(40):
        before, leased = stage.coordinator.counters.pages_promoted, set(stage.coordinator.hot_lease)
        stage.policy.tick()
        check(stage.coordinator)
        order += sorted(leased - set(stage.coordinator.hot_lease))
        if stage.coordinator.counters.pages_promoted == before and leased == set(stage.coordinator.hot_lease):
            break
    return order


@pytest.mark.parametrize(
    ("host_pages", "misses", "expected"),
    [
        ({1: 3, 2: 2, 3: 4}, {}, [2, 1, 3]),
        ({1: 3, 2: 2, 3: 4}, {3: 8.0, 1: 3.0, 2: 1.0}, [3, 1, 2]),
        ({1: 6, 2: 2}, {1: 30.0, 2: 20.0}, [2, 1]),
        ({1: 3, 2: 2, 3: 4}, {3: 4.0}, [3, 2, 1]),
        ({1: 2, 2: 2, 3: 2}, {1: 5.0, 2: 5.0, 3: 5.0}, [1, 2, 3]),
    ],
    ids=["unknown", "most misses", "per page, not in total", "some unknown", "equal"],
)
def test_order(host_pages: dict[int, int], misses: dict[int, float], expected: list[int]) -> None:
    """Goal: misses per page decide; without figures, fewest pages as ever. Method: tick until nothing comes back."""
    stage = mixed(host_pages)
    stage.book.note_misses(figures(stage, misses))
    assert order_of_return(stage) == expected
    assert not stage.coordinator.hot_lease, "a request that is whole gives back its lease"


@given(
    host_pages=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    misses=st.lists(st.floats(0, 1e6), min_size=4, max_size=4),
    device=st.integers(22, 40),  # the last to come needs two pages for a lease and eight for itself, with three before it
)
def test_the_first_one_begun(host_pages: list[int], misses: list[float], device: int) -> None:
    """Goal: of those that fit, the one with most misses per page; never one that does not fit. Method: any figures and
    any room."""
    stage = mixed(dict(enumerate(host_pages, 1)), device=device)
    stage.book.note_misses(figures(stage, dict(enumerate(misses, 1))))
    before = [stage.book.host_pages(slot) for slot in range(1, len(host_pages) + 1)]
    fits = [index for index, count in enumerate(before) if count <= stage.pages.num_free]
    stage.policy.tick()
    check(stage.coordinator)
    begun = [index for index, count in enumerate(before) if stage.book.host_pages(index + 1) < count]
    best = sorted(fits, key=lambda index: (-misses[index] / before[index], before[index], index))[:1]
    assert begun == best


def test_what_misses_most_and_does_not_fit_keeps_nobody_waiting() -> None:
    """Goal: no request is begun that cannot be finished, and none behind it starves. Method: a large one with all misses."""
    stage = mixed({1: 8, 2: 2}, device=20)
    stage.grow(2, stage.pages.num_free - 5)
    stage.book.note_misses(figures(stage, {1: 1e6}))
    stage.policy.tick()
    assert stage.book.host_pages(1) == 8 and stage.coordinator.residency(2) is Residency.FULL


def test_figures_end_with_their_request() -> None:
    """Goal: figures of an ended request change nothing. Method: its slot is taken again before and after a round ends."""
    stage = mixed({1: 4, 2: 3})
    stage.book.note_misses(figures(stage, {1: 100.0}))
    stage.finish(1)
    stage.book.note_misses(figures(stage, {1: 100.0}))
    pages = stage.extend(1, 6)
    assert not stage.book.misses.any()
    stage.coordinator.acquire_lease(1)
    stage.mirror_all()
    stage.coordinator.spill(pages[:4])
    assert order_of_return(stage) == [2, 1]
    stage.book.note_misses(figures(stage, {1: 1.0}))
    stage.coordinator.clear()
    assert not stage.book.misses.any()


# -- from counts to figures --------------------------------------------------------------------------------------------


class Counted:
    """A book with slots 1 to 3, and counts as the resolver would give them: `step` lags as the test likes."""

    def __init__(self) -> None:
        self.book: PageBook = Stage().book
        self.step, self.rows = 0, np.zeros(self.book.lives.shape, dtype=np.int64)
        self.meter = MissMeter(self.book, lambda: (self.step, self.rows.copy()), ROUND)

    def open(self, *slots: int) -> None:
        for slot in slots:
            self.book.open_slot(slot, prefilling=False, prompt_pages=0, final_pages=1)

    def round(self, step: int, fetched: dict[int, int]) -> list[float]:
        """A round in whose sample, of `step`, these slots have fetched so many rows more; slots 1 to 3."""
        self.step = step
        for slot, count in fetched.items():
            self.rows[slot] += count
        return self.meter.end_round()[1:4].tolist()


def test_rows_fetched_per_decode_step() -> None:
    """Goal: the figure is a rate of the last round. Method: samples that lag by eight steps; a request needs two rounds."""
    counted = Counted()
    counted.open(1, 2)
    assert counted.round(24, {1: 240}) == [0, 0, 0]
    assert counted.round(56, {1: 64, 2: 320}) == [0, 0, 0]
    assert counted.round(88, {1: 32, 2: 640}) == [1.0, 20.0, 0]
    assert counted.round(88, {}) == [0, 0, 0], "no new sample says nothing"


@pytest.mark.parametrize("round_of_change", [3, 4])
def test_a_slot_that_was_taken_again_has_no_figure(round_of_change: int) -> None:
    """Goal: rows that an earlier request fetched are not a later one's. Method: change it a round, or two, before."""
    counted = Counted()
    counted.open(1, 2)
    for number in range(1, 6):
        found = counted.round(ROUND * number - 8, {1: 3200, 2: 320})
        if number == round_of_change:
            counted.book.close_slot(1)
            counted.open(1)
    assert found == [0, 10.0, 0]
    found = counted.round(ROUND * 6 - 8, {1: 32, 2: 320})
    assert found == [1.0 if round_of_change == 3 else 0, 10.0, 0]


def test_samples_that_lag_too_far_say_nothing() -> None:
    """Goal: a device far behind does not give one request's rows to the next. Method: a sample from before a change."""
    counted = Counted()
    counted.open(1)
    for number in range(1, 4):
        counted.round(ROUND * number, {1: 3200})
    counted.book.close_slot(1)
    counted.open(1)
    for number in range(4, 7):
        assert counted.round(97 + number, {1: 3200})[0] == 0
    assert counted.round(ROUND * 7, {1: 3200})[0] == 0, "the sample before was taken when the change had hardly happened"
    assert counted.round(ROUND * 8, {1: 32})[0] == 1.0


def test_counts_that_cross_are_not_negative() -> None:
    """Goal: two samples on two streams may cross. Method: a count that goes back."""
    counted = Counted()
    counted.open(1)
    counted.round(32, {1: 100})
    counted.round(64, {1: 100})
    assert counted.round(96, {1: -5}) == [0, 0, 0]


# -- several ranks -----------------------------------------------------------------------------------------------------


def promoted_by_two_ranks(share_figures: bool) -> list[list[int]]:
    """Two coordinators in the same state, whose resolvers have counted the opposite; the order of each."""
    sent: list[np.ndarray] = []
    stages = [mixed({1: 3, 2: 3, 3: 3}) for _ in range(2)]
    for rank, stage in enumerate(stages):
        rows = figures(stage, {1: 10, 2: 20, 3: 30} if rank == 0 else {1: 30, 2: 20, 3: 10}).astype(np.int64)
        steps = iter((ROUND, 2 * ROUND, 3 * ROUND))

        def counts(rows: np.ndarray = rows, steps: object = steps) -> tuple[int, np.ndarray]:
            step = next(steps)
            return step, rows * step

        def first(measured: np.ndarray | None) -> np.ndarray:
            assert measured is not None
            sent.append(measured)
            return measured

        def second(measured: np.ndarray | None) -> np.ndarray:
            assert measured is None, "a second rank has no figures of its own"
            return sent.pop(0)

        own = rank == 0 or not share_figures
        meter = MissMeter(stage.book, counts, ROUND) if own else None
        rounds = MissRounds(stage.book, meter, first if own else second)
        for _ in range(3):
            rounds.end_round(True)
    return [order_of_return(stage) for stage in stages]


def test_ranks_order_by_the_first_ones_counts() -> None:
    """Goal: R30, and that this test can fail. Method: counts that are opposite, taken over and not."""
    assert promoted_by_two_ranks(True) == [[3, 2, 1]] * 2
    assert promoted_by_two_ranks(False) == [[3, 2, 1], [1, 2, 3]]


def test_nothing_is_exchanged_where_nothing_can_come_back() -> None:
    """Goal: a server whose requests fit sends nothing more. Method: an exchange that fails; old figures end."""
    stage = mixed({1: 2})
    stage.book.note_misses(figures(stage, {1: 5.0}))

    def share(measured: object) -> list[float]:
        raise AssertionError("figures were exchanged")

    MissRounds(stage.book, None, share).end_round(False)
    assert not stage.book.misses.any()
    with pytest.raises(AssertionError, match="exchanged"):
        MissRounds(stage.book, None, share).end_round(True)


def roomy(rng: random.Random, border_rng: random.Random) -> Options:
    """Schedules in which several requests could come back: long ones on two ranks, with no reserve of free pages."""
    drawn = Options.draw(rng, border_rng)
    policy = replace(
        drawn.policy, mode=ResidencyMode.HYBRID, watermark_low=0.0, watermark_high=0.0, promote_pages_per_step=1
    )
    limits = replace(drawn.limits, num_slots=5, hot_pages=1, border=())
    return replace(
        drawn, num_ranks=2, num_steps=40, num_requests=12, max_running=4, limits=limits, policy=policy,
        p_arrive=0.5, p_twin=0.8, p_abort=0.0,
    )  # fmt: skip


class RoomySimulation(Simulation):
    draw_options = staticmethod(roomy)


class _RanksThatCountForThemselves(Ranks):
    def share(self, rank: Rank, measured: np.ndarray) -> np.ndarray:
        return measured


class OwnMisses(RoomySimulation):
    """Each rank orders promotions by what its own resolver has counted (R30)."""

    ranks_class = _RanksThatCountForThemselves


def test_schedules_reach_the_order_and_keep_every_rule() -> None:
    """Goal: I1 to I7 and R30 hold where misses decide. Method: schedules with room; choices that misses turned are counted."""
    turned = 0

    class CountingPolicy(SpillPolicy):
        def _promote_one_request(self) -> None:
            nonlocal turned
            book = self.coordinator.book
            room = self.coordinator.device_pages.num_free + self._unused_pages().size
            slots = np.flatnonzero(book.leased & book.live & ~book.prefilling).tolist()
            fits = [(count, slot) for slot in slots if 0 < (count := book.host_pages(slot)) <= room]
            super()._promote_one_request()
            # By fewest pages it would have been this one; where it shares all that comes back, the choice shows nothing.
            turned += bool(fits) and book.host_pages(min(fits)[1]) == min(fits)[0]

    for seed in range(50_000, 50_400):
        RoomySimulation(seed, Parts(policy=CountingPolicy)).run()
    assert turned >= 20, turned


def test_the_simulator_sees_ranks_that_order_by_their_own_counts() -> None:
    """Goal: R30 is watched in these schedules. Method: plant the bug; run until it is seen; then the same without it."""
    found = hunt(Mutation("own misses", "R30", simulation=OwnMisses), 50_000, 400)
    assert found is not None and found[1] == "R30", found
    RoomySimulation(50_000 + found[0] - 1).run()
