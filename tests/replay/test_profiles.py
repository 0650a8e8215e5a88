"""Goal: the synthetic streams have the published locality. Method: exact LRU and direct statistics over reduced runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hisparse.replay.policies import LruCache, lru_miss_rate
from sglang_hisparse.replay.profiles import NUM_SINKS, PROFILES, RecencyProfile, band_counts

PUBLISHED_CONTEXT = 100_384
RECENCY = [name for name, profile in PROFILES.items() if isinstance(profile, RecencyProfile)]


def stream_of(name: str, num_positions: int, top_k: int, seed: int = 1):
    return PROFILES[name].stream(num_positions=num_positions, top_k=top_k, rng=np.random.default_rng(seed))


@pytest.mark.parametrize(("buffer_size", "published"), [(2048, 30.0), (4096, 13.4), (8192, 6.7)])
def test_paper_profile_misses_as_published(buffer_size: int, published: float) -> None:
    """Goal: the published LRU miss rates. Method: a shorter run at full size, half a point of tolerance."""
    rate = lru_miss_rate(stream_of("paper", PUBLISHED_CONTEXT, 2048), buffer_size=buffer_size, steps=50, warm_up=40)
    assert 100 * rate == pytest.approx(published, abs=0.5)


@pytest.mark.parametrize("name", RECENCY)
def test_scaled_profile_misses_its_share(name: str) -> None:
    """Goal: scaling top_k keeps the miss rate. Method: LRU of 2k and 4k slots at k = 256 against the shares by definition."""
    shares = PROFILES[name].shares
    for factor, expected in ((2, shares[2] + shares[3]), (4, shares[3])):
        rate = lru_miss_rate(stream_of(name, 8000, 256), buffer_size=factor * 256, steps=200, warm_up=60)
        assert rate == pytest.approx(expected, abs=0.012), f"{factor} x k"


@pytest.mark.parametrize(("name", "published"), [("smA", 13.9), ("smB", 13.5)])
def test_score_models_miss_like_the_trace(name: str, published: float) -> None:
    """Goal: score models are no easy load. Method: LRU at k 2048, B 4096, once the buffer is full."""
    rate = lru_miss_rate(stream_of(name, PUBLISHED_CONTEXT, 2048), buffer_size=4096, steps=40, warm_up=60)
    assert 100 * rate == pytest.approx(published, abs=0.8)


@pytest.mark.parametrize("name", list(PROFILES))
@pytest.mark.parametrize("start", [1, 5, 60, 63, 64, 500])
def test_selection_is_well_formed(name: str, start: int) -> None:
    """Goal: every step selects distinct positions, the newest and the sinks among them. Method: growth across n = k."""
    top_k, stream = 64, stream_of(name, start, 64)
    for step in range(1, 20):
        stream.append()
        num_positions = start + step
        selected = stream.select()
        assert selected.dtype == np.int32
        assert selected.size == np.unique(selected).size == min(top_k, num_positions)
        assert 0 <= selected.min() and selected.max() == num_positions - 1
        assert set(range(min(NUM_SINKS, num_positions))) <= set(selected.tolist())


def test_streams_depend_on_their_seed_alone() -> None:
    """Goal: runs can be repeated. Method: equal seeds give equal steps, another seed does not."""
    first, again, other = (stream_of("paper", 2000, 128, seed) for seed in (3, 3, 4))
    a, b, c = first.select(), again.select(), other.select()
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    total=st.integers(0, 120),
    taken=st.integers(0, 10),
    shares=st.sampled_from([PROFILES[name].shares for name in RECENCY]),
)
def test_band_counts_fill_the_bands(sizes: list[int], total: int, taken: int, shares: tuple[float, ...]) -> None:
    """Goal: no band is overdrawn and nothing is lost. Method: any band sizes, checked against their sum."""
    counts = band_counts(shares, np.cumsum([0, *sizes]), total, taken)
    assert (counts >= 0).all() and (counts <= sizes).all()
    assert counts.sum() == min(total, sum(sizes))


def test_lru_cache_by_hand() -> None:
    """Goal: the yardstick itself is LRU. Method: four steps worked out by hand, three slots."""
    cache = LruCache(3)
    assert cache.access(np.array([1, 2, 3])) == 3
    assert cache.access(np.array([2])) == 0
    assert cache.access(np.array([4, 1])) == 1  # 3 was given last in the first step, so it leaves
    assert cache.access(np.array([3, 4])) == 1
