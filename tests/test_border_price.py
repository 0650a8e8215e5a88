"""Tests of the model of what the border costs: it drives the real scheduler, and its figures follow from the load."""

import json

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

import border_price


def test_it_compares_the_systems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: plain's figure is what a formula gives, and the others are set against it. Method: two prompts at once in all systems, in
    processes of their own."""
    assert border_price.main(["--loads", "2x2"]) == 0
    rows = {row["system"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(rows) == ["plain", "fixed", "elastic"] and rows["elastic"]["border_steps"] == 0
    # One prefill of both, then 255 decode steps; the loop that overlaps launches one more.
    step = border_price.STEP_MS + 2 * border_price.REQUEST_MS
    seconds = (256 * step + 8000 * border_price.TOKEN_MS) / 1e3
    assert rows["plain"]["tok_s"] == pytest.approx(512 / seconds, rel=0.01)
    assert all(row["of_plain"] == pytest.approx(row["tok_s"] / rows["plain"]["tok_s"], abs=1e-3) for row in rows.values())
    assert rows["fixed"]["of_plain"] == rows["elastic"]["of_plain"] == pytest.approx(1, abs=0.01)


def test_what_the_fixed_border_has_left() -> None:
    """Goal: the systems have as much memory. Method: bytes of rows and of index keys by hand."""
    config, device = border_price.config_of("fixed", border_price.SMALL)
    assert config is not None and device * config["host_to_device_ratio"] == pytest.approx(198_000)
    assert 0 <= 50_000 * (1024 + 132) - (device * 1024 + 198_000 * 132) < 64 * 1024
