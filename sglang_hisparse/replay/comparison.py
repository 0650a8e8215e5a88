"""Policies side by side on one stream of selections.

Called by the replay command, by scripts/policies.py and by tests. It owns which policy names there are and how a miss
rate is taken; it never changes what a step selects. The rows of a step reach the policies in random order, since the order
in which an indexer lists its selection tells nothing of use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_hisparse.replay.policies import (
    BeladyCache,
    ClockCache,
    FifoCache,
    LruCache,
    Policy,
    RandomCache,
    Turnover,
    next_uses,
)
from sglang_hisparse.replay.profiles import ScoreStream, TopKStream

#: name -> maker of an empty cache of so many rows. Belady is not among them: it must know the whole stream first.
ONLINE: dict[str, Callable[[int], Policy]] = {
    "lru": LruCache,
    "turnover": Turnover,
    "fifo": FifoCache,
    "random": RandomCache,
    "clock": ClockCache,
    "index_score": functools.partial(Turnover, by_score=True),
}
BELADY = "belady"
#: Exact LRU that is told a recency stack's own order within each step, which no indexer gives.
ORDERED_LRU = "lru_generator_order"
#: What every stream allows; index_score needs the indexer's scores, ORDERED_LRU a stream that has an order.
COMMON = ("lru", "turnover", "fifo", "random", "clock", BELADY)

Selection = tuple[np.ndarray, np.ndarray | None]  #: positions int32 [n], scores float32 [all positions] or None


@dataclass(slots=True)
class Outcome:
    """Misses of one policy with one buffer, step by step."""

    policy: str
    buffer: int
    misses: np.ndarray  #: int64 [steps]
    selected: np.ndarray  #: int64 [steps]

    def miss_rate(self, first: int = 0, last: int | None = None) -> float:
        """Share of selected positions that were missed in steps [first, last)."""
        selected = int(self.selected[first:last].sum())
        return int(self.misses[first:last].sum()) / selected if selected else 0.0


@dataclass(slots=True)
class _Run:
    outcome: tuple[str, int]
    cache: Policy
    misses: list[int] = field(default_factory=list)


def selections(stream: TopKStream, steps: int) -> Iterator[Selection]:
    """`steps` selections of a growing request, with the scores where the stream has some."""
    for _ in range(steps):
        stream.append()
        positions = stream.select()
        yield positions, stream.scores if isinstance(stream, ScoreStream) else None


def compare(
    stream: Iterable[Selection],
    *,
    buffers: Sequence[int],
    policies: Sequence[str],
    seed: int = 0,
    on_step: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Run every policy with every buffer over one stream. Buffers are multiples of 64, not below the largest step.

    `on_step` is called once a selection and once more for Belady's pass over it.
    """
    rng = np.random.default_rng([seed, 4])
    runs = [
        _Run((name, buffer), LruCache(buffer) if name == ORDERED_LRU else ONLINE[name](buffer))
        for name in policies
        if name != BELADY
        for buffer in buffers
    ]
    steps: list[np.ndarray] = []
    for ordered, scores in stream:
        positions = rng.permutation(ordered)
        for run in runs:
            given = ordered if run.outcome[0] == ORDERED_LRU else positions
            run.misses.append(run.cache.access(given, scores))
        steps.append(positions)
        if on_step is not None:
            on_step()
    if BELADY in policies:
        runs += _belady(steps, buffers, on_step)
    selected = np.array([step.size for step in steps], dtype=np.int64)
    return [Outcome(*run.outcome, np.array(run.misses, dtype=np.int64), selected) for run in runs]


def _belady(steps: list[np.ndarray], buffers: Sequence[int], on_step: Callable[[], None] | None) -> list[_Run]:
    future = next_uses(steps)
    runs = [_Run((BELADY, buffer), BeladyCache(buffer, future)) for buffer in buffers]
    for step in steps:
        for run in runs:
            run.misses.append(run.cache.access(step))
        if on_step is not None:
            on_step()
    return runs
