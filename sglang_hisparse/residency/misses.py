"""Misses of each request slot: what the first rank's resolver has counted, taken over by all ranks.

The admission gate ends a round on all ranks before the same forward; `MissRounds` then puts the first rank's figures into
every rank's book, where the policy orders promotions by them. Counts reach each rank at another step, so no rank may ever
order by its own (R30). Pure CPU; waits for nothing but the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_hisparse.residency.page_book import PageBook

Counts = Callable[[], tuple[int, np.ndarray]]
"""(n, int64 [num_slots]): rows that each slot has fetched since start, in the first n decode steps; n lags a little."""


class MissMeter:
    """Turns counts that go on when a slot changes its request into the misses of the requests. Only the first rank has one.

    round_steps: decode steps between two calls of `end_round`. Made while no request exists.
    """

    def __init__(self, book: PageBook, counts: Counts, round_steps: int) -> None:
        self._book, self._counts, self._round_steps = book, counts, round_steps
        self._rounds = 0
        self._lives = [book.lives.copy()] * 2  # at the ends of the last two rounds
        self._before = (0, np.zeros(book.lives.shape, dtype=np.int64))

    def end_round(self) -> np.ndarray:
        """float64 [num_slots]: rows fetched per decode step since the last round; 0 where they may be another request's."""
        self._rounds += 1
        (step_before, rows_before), (step, rows) = self._before, self._counts()
        older, newer = self._lives
        lives = self._book.lives.copy()
        self._lives, self._before = [newer, lives], (step, rows)
        # Counts lag: the older sample may be from before the end of its round, but a request that has been there since the
        # round before that one has been counted alone, if the sample is no older than that.
        is_whole = step_before >= (self._rounds - 2) * self._round_steps
        if step <= step_before or not is_whole:
            return np.zeros(lives.shape)
        return np.where(lives == older, np.maximum(rows - rows_before, 0) / (step - step_before), 0.0)


class MissRounds:
    """One for each rank. meter: on the first, None on the others. share: gives every rank what the first passes in."""

    def __init__(self, book: PageBook, meter: MissMeter | None, share: Callable[[Any], Sequence[float]]) -> None:
        self._book, self._meter, self._share = book, meter, share

    def end_round(self, any_on_host: bool) -> None:
        """On all ranks before the same forward. any_on_host: a request has host-only pages (equal on all ranks); else there
        is nothing to order, and nothing is exchanged."""
        measured = None if self._meter is None else self._meter.end_round()
        self._book.note_misses(np.asarray(self._share(measured)) if any_on_host else np.zeros(self._book.misses.shape))
