"""Goal: each policy is what its name says. Method: a plain Python model of the rules, cases by hand, bounds that must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hisparse.replay.comparison import BELADY, COMMON, ONLINE, compare, selections
from sglang_hisparse.replay.policies import (
    NEVER,
    BeladyCache,
    ClockCache,
    FifoCache,
    IndexScoreCache,
    LruCache,
    NearMissCache,
    Turnover,
    next_uses,
)
from sglang_hisparse.replay.profiles import PROFILES

streams = st.lists(
    st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True).map(np.array), min_size=1, max_size=30
)


class Model:
    """A set of rows with a rank each, in sets and dictionaries: the row of lowest rank that the step does not use leaves."""

    def __init__(self, size: int, policy: str, steps: list[np.ndarray]) -> None:
        self.size, self.policy, self.steps = size, policy, [step.tolist() for step in steps]
        self.rank: dict[int, float] = {}
        self.clock = 0

    def access(self, number: int) -> int:
        step = self.steps[number]
        missing = [position for position in step if position not in self.rank]
        for _ in range(max(0, len(self.rank) + len(missing) - self.size)):
            others = [position for position in self.rank if position not in step]
            del self.rank[min(others, key=lambda position: self.rank[position])]
        self.clock += len(step)
        for place, position in enumerate(step):
            if self.policy == "lru":
                self.rank[position] = self.clock - place
            elif self.policy == "fifo":
                self.rank.setdefault(position, self.clock - len(step) + place)
            else:  # the distinct positions make ties impossible but for rows that are never used again
                later = next((n for n in range(number + 1, len(self.steps)) if position in self.steps[n]), NEVER)
                self.rank[position] = -later
        return len(missing)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@given(steps=streams, size=st.integers(6, 12))
def test_policy_follows_its_rule(policy: str, steps: list[np.ndarray], size: int) -> None:
    """Goal: the vectorised caches decide as the rule says. Method: misses step by step against the model."""
    cache = {"lru": LruCache, "fifo": FifoCache}[policy](size)
    model = Model(size, policy, steps)
    assert [cache.access(step) for step in steps] == [model.access(number) for number in range(len(steps))]


@given(steps=streams, size=st.integers(6, 12))
def test_next_uses_are_those_of_the_stream(steps: list[np.ndarray], size: int) -> None:
    """Goal: Belady's knowledge is true. Method: search each position's next step in the list itself."""
    for number, uses in enumerate(next_uses(steps)):
        for position, use in zip(steps[number].tolist(), uses.tolist(), strict=True):
            later = [n for n in range(number + 1, len(steps)) if position in steps[n].tolist()]
            assert use == (later[0] if later else NEVER)


@given(steps=streams, size=st.integers(6, 12))
def test_nobody_beats_belady_when_steps_are_single(steps: list[np.ndarray], size: int) -> None:
    """Goal: belady is the bound. Method: one position a step, where the rule is proven optimal; every other policy."""
    single = [np.array([position]) for step in steps for position in step.tolist()]
    belady = BeladyCache(size, next_uses(single))
    least = sum(belady.access(step) for step in single)
    for name, make in ONLINE.items():
        if name not in ("turnover", "index_score"):
            cache = make(size)
            assert sum(cache.access(step) for step in single) >= least, name


@given(steps=streams, size=st.integers(6, 12), name=st.sampled_from(["lru", "fifo", "random", "clock"]))
def test_a_step_is_held_afterwards_and_no_slot_holds_two(steps: list[np.ndarray], size: int, name: str) -> None:
    """Goal: set semantics. Method: repeat each step at once (no miss); the tables are each other's inverse."""
    cache = ONLINE[name](size)
    for step in steps:
        misses = cache.access(step)
        assert 0 <= misses <= step.size
        assert cache.access(step[::-1]) == 0
        held = cache._position[cache._position >= 0]
        assert np.unique(held).size == held.size == np.count_nonzero(cache._slot_of >= 0) <= size
        assert np.array_equal(cache._position[cache._slot_of[held]], held)


def test_clock_spares_what_was_hit() -> None:
    """Goal: the bit works. Method: four slots worked out by hand."""
    cache = ClockCache(4)
    cache.access(np.array([0, 1, 2, 3]))
    cache.access(np.array([1, 3]))  # their bits are set
    cache.access(np.array([4]))  # the hand takes 0's slot
    assert cache.access(np.array([1])) == 0
    cache.access(np.array([5]))  # it passes 1, clears its bit, and takes 2's slot
    cache.access(np.array([6]))  # it passes 3, then 4 and 5 are without a bit: the first is 4's slot
    assert [cache.access(np.array([position])) for position in (1, 3, 5, 6)] == [0, 0, 0, 0]


def test_index_score_evicts_the_lowest_score() -> None:
    """Goal: the score decides. Method: three slots, scores by hand; without scores it refuses."""
    cache = IndexScoreCache(3)
    scores = np.array([5.0, 1.0, 3.0, 9.0, 2.0])
    cache.access(np.array([0, 1, 2]), scores)
    cache.access(np.array([3]), scores)  # 1 leaves
    assert cache.access(np.array([0, 2]), scores) == 0
    assert cache.access(np.array([1]), scores) == 1  # 2 leaves
    with pytest.raises(ValueError, match="scores"):
        cache.access(np.array([4]))


@pytest.mark.parametrize("name", ["smA", "smB"])
@pytest.mark.parametrize("buffer", [256, 512])
def test_the_resolver_evicts_the_rows_of_lowest_score(name: str, buffer: int) -> None:
    """Goal: its index_score is the policy of that name. Method: misses of every step beside the numpy model; they never differ."""
    stream = PROFILES[name].stream(num_positions=4000, top_k=192, rng=np.random.default_rng(3))
    resolver, model = Turnover(buffer, by_score=True), IndexScoreCache(buffer)
    misses = [(resolver.access(*step), model.access(*step)) for step in selections(stream, 60)]
    assert all(found == wanted for found, wanted in misses) and sum(found for found, _ in misses[5:]) > 500
    with pytest.raises(ValueError, match="scores"):
        resolver.access(np.array([4]))


def test_near_misses_are_fetched_ahead() -> None:
    """Goal: the model counts what is exposed and what is moved. Method: four slots, scores by hand."""
    cache = NearMissCache(4, ahead=1)
    scores = np.array([5.0, 9.0, 8.0, 1.0, 7.0, 2.0])
    assert cache.access(np.array([1, 2]), scores) == 2 and cache.fetched_ahead == 1  # 4 is next
    assert cache.access(np.array([1, 4]), scores) == 0 and cache.fetched_ahead == 1  # 2 is next, and held
    assert cache.access(np.array([1, 0]), scores) == 1 and cache.fetched_ahead == 1
    assert (
        cache.access(np.array([3, 5]), -scores) == 2 and cache.fetched_ahead == 1
    )  # 1 and 2 leave; 0 is next, and held
    assert cache.access(np.array([0, 4]), scores) == 0 and cache.fetched_ahead == 2  # 4 and 0 are held; 1 comes back


@pytest.mark.parametrize("name", list(PROFILES))
def test_the_resolver_replaces_like_exact_lru(name: str) -> None:
    """Goal: the resolver's turnover stamps lose nothing. Method: every profile at k 256, its CPU library beside exact LRU."""
    stream = PROFILES[name].stream(num_positions=6000, top_k=256, rng=np.random.default_rng(5), buffer_size=512)
    found = compare(selections(stream, 220), buffers=[512, 1024], policies=COMMON, seed=5)
    rates = {(outcome.policy, outcome.buffer): outcome.miss_rate(60, 190) for outcome in found}
    for buffer in (512, 1024):
        # A stamp's unit is a sixty-fourth of the buffer: with so few rows it is coarser than at full size (0.1 points).
        assert rates["turnover", buffer] == pytest.approx(rates["lru", buffer], abs=0.004)
        assert rates[BELADY, buffer] <= min(rates[policy, buffer] for policy in COMMON)


def test_comparison_gives_every_policy_the_same_stream() -> None:
    """Goal: a fair comparison. Method: with a buffer of the step's size all but the rule is equal; seeds repeat."""

    def run(seed: int) -> list[tuple[str, int, int]]:
        stream = PROFILES["smA"].stream(num_positions=900, top_k=64, rng=np.random.default_rng(1))
        found = compare(selections(stream, 40), buffers=[64, 128], policies=(*COMMON, "index_score"), seed=seed)
        return [(outcome.policy, outcome.buffer, int(outcome.misses.sum())) for outcome in found]

    first = run(1)
    assert first == run(1)
    assert len({misses for _, buffer, misses in first if buffer == 64}) == 1
    by_policy = {policy: misses for policy, buffer, misses in first if buffer == 128}
    assert by_policy[BELADY] < by_policy["index_score"] < by_policy["lru"]
