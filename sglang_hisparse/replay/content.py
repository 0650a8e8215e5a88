"""Home content: what every KV row must hold, computed from who wrote it and from nothing else.

Called by the executor, to write rows and to check rows that came back. A row's bytes follow from (content id, position,
layer) by arithmetic; this module must never read a KV buffer, a host row or a page table, so that a fault in any of
them shows. Different rows differ in every 8-byte word (but for chance collisions of 64-bit hashes), and so do the words
of one row: a row that moved, a stale row, and a row that arrived in part are all seen.
"""

from __future__ import annotations

import numpy as np
import torch

WORD_BYTES = 8
# Odd multipliers with well-spread bits: the golden ratio, and the two of the splitmix64 finaliser, as signed numbers.
_GOLDEN, _MIX_1, _MIX_2 = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _signed(number: int) -> int:
    """The int64 with the same low 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def position_seeds(content_id: int, start: int, end: int) -> np.ndarray:
    """One int64 per position [start, end) of the text `content_id`."""
    with np.errstate(over="ignore"):
        seeds = np.arange(start, end, dtype=np.int64) * np.int64(_GOLDEN) + np.int64(content_id) * np.int64(_MIX_1)
        seeds ^= seeds >> np.int64(29)
        return seeds * np.int64(_MIX_2)


class HomeContent:
    """Rows of `row_bytes` bytes on one device."""

    def __init__(self, row_bytes: int, device: torch.device) -> None:
        self._words = torch.arange(1, row_bytes // WORD_BYTES + 1, device=device) * _GOLDEN

    def rows(self, seeds: torch.Tensor, layer: int) -> torch.Tensor:
        """int64 [n, row_bytes / 8] for seeds int64 [n]."""
        keys = (seeds + _signed((layer + 1) * _MIX_1)) * _MIX_2
        keys ^= keys >> 31
        return keys.unsqueeze(1) ^ self._words

    def count_mismatches(self, rows: torch.Tensor, seeds: torch.Tensor, layer: int) -> torch.Tensor:
        """How many rows [n, row_bytes / 8] differ from their home content: int64 scalar tensor on the device."""
        expected = self.rows(seeds, layer)
        if rows.device.type == "cpu" and torch.equal(rows, expected):  # several times quicker than counting
            return torch.zeros((), dtype=torch.int64)
        return (rows != expected).any(dim=1).sum()
