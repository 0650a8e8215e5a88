"""Tests of the scheduler benchmark: it times the real scheduler, alone in a process, and says what it timed."""

import json
import pathlib

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

import bench_scheduler
from harness.engine import Engine


def test_it_measures_and_records(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: medians of both systems and their ratio, from processes of their own. Method: a short run of two requests."""
    file = tmp_path / "result.json"
    argv = ["--requests", "2", "--systems", "plain", "ours", "--iterations", "70", "--repeats", "1", "--json", str(file)]
    assert bench_scheduler.main(argv) == 0
    document = json.loads(file.read_text())
    us = {row["system"]: row["median_us"] for row in document["rows"]}
    shares = {row["system"]: row["quiet_share"] for row in document["rows"]}
    assert shares["plain"] == 0 and 0.9 < shares["ours"] < 1
    assert set(us) == {"plain", "ours"} and all(50 < value < 50_000 for value in us.values())
    assert document["versions"]["sglang"] and document["iterations"] == 70 and "--requests 2" in document["command"]
    printed = capsys.readouterr().out
    assert "(1.00)" in printed and f"({us['ours'] / us['plain']:.2f})" in printed


def test_a_run_that_decodes_nothing_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an iteration without its decode step is not timed for one. Method: requests that end before the run does."""
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda engine, prompt, count: submit(engine, prompt, 10))
    with pytest.raises(RuntimeError, match="0 of 1 requests still decode"):
        bench_scheduler.measure("ours", 1, 50)
