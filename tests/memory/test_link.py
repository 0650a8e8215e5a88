"""Goal: the link is believed as fast as it is by now. Method: a simulated server whose link slows down, probes with planted times, and
on a GPU a link that other processes use.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from admission_server import Server
from runtime_world import make_world

from sglang_hisparse.admission_view import HotLink, LinkProbe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from serving.link_load import link_load


@pytest.mark.parametrize(("page_seconds", "times"), [(0.15e-6, 8), (0.25e-6, 8), (0.25e-6, 16)])
def test_a_link_that_others_begin_to_use(page_seconds: float, times: float) -> None:
    """Goal: a link is believed as it is, not as it was at start. Method: it slows down under 48 requests that all paid; with a
    gate that looks, one that is told the first speed for ever, and a server that never lets in more than fit."""
    speeds = {}
    for looks in (True, False):
        server = Server(page_seconds)
        server.run(20)
        assert not server.gate.closed
        server.link.told = None if looks else server.link.bytes_per_second
        server.slow_down(times)
        speeds[looks] = server.run(60)
    resident = Server(page_seconds * times, limit=12, gated=False).run(60)
    assert speeds[True] > 0.9 * resident and speeds[True] > 1.15 * speeds[False]


class FakeEvent:
    """Passes when it is told to; the second of a pair is `milliseconds` behind the first."""

    milliseconds = 1.0
    passed = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = FakeEvent.milliseconds

    def query(self) -> bool:
        return FakeEvent.passed

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.time


def test_probes_follow_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: five probes that have passed decide, one late copy does not, nothing is waited for. Method: events with planted times."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(FakeEvent, "milliseconds", 0.025)
    probe = LinkProbe(torch.device("cpu"), 50e9)
    assert torch.equal(probe._device, probe._host) and probe.bytes_per_second() == pytest.approx(50e9)
    monkeypatch.setattr(FakeEvent, "milliseconds", 0.1)
    for slow, speed in enumerate((50e9, 50e9, 12.5e9), 1):
        probe.begin()
        assert probe.bytes_per_second() == pytest.approx(speed), f"{slow} of five"
    monkeypatch.setattr(FakeEvent, "passed", False)
    monkeypatch.setattr(FakeEvent, "milliseconds", 0.001)
    for _ in range(5):
        probe.begin()
        assert probe.bytes_per_second() == pytest.approx(12.5e9)
    monkeypatch.setattr(FakeEvent, "passed", True)
    assert probe.bytes_per_second() == pytest.approx(25 * 50e9)
    with make_world() as world:
        assert HotLink(world.runtime, 50e9, probe).look() == pytest.approx(75e9), "no faster than half as much again"


@pytest.mark.gpu
def test_a_probe_sees_what_others_take() -> None:
    """Goal: it is the link that is timed. Method: quiet, under three processes that copy, quiet again."""
    device = torch.device("cuda")
    probe = LinkProbe(device, 50e9)

    def look() -> float:
        for _ in range(9):
            probe.begin()
            torch.cuda.synchronize()
        return probe.bytes_per_second()

    quiet = look()
    with link_load(3):
        time.sleep(0.5)
        loaded = look()
    assert 40e9 < quiet < 62e9 and loaded < 0.7 * quiet and look() > 0.8 * quiet
