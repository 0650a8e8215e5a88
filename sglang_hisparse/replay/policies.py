"""Exact LRU over a stream, as a yardstick for the resolver's replacement and as the test of the profiles.

Set semantics, as the resolver has them: a step's hits are found first, victims are never rows that the step references,
and every missed row is stored. Rows of one step are ordered as the stream gives them, the first as used last. It shares no
code with the resolver.
"""

from __future__ import annotations

import numpy as np

from sglang_hisparse.replay.profiles import TopKStream


class LruCache:
    """`buffer_size` rows of one request; `access` returns how many of a step's distinct positions were not held."""

    def __init__(self, buffer_size: int) -> None:
        self.buffer_size = buffer_size
        self._last_use = np.zeros(0, dtype=np.int64)  # by position; 0: not held
        self._held = 0
        self._clock = 0

    def access(self, positions: np.ndarray) -> int:
        """positions [n], distinct, n <= buffer_size."""
        end = int(positions.max()) + 1
        if end > self._last_use.size:
            self._last_use = np.concatenate([self._last_use, np.zeros(end + 1024 - self._last_use.size, dtype=np.int64)])
        misses = int(np.count_nonzero(self._last_use[positions] == 0))
        self._clock += positions.size
        self._last_use[positions] = self._clock - np.arange(positions.size)
        self._held += misses
        if self._held > self.buffer_size:
            held = np.flatnonzero(self._last_use)
            surplus = self._held - self.buffer_size
            victims = held[np.argpartition(self._last_use[held], surplus - 1)[:surplus]]
            self._last_use[victims] = 0
            self._held = self.buffer_size
        return misses


def lru_miss_rate(stream: TopKStream, *, buffer_size: int, steps: int, warm_up: int) -> float:
    """Share of selected positions that exact LRU does not hold, over `steps` steps after `warm_up`."""
    cache = LruCache(buffer_size)
    missed = selected = 0
    for step in range(warm_up + steps):
        stream.append()
        positions = stream.select()
        count = cache.access(positions)
        if step >= warm_up:
            missed += count
            selected += positions.size
    return missed / selected
