"""Tests of scripts/bench_extend.py, on the CPU library: what it times is right, and its border is the right one."""

import itertools
import json
import pathlib
import sys
from dataclasses import replace

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))

import bench_extend
from bench_extend import Row

from sglang_hisparse.capacity import PrefillRule

RESULTS = pathlib.Path(bench_extend.__file__).parent / "results"


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


def test_the_file_says_what_it_was_made_with(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: commit, versions and command stand before the rows. Method: the command line, with small points on the CPU."""
    few = [replace(row, union_us=1.0) for row in bench_extend.measure("cpu", prefixes=(700,), tokens=(1,), top_k=100)]
    monkeypatch.setattr(bench_extend, "measure", lambda device: few)
    monkeypatch.setattr(bench_extend.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        sys, "argv", ["bench_extend.py", "--commit", "abc", "--json", str(tmp_path / "new" / "extend.json")]
    )
    assert bench_extend.main() == 0
    document = json.loads((tmp_path / "new" / "extend.json").read_text())
    assert list(document) == ["commit", "versions", "command", "rows"] and document["commit"] == "abc"
    assert document["versions"]["torch"] and document["command"].startswith(
        "python3 scripts/bench_extend.py --commit abc"
    )
    assert [Row(**row) for row in document["rows"]] == few


def committed() -> list[Row]:
    """The measured points."""
    document = json.loads((RESULTS / "extend_h200.json").read_text(encoding="utf-8"))
    assert {"commit", "versions", "command"} < document.keys()
    return [Row(**row) for row in document["rows"]]


def test_the_committed_points_are_all_there_and_right() -> None:
    """Goal: no point is left out or wrong. Method: the grid of the script against the committed file."""
    points = [(row.row_bytes, row.prefix, row.new_tokens) for row in committed()]
    assert points == list(itertools.product(bench_extend.ROW_BYTES, bench_extend.PREFIXES, bench_extend.TOKENS))
    assert all(row.correct for row in committed())


def test_the_rule_is_as_good_as_the_measured_border() -> None:
    """Goal: constants of the rule, and README's table, are those of the measurement. Method: every border, expected rows."""
    borders, text = bench_extend.crossovers(committed()), (RESULTS / "README.md").read_text(encoding="utf-8")
    rule = PrefillRule(1000, 64, 67, union_tokens=1 << 20, top_k=bench_extend.TOP_K)
    for prefix in bench_extend.PREFIXES:
        ruled = max(tokens for tokens in range(1, 4096) if rule.fetches_union(tokens, prefix))
        measured = [borders[row_bytes, prefix] for row_bytes in bench_extend.ROW_BYTES]
        assert f"| {prefix:,} | {measured[0]:,} | {measured[1]:,} | {ruled:,} |" in text
        # The next point of the grid is the first at which the union was slower.
        assert all(border / 2 < ruled < 2 * border for border in measured)
    for row in committed():
        assert 0.99 < row.union_rows / rule.expected_union(row.new_tokens, row.prefix) < 1.01
