"""Goal: admission follows what a server and its link can do by now, from the first burst on. Method: a simulated server at its first
burst and one whose link slows down, probes with planted times, and on a GPU a link that other processes use.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from admission_server import Server
from runtime_world import make_world

from sglang_hisparse import admission_view
from sglang_hisparse.admission import ROUND_STEPS
from sglang_hisparse.admission_view import HotLink, LinkProbe
from sglang_hisparse.kernels.page_copy import copy_pages

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from serving.link_load import link_load


@pytest.mark.parametrize("output", [256, 1024, 4096])
@pytest.mark.parametrize("page_seconds", [0.05e-6, 0.17e-6, 0.35e-6, 0.7e-6])
def test_the_first_burst_of_a_server(page_seconds: float, output: int) -> None:
    """Goal: no burst is let in on nothing but a guess. Method: 48 prompts of 64,000 tokens at once on a server that has measured
    nothing, at costs from cheap to five times the published miss rate; the next burst, all of them at once, and no more than fit."""
    shape = {"device_pages": 12_500, "pages": 1004, "prefill_seconds": 0.75, "base": 1.9e-3, "per_request": 45e-6}
    gated = Server(page_seconds, **shape)
    first, second = gated.burst(output), gated.burst(output)
    everyone, resident = (Server(page_seconds, **shape, gated=False, limit=limit).burst(output) for limit in (48, 12))
    assert min(first, second) > 0.95 * max(everyone, resident)
    if page_seconds < 0.1e-6:
        assert min(first, second) > resident, "it pays, and is let in"


@pytest.mark.parametrize(("page_seconds", "times"), [(0.15e-6, 16), (0.25e-6, 8), (0.25e-6, 16)])
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
        speeds[looks] = server.run(200)
    resident = Server(page_seconds * times, limit=12, gated=False).run(200)
    assert speeds[True] > 0.9 * resident and speeds[True] > 1.15 * speeds[False]


@pytest.mark.parametrize(("page_seconds", "times"), [(0.1e-6, 8), (0.15e-6, 16)])
def test_a_link_that_others_leave_again(page_seconds: float, times: float) -> None:
    """Goal: what was learnt on a slow link is not held against the fast one. Method: it slows down and recovers, while the gate is
    closed and nothing new is learnt; a server that has never seen it slow."""
    server, fresh = Server(page_seconds), Server(page_seconds)
    server.run(20)
    server.slow_down(times)
    server.run(100)
    server.slow_down(1 / times)
    assert server.run(100) > 0.92 * fresh.run(220)


@pytest.mark.parametrize("is_told", [True, False])
def test_what_else_the_scheduler_does_is_no_decode_step(is_told: bool) -> None:
    """Goal: memory that moves between two launches does not make decode steps dear, and with them requests worth their fetches.
    Method: in two thirds of a round the scheduler works for 6 ms ahead of a step of 2 ms; a gate that is not told believes them."""
    server = Server(0.0, base=1.9e-3, per_request=0.1e-3)
    server.left = [10**6]
    for step in range(4 * ROUND_STEPS):
        if step % ROUND_STEPS < ROUND_STEPS * 2 // 3:
            server.clock.now += 6e-3
            if is_told:
                server.gate.note_pause()
        server._decode()
    assert server.gate.figures.known
    assert (server.gate.figures.step(1, 0) < 2.1e-3) == is_told


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


@contextlib.contextmanager
def slow_launches(seconds: float) -> Iterator[None]:
    """Each page copy is launched so much later than it could be."""

    def late(**arguments: Any) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        copy_pages(**arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission_view, "copy_pages", late)
        yield


def test_probes_follow_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: five probes that have passed decide, one late copy does not, nothing is waited for. Method: events with planted times."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(FakeEvent, "milliseconds", 0.025)
    copied: list[int] = []
    monkeypatch.setattr(
        admission_view, "copy_pages", lambda **told: (copied.append(len(told["host_pages"])), copy_pages(**told))
    )
    probe = LinkProbe(torch.device("cpu"), 50e9)
    assert copied[::2] == [4 * pages for pages in copied[1::2]], "what is timed is launched while more is copied"
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
def test_a_probe_is_the_same_on_a_busy_device() -> None:
    """Goal: a link does not look faster because the device has work when a probe is launched, as it has under load and not at
    start, nor because the CPU is slow. Method: probes on an idle device, behind 2 ms of work, and launched by a slow thread."""
    device = torch.device("cuda")
    probe = LinkProbe(device, 50e9)
    work, speeds = torch.ones((4096, 4096), dtype=torch.bfloat16, device=device), {}
    for kind in ("busy", "idle", "slow"):
        for _ in range(9):
            for _ in range(12 if kind == "busy" else 0):
                work @ work
            with slow_launches(30e-6 if kind == "slow" else 0.0):
                probe.begin()
            torch.cuda.synchronize()
        speeds[kind] = probe.bytes_per_second()
    assert max(speeds.values()) < 1.1 * min(speeds.values()), speeds


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
