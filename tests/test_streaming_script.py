"""Goal: the script that compares streamed prompts tells good from bad. Method: a fake server that answers as SGLang does."""

from __future__ import annotations

import json
import pathlib

import fake_sglang
import pytest
import verify_streaming
from fake_sglang import free_port
from serving import fidelity, server


@pytest.fixture
def fake_paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> server.Paths:
    """A site folder whose `sglang` is the fake; its counters are current at once."""
    monkeypatch.setattr(fidelity.time, "sleep", lambda seconds: None)
    return server.Paths(
        tmp_path / "model", tmp_path / "logs", str(fake_sglang.install(tmp_path / "site")), str(tmp_path), str(tmp_path)
    )


def _run(paths: server.Paths, out: pathlib.Path, *extra: str) -> int:
    return verify_streaming.main([
        str(paths.model), "--out", str(out), "--logs", str(paths.logs), "--site", paths.site, "--plugin", paths.plugin,
        "--cache", paths.cache, "--port", str(free_port()), "--long", "300", "--history", "60", "--histories", "2",
        "--turn", "9", "--output", "5", "--commit", "abc", *extra,
    ])  # fmt: skip


def test_a_server_that_streams_nothing_fails(
    fake_paths: server.Paths,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: equal tokens alone prove no streaming. Method: the fake has no counters of streamed extends."""
    started, fleet = {}, verify_streaming.fleet
    monkeypatch.setattr(
        verify_streaming, "fleet", lambda members, *rest, **how: started.update(members) or fleet(members, *rest, **how)
    )
    assert _run(fake_paths, tmp_path / "out", "--config", '{"union_extend_tokens": 0}') == 1
    printed = capsys.readouterr().out
    assert "FAILED: 0 extends were streamed" in printed and "FAILED: long: tokens" not in printed
    document = json.loads((tmp_path / "out" / "streaming_h200.json").read_text())
    assert document["commit"] == "abc" and document["config"] == {"union_extend_tokens": 0}
    assert started["ours"].spec.config["union_extend_tokens"] == 0 and not started["plain"].spec.config
    rows = {row["case"]: row for row in document["rows"]}
    assert all(row["identical"] == row["prompts"] for row in rows.values())
    assert rows["together"]["prompts"] == 7 and rows["short, 2 at once"]["prompts"] == 2
