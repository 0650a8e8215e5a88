"""What the resolver has counted, per request slot, read back without a wait: samples in a pinned ring, each behind an event.

Owned by HotGroupState (hot_state.py); transfer/hot_buffer.py takes a sample every few decode steps. One launch sums the
counters of all index groups and writes the sums to pinned memory. The device's counts only grow, so a sample that nobody read,
or whose place was taken over, loses nothing: the next one tells all. Nothing here waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_hisparse.kernels.library import library_of

#: Columns of every table here: top-k entries answered from a resident page, from the hot buffer; rows fetched, once for a
#: leader and its followers; entries that failed; and rows fetched times the layers of their group.
COLUMNS = ("entries_resident", "entries_hot", "rows_fetched", "entries_failed", "layer_rows_fetched")
DEPTH = 8  #: samples under way, and samples kept for rates


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts since start when `step` decode steps had been launched. by_slot: int64 [num_slots, 5], columns COLUMNS."""

    step: int
    by_slot: np.ndarray

    def total(self, column: str) -> int:
        return int(self.by_slot[:, COLUMNS.index(column)].sum())


@dataclass(frozen=True, slots=True)
class StepRates:
    """Mean of the `steps` decode steps before step `step`. by_slot: float64 [num_slots, 5], per step, columns COLUMNS."""

    step: int
    steps: int
    by_slot: np.ndarray

    def of_slots(self, column: str) -> np.ndarray:
        """float64 [num_slots]: `column` per decode step."""
        return self.by_slot[:, COLUMNS.index(column)]

    def total(self, column: str) -> float:
        """`column` per decode step, over all slots."""
        return float(self.of_slots(column).sum())


class CountRing:
    """Samples of `headers` int32 [num_groups, num_slots, 32]; group_layers: layers of each group, by default one."""

    def __init__(self, headers: torch.Tensor, group_layers: Sequence[int] | None = None) -> None:
        layers = [1] * headers.shape[0] if group_layers is None else list(group_layers)
        self._headers = headers
        self._layers = torch.tensor(layers, dtype=torch.int32, device=headers.device)
        shape = (DEPTH, headers.shape[1], len(COLUMNS))
        self._places = torch.zeros(shape, dtype=torch.int32, pin_memory=headers.is_cuda)
        self._arrays = self._places.numpy()
        self._events = [torch.cuda.Event() if headers.is_cuda else None for _ in range(DEPTH)]
        self._under_way: deque[tuple[int, int]] = deque()  # place, step: in the order in which they were enqueued
        self._next = self._steps = self._sampled = 0
        self._before = np.zeros(shape[1:], dtype=np.int32)
        self._landed = deque([RowCounts(0, np.zeros(shape[1:], dtype=np.int64))], maxlen=DEPTH)

    def before_forward(self, num_steps: int, period: int) -> None:
        """A forward of `num_steps` decode steps (0: a prefill) is about to be launched on the current stream: sample if
        `period` decode steps have been since the last sample."""
        if self._steps - self._sampled >= period:
            self.sample()
        self._steps += num_steps

    def sample(self) -> bool:
        """Enqueue a sample on the current stream: what the decode steps launched on it so far have counted.

        False, and nothing is enqueued, while all places are under way: the device is that far behind.
        """
        self.poll()
        if len(self._under_way) == DEPTH:
            return False
        place, self._next = self._next, (self._next + 1) % DEPTH
        library_of(self._headers).sum_counters(self._headers, self._layers, self._places[place])
        if (event := self._events[place]) is not None:
            event.record()
        self._under_way.append((place, self._steps))
        self._sampled = self._steps
        return True

    def poll(self) -> None:
        """Take in the samples that have arrived."""
        while self._under_way:
            place, step = self._under_way[0]
            if (event := self._events[place]) is not None and not event.query():
                return
            self._under_way.popleft()
            if step < 0:  # from before a restart
                continue
            # The device counts modulo 2**32. A difference may be negative: two samples on two streams can cross.
            grown = self._arrays[place] - self._before
            self._before = self._arrays[place].copy()
            self._landed.append(RowCounts(step, self._landed[-1].by_slot + grown))

    def latest(self) -> RowCounts:
        """The newest sample that has arrived; zeros before the first. Exact as long as no slot counts 2**31 between two."""
        self.poll()
        return self._landed[-1]

    def rates(self, window: int) -> StepRates | None:
        """Rates over about the last `window` decode steps, of which samples have arrived; None before there are two."""
        newest = self.latest()
        older = [counts for counts in self._landed if counts.step < newest.step]
        if not older:
            return None
        since = next((counts for counts in older if counts.step >= newest.step - window), older[-1])
        steps = newest.step - since.step
        return StepRates(newest.step, steps, (newest.by_slot - since.by_slot) / steps)

    def restart(self) -> None:
        """The device's counters have been set to zero on the current stream: what is under way does not count."""
        self._under_way = deque((place, -1) for place, _ in self._under_way)
        self._before = np.zeros_like(self._before)
        self._landed = deque([RowCounts(self._steps, np.zeros(self._before.shape, dtype=np.int64))], maxlen=DEPTH)
