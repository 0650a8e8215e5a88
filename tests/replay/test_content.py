"""Goal: home content tells rows apart. Method: rows of neighbouring keys compared, and counted faults."""

from __future__ import annotations

import numpy as np
import torch

from sglang_hisparse.replay.content import HomeContent, position_seeds

HOME = HomeContent(64, torch.device("cpu"))


def test_every_word_is_different() -> None:
    """Goal: a moved, stale or partial row cannot pass. Method: all words of 3 texts x 200 positions x 3 layers are distinct."""
    words = [
        HOME.rows(torch.from_numpy(position_seeds(content, 0, 200)), layer).flatten()
        for content in (1, 2, 3)
        for layer in (0, 1, 2)
    ]
    assert torch.cat(words).unique().numel() == 3 * 3 * 200 * 8


def test_seeds_continue() -> None:
    """Goal: a position's content does not depend on where the range begins. Method: a split range equals the whole."""
    whole = position_seeds(7, 0, 50)
    assert np.array_equal(whole, np.concatenate([position_seeds(7, 0, 20), position_seeds(7, 20, 50)]))


def test_mismatches_are_counted_by_row() -> None:
    """Goal: the count is exact. Method: flip one bit in each of three rows, two bits in one of them."""
    seeds = torch.from_numpy(position_seeds(1, 0, 40))
    rows = HOME.rows(seeds, 2)
    assert HOME.count_mismatches(rows, seeds, 2).item() == 0
    for row, word in ((3, 0), (17, 7), (17, 1), (39, 4)):
        rows[row, word] ^= 1 << (row % 60)
    assert HOME.count_mismatches(rows, seeds, 2).item() == 3
    assert HOME.count_mismatches(rows, seeds, 1).item() == 40
