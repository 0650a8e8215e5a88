"""Synthetic top-k streams whose locality is that of the published traces.

Called by the replay engine (one stream per request and index group) and by the policy comparison. A stream knows
positions only; it must never look at pages, residency or hot buffers, or it would no longer be an independent load.

Four families. A recency stack keeps all positions in order of last use and draws a fixed share of each step from bands
of that order: [0, k), [k, 2k), [2k, 4k), [4k, n). Its LRU miss rate is the share drawn beyond the buffer, whatever k is,
so a scaled-down run misses as the full-size one does. A score model gives every position a score that drifts, and takes
the k best: it has structure beyond recency. A popularity model draws by fixed popularity, and a cyclic scan is what LRU
likes least. All always select the newest position and the first few (attention sinks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

NUM_SINKS = 4


class TopKStream(Protocol):
    """The selections of one indexer for one request."""

    def append(self, count: int = 1) -> None:
        """`count` new positions follow the last one."""

    def select(self) -> np.ndarray:
        """One step's distinct positions, int32 [k]; int32 [n] while only n < k exist. A recency stack gives those that it
        used last first; the others know no order."""


@dataclass(frozen=True, slots=True)
class RecencyProfile:
    """Shares of a step drawn from the four recency bands; the first is the share that the previous sets held."""

    name: str
    shares: tuple[float, float, float, float]

    def stream(
        self, *, num_positions: int, top_k: int, rng: np.random.Generator, buffer_size: int | None = None
    ) -> RecencyStream:
        return RecencyStream(self, num_positions, top_k, rng)


@dataclass(frozen=True, slots=True)
class ScoreProfile:
    """Standard deviations and step-to-step correlations of a score's parts."""

    name: str
    static: float
    slow: float
    slow_correlation: float
    fast: float
    fast_correlation: float
    noise: float

    def stream(
        self, *, num_positions: int, top_k: int, rng: np.random.Generator, buffer_size: int | None = None
    ) -> ScoreStream:
        return ScoreStream(self, num_positions, top_k, rng)


@dataclass(frozen=True, slots=True)
class PopularityProfile:
    """Each step keeps `kept` of the last one and draws the rest by Zipf's law; sinks and the newest positions are fixed.

    `sinks` and `window` are shares of top_k.
    """

    name: str
    exponent: float
    kept: float
    sinks: float
    window: float

    def stream(
        self, *, num_positions: int, top_k: int, rng: np.random.Generator, buffer_size: int | None = None
    ) -> PopularityStream:
        return PopularityStream(self, num_positions, top_k, rng)


@dataclass(frozen=True, slots=True)
class CyclicProfile:
    """Scans `span` times as many positions as the hot buffer has rows (twice top_k unless its size is given)."""

    name: str
    span: float

    def stream(
        self, *, num_positions: int, top_k: int, rng: np.random.Generator, buffer_size: int | None = None
    ) -> CyclicStream:
        return CyclicStream(math.ceil(self.span * (buffer_size or 2 * top_k)), num_positions, top_k)


Profile = RecencyProfile | ScoreProfile | PopularityProfile | CyclicProfile

# `paper`: one LongBench v2 request of GLM-5.1 (30 % leave the previous set; LRU misses 13.4 % at 2k slots, 6.7 % at 4k).
# `easy97`, `deep59`, `gvr42`: shallow layers, a deep DeepSeek-V4 context, SWE-bench on DeepSeek-V3.2. `adv8`: layer 0.
# smA and smB are fitted to the six figures published for the `paper` request (LRU 30 / 13.4 / 6.7, FIFO 17.2, random 16.1,
# Belady 8.2 %), with little and with much lasting popularity. `zipf` and `cyc120` are not fitted to anything.
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        RecencyProfile("easy97", (0.97, 0.0153, 0.0074, 0.0073)),
        RecencyProfile("paper", (0.70, 0.166, 0.067, 0.067)),
        RecencyProfile("deep59", (0.59, 0.199, 0.1055, 0.1055)),
        RecencyProfile("gvr42", (0.42, 0.216, 0.182, 0.182)),
        RecencyProfile("adv8", (0.08, 0.079, 0.20, 0.641)),
        ScoreProfile("smA", 0.50, 1.98, 0.995, 0.83, 0.80, 0.29),
        ScoreProfile("smB", 1.30, 0.70, 0.885, 0.09, 0.13, 0.21),
        PopularityProfile("zipf", exponent=1.0, kept=0.62, sinks=1 / 32, window=1 / 8),
        CyclicProfile("cyc120", span=1.2),
    )
}
#: `mix` deals these out over requests and index groups, as miss rates differ from layer to layer.
MIX = ("paper", "easy97", "gvr42", "paper", "adv8")


def band_counts(shares: tuple[float, ...], edges: np.ndarray, total: int, taken_from_first: int = 0) -> np.ndarray:
    """How many of `total` draws fall into each band; `edges` [bands + 1] are recency ranks, the last one the end.

    `taken_from_first` selections are made already and count as draws of the first band. A band that is too short passes
    its draws on, nearest band first. int64 [bands], sums to `total` where the bands hold that many.
    """
    room = np.diff(edges)
    cumulated = np.rint(np.cumsum(shares) * (total + taken_from_first)).astype(np.int64)
    wanted = np.diff(cumulated, prepend=0)
    wanted[0] -= taken_from_first
    counts = np.clip(wanted, 0, room)
    # What is still to be dealt out is negative when the first band could not pay for all that was taken.
    left = total - int(counts.sum())
    for band in range(len(counts)):
        change = int(np.clip(left, -counts[band], room[band] - counts[band]))
        counts[band] += change
        left -= change
    return counts


class RecencyStream:
    """All positions but the sinks, ordered by last use; a step moves what it draws to the front, in its old order."""

    def __init__(self, profile: RecencyProfile, num_positions: int, top_k: int, rng: np.random.Generator) -> None:
        self._shares = profile.shares
        self._top_k = top_k
        self._rng = rng
        self._num_positions = num_positions
        # Which positions were used last before the stream begins is unknown: any order is as good.
        self._order = rng.permutation(np.arange(min(NUM_SINKS, num_positions), num_positions, dtype=np.int32))

    def append(self, count: int = 1) -> None:
        new = np.arange(self._num_positions, self._num_positions + count, dtype=np.int32)
        self._num_positions += count
        self._order = np.concatenate([new[new >= NUM_SINKS][::-1], self._order])

    def select(self) -> np.ndarray:
        if self._num_positions <= self._top_k:
            return np.arange(self._num_positions, dtype=np.int32)
        k, order = self._top_k, self._order
        newest = self._num_positions - 1
        order = order[order != newest]
        edges = np.minimum(np.array([0, k, 2 * k, 4 * k, order.size]), order.size)
        counts = band_counts(self._shares, edges, k - NUM_SINKS - 1, NUM_SINKS + 1)
        drawn = np.zeros(order.size, dtype=bool)
        for start, end, count in zip(edges[:-1], edges[1:], counts, strict=True):
            if count:
                drawn[start + self._rng.choice(end - start, count, replace=False, shuffle=False)] = True
        selected = np.concatenate([np.array([newest], dtype=np.int32), order[drawn]])
        self._order = np.concatenate([selected, order[~drawn]])
        return np.concatenate([np.arange(NUM_SINKS, dtype=np.int32), selected])


class ScoreStream:
    """score = static + slow AR(1) + fast AR(1) + noise; a step selects the k best after all parts have moved.

    scores: float32 [n], those of the last step; sinks and the newest position have an infinite one.
    """

    def __init__(self, profile: ScoreProfile, num_positions: int, top_k: int, rng: np.random.Generator) -> None:
        self._profile = profile
        self._top_k = top_k
        self._rng = rng
        self._static = self._slow = self._fast = self.scores = np.zeros(0, dtype=np.float32)
        self.append(num_positions)

    def _normal(self, count: int, deviation: float) -> np.ndarray:
        return self._rng.standard_normal(count, dtype=np.float32) * np.float32(deviation)

    def append(self, count: int = 1) -> None:
        profile = self._profile
        self._static = np.concatenate([self._static, self._normal(count, profile.static)])
        self._slow = np.concatenate([self._slow, self._normal(count, profile.slow)])
        self._fast = np.concatenate([self._fast, self._normal(count, profile.fast)])

    def select(self) -> np.ndarray:
        profile, count = self._profile, self._static.size
        self._slow = self._moved(self._slow, profile.slow, profile.slow_correlation)
        self._fast = self._moved(self._fast, profile.fast, profile.fast_correlation)
        self.scores = self._static + self._slow + self._fast + self._normal(count, profile.noise)
        self.scores[:NUM_SINKS] = np.inf
        self.scores[-1] = np.inf
        if count <= self._top_k:
            return np.arange(count, dtype=np.int32)
        return np.argpartition(self.scores, count - self._top_k)[count - self._top_k :].astype(np.int32)

    def _moved(self, part: np.ndarray, deviation: float, correlation: float) -> np.ndarray:
        return np.float32(correlation) * part + self._normal(part.size, deviation * (1 - correlation**2) ** 0.5)


class PopularityStream:
    """Sinks, a window of the newest positions, and between them draws without replacement by popularity."""

    def __init__(self, profile: PopularityProfile, num_positions: int, top_k: int, rng: np.random.Generator) -> None:
        self._kept, self._exponent = profile.kept, profile.exponent
        self._sinks = max(NUM_SINKS, round(profile.sinks * top_k))
        self._window = max(1, round(profile.window * top_k))
        self._top_k = top_k
        self._rng = rng
        self._weights = (1.0 + rng.permutation(num_positions)) ** -profile.exponent
        self._last = np.zeros(0, dtype=np.int64)

    def append(self, count: int = 1) -> None:
        ranks = 1.0 + self._rng.integers(0, self._weights.size + count, count)
        self._weights = np.concatenate([self._weights, ranks**-self._exponent])

    def select(self) -> np.ndarray:
        count, first = self._weights.size, self._sinks
        if count <= self._top_k:
            return np.arange(count, dtype=np.int32)
        last = count - self._window
        number = self._top_k - self._sinks - self._window
        kept = self._last[self._rng.permutation(self._last.size)[: round(self._kept * number)]]
        # The smallest of exponential variables with these rates: draws without replacement in proportion to the weights.
        race = self._rng.standard_exponential(last - first) / self._weights[first:last]
        race[kept - first] = np.inf
        drawn = first + np.argpartition(race, number - kept.size)[: number - kept.size]
        self._last = np.concatenate([kept, drawn])
        return np.concatenate([np.arange(first), self._last, np.arange(last, count)]).astype(np.int32)


class CyclicStream:
    """Sinks, the newest position, and the next positions of a scan that starts again after `span` of them."""

    def __init__(self, span: int, num_positions: int, top_k: int) -> None:
        self._span = max(span, top_k)
        self._num_positions = num_positions
        self._top_k = top_k
        self._next = 0

    def append(self, count: int = 1) -> None:
        self._num_positions += count

    def select(self) -> np.ndarray:
        if self._num_positions <= self._top_k:
            return np.arange(self._num_positions, dtype=np.int32)
        span = min(self._span, self._num_positions - NUM_SINKS - 1)
        number = self._top_k - NUM_SINKS - 1
        scanned = NUM_SINKS + (self._next + np.arange(number)) % span
        self._next = (self._next + number) % span
        return np.concatenate([np.arange(NUM_SINKS), scanned, [self._num_positions - 1]]).astype(np.int32)
