"""What a replay looked like step by step: the series behind the plots.

Filled by command.py after each step when plots are asked for; it reads the engine's counts and changes nothing. Reading
them waits for the device, so that a run with plots on a GPU is slower than one without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sglang_hisparse.replay.figures import Counts
from sglang_hisparse.residency import Owner

if TYPE_CHECKING:
    from sglang_hisparse.replay.engine import Engine

WINDOW = 100  #: steps of a rolling mean


@dataclass(slots=True)
class History:
    """One entry a step. `phases`: name and first step of each."""

    counts: list[Counts] = field(default_factory=list)
    pages_resident: list[int] = field(default_factory=list)
    pages_hot: list[int] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)

    def observe(self, engine: Engine, phase: str) -> None:
        if not self.phases or self.phases[-1][0] != phase:
            self.phases.append((phase, len(self.counts)))
        self.counts.append(engine.snapshot())
        pages = engine.coordinator.device_pages
        self.pages_resident.append(pages.count(Owner.RESIDENT))
        self.pages_hot.append(pages.count(Owner.HOT))

    def grown(self, name: str) -> np.ndarray:
        """By how much a count grew in each step: float64 [steps]."""
        return np.diff([getattr(counts, name) for counts in self.counts], prepend=0).astype(np.float64)


def rolling_mean(values: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean of the last `window` values up to each, of fewer at the start; values float [n], NaN: left out."""
    known = ~np.isnan(values)
    return _rolling_sum(np.where(known, values, 0.0), window) / np.maximum(_rolling_sum(known.astype(float), window), 1)


def rolling_ratio(part: np.ndarray, whole: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Sum of `part` over sum of `whole` in the same window; NaN where that is 0."""
    wholes = _rolling_sum(whole.astype(float), window)
    return np.where(wholes > 0, _rolling_sum(part.astype(float), window) / np.maximum(wholes, 1e-300), np.nan)


def _rolling_sum(values: np.ndarray, window: int) -> np.ndarray:
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, values.size + 1)
    return total[ends] - total[np.maximum(ends - window, 0)]
