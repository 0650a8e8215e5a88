"""Goal: requests over one cached prefix run as many at once as plain SGLang runs, and nobody beside them starves.

Method: SGLang's scheduler on the CPU, plain and with HiSparse, on the same device tokens.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sglang")

from harness.checks import assert_outputs, assert_residency_sound
from harness.engine import Engine, Handle, make_scheduler
from harness.hisparse import PAGE, engine_for, finish, submit

from sglang_hisparse.residency.sharing import SharingPass

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
PREFIX = np.random.default_rng(3).integers(10, 1000, 26 * PAGE).tolist()


def family(engine: Engine, count: int, new: int, *, own_pages: int = 3, seed: int = 0) -> list[Handle]:
    """Requests of `own_pages` pages over the prefix, output included."""
    rng = np.random.default_rng(seed)
    return [engine.submit(PREFIX + rng.integers(10, 1000, own_pages * PAGE - new).tolist(), new) for _ in range(count)]


def cache_prefix(engine: Engine) -> None:
    engine.submit([*PREFIX, 5], 2)
    engine.run_until_idle()


def serve(engine: Engine, count: int, new: int) -> tuple[int, float, list[Handle]]:
    """(iterations, requests that decode on average, handles)."""
    cache_prefix(engine)
    before, handles, running = engine.steps, family(engine, count, new), []
    while not all(handle.finished for handle in handles):
        engine.step()
        running.append(engine.num_running())
    return engine.steps - before, sum(running) / sum(count > 0 for count in running), handles


def test_a_shared_prefix_is_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: as many at once as without HiSparse. Method: forty requests of three pages over 26 cached ones, on 128 device pages with
    leases of eight; the same with a ledger that keeps nobody, which runs little more than half as many."""
    sizes = {"max_running_requests": 40, "overlap": False}
    with make_scheduler(None, device_tokens=128 * PAGE, **sizes) as engine:
        plain_steps, plain, _ = serve(engine, 40, 50)
    with engine_for(device_pages=128, hot_pages=8, **sizes) as engine:
        steps, ours, handles = serve(engine, 40, 50)
        assert_outputs(handles)
        assert not any(handle.retractions for handle in handles)
        finish(engine)
    assert ours >= 0.98 * plain and steps <= 1.05 * plain_steps, (ours, plain, steps, plain_steps)
    original = SharingPass.__init__
    monkeypatch.setattr(SharingPass, "__init__", lambda self, book, can_keep=True: original(self, book, False))
    with engine_for(device_pages=128, hot_pages=8, **sizes) as engine:
        steps, ours, _ = serve(engine, 40, 50)
    assert ours < 0.6 * plain and steps > 1.6 * plain_steps


@LOOPS
def test_a_stranger_beside_a_family_goes_on(overlap: bool) -> None:
    """Goal: who shares nothing is not starved by those who do. Method: leases of 64 pages, which only one request could have; a
    stranger decodes 600 tokens beside a family that is renewed all the time, and another one comes later."""
    with engine_for(overlap=overlap, device_pages=120, hot_pages=64, max_running_requests=24) as engine:
        cache_prefix(engine)
        stranger = submit(engine, [20 * PAGE], 600, seed=8)
        handles: list[Handle] = []
        for wave in range(12):
            handles += family(engine, 8, 50, seed=wave)
            if wave == 4:
                stranger += submit(engine, [30 * PAGE], 200, seed=9)
            engine.step(40)
            assert_residency_sound(engine)
        engine.run_until(lambda: all(one.finished for one in stranger), max_steps=800)
        engine.run_until_idle(max_steps=800)
        assert_outputs([*stranger, *handles])
        assert not any(handle.retractions for handle in [*stranger, *handles])
        finish(engine)


@LOOPS
def test_a_family_that_outgrows_the_device_queues(overlap: bool) -> None:
    """Goal: outputs that grow find their pages, and nobody is retracted. Method: twenty members that each become nine pages longer,
    on a device that holds a few of them; prefixes that are not cached yet, aborted members, strangers between."""
    with engine_for(overlap=overlap, device_pages=90, hot_pages=16, max_running_requests=40, ratio=12) as engine:
        handles = family(engine, 10, 560, own_pages=10)
        strangers = submit(engine, [300, 1500], 100, seed=4)
        handles += family(engine, 10, 560, own_pages=10, seed=1)
        for number in range(60):
            engine.step(10)
            assert_residency_sound(engine)
            if number % 20 == 5:
                engine.abort(handles.pop(0))
        engine.run_until_idle(max_steps=6000)
        assert_outputs([*handles, *strangers])
        assert not any(handle.retractions for handle in [*handles, *strangers])
        assert max(engine.coordinator.residency.book.lives) > 1, "nobody had to wait"
        finish(engine)
