"""Goal: the number of real rows on the device is always the one that was filled last. Method: random fills against a plain tensor,
counted; on a GPU fills inside and outside of a capture.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hisparse.transfer.hot_buffer import RealRows


class Counted:
    """A tensor that counts what it is filled with."""

    is_cuda = False

    def __init__(self) -> None:
        self.rows, self.fills = torch.zeros(1, dtype=torch.int32), 0

    def fill_(self, count: int) -> None:
        self.rows.fill_(count)
        self.fills += 1


@given(st.lists(st.integers(0, 3), max_size=40))
def test_only_a_new_number_is_written(counts: list[int]) -> None:
    """Goal: the device's number is the last one asked for, and repeats cost nothing. Method: as above, on the CPU."""
    counted = Counted()
    real = RealRows(counted)
    for count in counts:
        real.fill_(count)
        assert int(counted.rows) == count
    assert counted.fills == sum(count != before for count, before in zip(counts, [None, *counts], strict=False))


@pytest.mark.gpu
def test_what_a_capture_records_is_not_believed() -> None:
    """Goal: a fill that a graph has recorded has not happened yet. Method: capture one, fill the same number, replay."""
    rows = torch.zeros(1, dtype=torch.int32, device="cuda")
    real, graph = RealRows(rows), torch.cuda.CUDAGraph()
    real.fill_(2)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        real.fill_(7)
    assert int(rows) == 2
    real.fill_(7)
    assert int(rows) == 7, "a capture is no fill"
    real.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert int(rows) == 7
