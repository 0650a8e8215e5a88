"""Tests of scripts/bench_extend.py, on the CPU library: what it times is right, and its border is the right one."""

import itertools
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))

import bench_extend
from bench_extend import Row


def test_neighbours_share_most_of_their_top_k() -> None:
    """Goal: a token drops 15 % of its positions, none comes twice. Method: compare neighbours as sets."""
    chosen = bench_extend.selections(5000, 20, 200)
    for before, after in itertools.pairwise(chosen):
        assert len({*after.tolist()}) == 200 and len({*before.tolist()} & {*after.tolist()}) == 170
    assert bench_extend.selections(100, 3, 200).shape == (3, 100)


def test_the_points_are_right() -> None:
    """Goal: what is timed is a correct union, and its rows are counted. Method: small points, against the selections."""
    rows = bench_extend.measure("cpu", prefixes=(700,), tokens=(1, 5), top_k=100)
    chosen = bench_extend.selections(700, 5, 100)
    assert all(row.correct for row in rows)
    assert [row.union_rows for row in rows] == 2 * [100, len(np.unique(chosen))]
    layer = bench_extend.Layer(700, 656, "cpu")
    layer.copy_all()
    assert (layer.scratch[layer.places.long() * 64] == layer.host[layer.logical.long() * 64]).all()


def test_a_wrong_row_is_noticed() -> None:
    """Goal: the check means something. Method: a layer whose kernel copies from another address."""
    layer = bench_extend.Layer(700, 656, "cpu")
    layer.host_base += 16
    assert not layer.check(layer.ids(bench_extend.selections(600, 1, 100)))[1]


def test_the_border() -> None:
    """Goal: the last count before the union is slower for the first time. Method: times by hand, one that comes back."""
    points = [(1, 5.0), (4, 9.0), (16, 12.0), (32, 8.0)]
    rows = [Row(656, 700, count, 1, 10.0, took, correct=True) for count, took in points]
    assert bench_extend.crossovers(rows) == {(656, 700): 4}
    assert bench_extend.crossovers(rows[2:]) == {(656, 700): 0}
