"""Goal: what one server has published, the next one starts with. Method: two engines in turn over one folder; the model judges
every row and counts what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from harness.checks import assert_no_request_left, assert_outputs
from harness.hisparse import finish

from .servers import PAGE, counts, prefilled, prompt, publish, serve, server, units


@pytest.mark.parametrize("streams", [False, True], ids=["promoted", "streamed"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
def test_a_restarted_server_prefills_new_tokens_only(tmp_path: Path, overlap: bool, streams: bool) -> None:
    """Goal: turn N+1 after a restart computes nothing that turn N has. Method: a history of 10 pages and its continuation; what has
    been loaded is promoted, or read from the host by a streamed prefill."""
    config = {"prefill_scratch_tokens": 2048 if streams else 0}
    history = prompt(10 * PAGE + 5)
    with server(tmp_path, overlap=overlap, config=config) as first:
        handles = serve(first, [history], new=PAGE)
        assert_outputs(handles)
        assert publish(first) == 11
        finish(first)
    turn = [*history, *handles[0].output, *prompt(20, seed=1)]
    with server(tmp_path, overlap=overlap, config=config) as second:
        (handle,) = serve(second, [turn], new=4)
        assert_outputs([handle])
        assert handle.cached_tokens == 11 * PAGE
        assert prefilled(second) == len(turn) - 11 * PAGE + 3  # all new tokens but the last of the output
        found = counts(second)
        assert found["storage_pages_loaded"] == 11 and found["storage_pages_corrupt"] == 0
        assert second.coordinator.counters().get("streamed_extends", 0) == streams
        assert second.coordinator.counters()["pages_promoted"] > 0
        assert_no_request_left(second)
        finish(second)
    assert len(units(tmp_path)) == 11
