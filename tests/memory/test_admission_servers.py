"""Goal: the gate is worth having on a slow link and costs nothing on a fast one. Method: simulated servers side by side."""

from __future__ import annotations

from admission_server import Server


def test_a_slow_link_is_recovered_from() -> None:
    """Goal: where greedy admission loses a fifth, the gate does not. Method: a slow link, three servers side by side."""
    slow = {"page_seconds": 2.5e-6, "prefill_seconds": 0.02}
    queueing = Server(**slow, gated=False, limit=12).run(80)
    greedy = Server(**slow, gated=False).run(80)
    gated = Server(**slow)
    assert greedy < 0.8 * queueing, (greedy, queueing)
    assert gated.run(80) > 0.97 * queueing
    assert gated.gate.waits > 0


def test_a_fast_link_loses_nothing() -> None:
    """Goal: where greedy admission wins, the gate stays open. Method: the figures of an H200, bound by prefills and not."""
    for prefill_seconds in (0.137, 0.005):
        fast = {"page_seconds": 0.085e-6, "prefill_seconds": prefill_seconds}
        greedy, queueing = Server(**fast, gated=False).run(60), Server(**fast, gated=False, limit=12).run(60)
        gated = Server(**fast)
        assert gated.run(60) > 0.98 * greedy > queueing
        assert not gated.gate.closed


def test_a_link_that_is_better_than_its_reputation_is_found_out() -> None:
    """Goal: a wrong prior does not keep the gate shut. Method: prior ten times too high, hot buffers that miss rarely."""
    server = Server(page_seconds=0.05e-6, prefill_seconds=0.005, clients=12)
    server.link.request_bytes *= 10
    server.run(20)
    assert server.gate.figures.known
    server.clients = 48
    greedy = Server(page_seconds=0.05e-6, prefill_seconds=0.005, gated=False).run(100)
    assert server.run(100) > 0.97 * greedy
    assert server.gate.waits > 0, "the prior did not matter"
