"""Goal: no load wedges the scheduler, raises out of an allocation, or retracts without need.

Method: SGLang's scheduler with HiSparse on the CPU; pools too small for what arrives, prompt lengths around every capacity
edge, links that are slow or dead.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("sglang")

from harness.checks import assert_outputs, assert_prefix_of_reference, assert_residency_sound
from harness.engine import Engine, Handle
from harness.hisparse import PAGE, engine_for, finish, submit
from harness.soak import soak

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
MODES = pytest.mark.parametrize("mode", ["hybrid", "always_host"])


def assert_never_retracted(handles: list[Handle]) -> None:
    assert not any(handle.retractions for handle in handles), [handle.retractions for handle in handles]


@LOOPS
@MODES
def test_requests_of_most_of_a_pool(mode: str, overlap: bool) -> None:
    """Goal: no wedge, no retraction. Method: five requests of 60 % of the device arrive together, in chunks of a fifth."""
    with engine_for(mode=mode, overlap=overlap) as engine:
        handles = submit(engine, [1210, 1220, 1230, 1240, 1250], 30)
        engine.run_until_idle(max_steps=1500)
        assert_outputs(handles)
        assert_never_retracted(handles)
        finish(engine)


@LOOPS
def test_who_waits_for_the_end_of_a_prefill(overlap: bool) -> None:
    """Goal: a request that the ledger kept back starts when another's prefill ends, not when a request does. Method: one that decodes
    all the while; two prompts at once, which fit the device one after the other: 5 + 11 + 11 of 24 pages, then 5 + 5 + 11."""
    with engine_for(overlap=overlap, device_pages=24, hot_pages=2, chunked_prefill_size=16 * PAGE) as engine:
        first = submit(engine, [3 * PAGE], 400, seed=1)
        engine.run_until(lambda: engine.num_running() == 1)
        others = submit(engine, [10 * PAGE - 5] * 2, 400, seed=2)
        steps = engine.steps
        engine.run_until(lambda: engine.num_running() == 3, max_steps=20)
        assert engine.steps - steps <= 5 and not any(handle.finished for handle in (*first, *others))
        engine.run_until_idle()
        assert_outputs([*first, *others])
        finish(engine)


def edges(engine: Engine) -> list[int]:
    """Prompt lengths at which some capacity ends, each page by page and token by token around it."""
    limits = engine.coordinator.residency.limits
    longest = engine.scheduler.max_req_input_len
    borders = {longest, limits.num_device_pages * PAGE, (limits.num_device_pages - 1) * PAGE}
    borders |= {limits.hot_pages * PAGE, limits.smallest_pages * PAGE, 4 * PAGE}
    steps = (-PAGE - 1, -PAGE, -PAGE + 1, -2, -1, 0, 1, 2, PAGE)
    return sorted({border + step for border in borders for step in steps if border + step > 0})


@MODES
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
def test_every_length_around_an_edge(mode: str, radix: bool) -> None:
    """Goal: what validation accepts runs in an empty system, the rest is refused (I8). Method: each length alone, then all."""
    with engine_for(mode=mode, radix=radix, device_pages=14, ratio=2, hot_pages=2) as engine:
        longest, handles = engine.scheduler.max_req_input_len, []
        for length in edges(engine):
            handle = submit(engine, [length], 6, seed=length)[0]
            engine.run_until_idle(max_steps=200)
            assert handle.finish_reason == ("length" if length < longest else "abort"), length
            handles.append(handle)
            if radix:
                assert engine.flush()
        assert_prefix_of_reference([handle for handle in handles if handle.finish_reason == "length"])
        accepted = [len(handle.prompt) for handle in handles if handle.finish_reason == "length"]
        assert max(accepted) == longest - 1
        together = submit(engine, accepted[::3], 6, seed=1)
        engine.run_until_idle()
        assert all(handle.finish_reason == "length" for handle in together)
        assert_never_retracted(together)
        finish(engine)


@LOOPS
def test_logical_exhaustion(overlap: bool) -> None:
    """Goal: ids end before device pages: the tree is evicted, then requests queue. Method: ratio 1, many distinct prompts."""
    with engine_for(overlap=overlap, ratio=1, device_pages=24, hot_pages=2) as engine:
        handles: list[Handle] = []
        for wave in range(4):
            handles += submit(engine, [400, 460, 300], 40, seed=wave)
            engine.step(25)
        engine.run_until_idle()
        assert_outputs(handles)
        total = sum(-(-(len(handle.prompt) + 40) // PAGE) for handle in handles)
        assert total > 2 * engine.coordinator.residency.limits.num_logical_pages, "the tree was never too full"
        finish(engine)


@LOOPS
@pytest.mark.parametrize("device_pages", [6, 7, 9])
def test_tiny_pools(device_pages: int, overlap: bool) -> None:
    """Goal: a pool of a lease and little more serves. Method: six to nine pages, a lease of two, growing requests."""
    with engine_for(overlap=overlap, device_pages=device_pages, hot_pages=2, ratio=6) as engine:
        longest = engine.scheduler.max_req_input_len
        handles = submit(engine, [10, longest - 60, 130, longest - 130], 50)
        engine.run_until_idle()
        assert_outputs(handles)
        assert_never_retracted(handles)
        finish(engine)


@LOOPS
@MODES
def test_short_prompts_with_long_outputs(mode: str, overlap: bool) -> None:
    """Goal: growth finds its pages. Method: ten short requests that each become longer than their share of the device."""
    with engine_for(mode=mode, overlap=overlap, device_pages=24, hot_pages=2, max_running_requests=10) as engine:
        handles = submit(engine, [20, 70, 30, 64, 63, 65, 10, 128, 40, 50], 260)
        engine.run_until_idle()
        assert_outputs(handles)
        assert_never_retracted(handles)
        finish(engine)


def in_flight(engine: Engine) -> int:
    return len(engine.coordinator.residency._transfers)


def stream_of_prompts(engine: Engine, num: int) -> tuple[list[Handle], list[int], list[int]]:
    """Prompts one after the other, nobody keeping their pages: (handles, copies under way, pages waiting) step by step."""
    handles, flying, waiting = [], [], []
    for seed in range(num):
        handles += submit(engine, [500], 4, seed=seed)
        engine.step(4)
        flying.append(in_flight(engine))
        waiting.append(engine.coordinator.residency.num_dirty)
    return handles, flying, waiting


@LOOPS
def test_a_slow_link_throttles_instead_of_piling_up(overlap: bool) -> None:
    """Goal: a copy stream that is behind is bounded. Method: a link that works only when a forward waits; then no such wait."""
    peaks = []
    for lag in (6, 10**9):
        with engine_for(overlap=overlap, radix=False, max_running_requests=2) as engine:
            engine.link._max_batches = 0
            residency = engine.coordinator.residency
            residency.policy = replace(residency.policy, mirror_lag_steps=lag, mirror_pages_per_step=4)
            engine.coordinator.policy.coordinator.policy = residency.policy
            handles, flying, waiting = stream_of_prompts(engine, 40)
            peaks.append(max(flying))
            if lag == 6:
                assert max(flying) <= 4 * (lag + 3), "copies pile up"
                assert max(flying[20:]) <= max(flying[:20]) + 8, "copies grow"
                assert max(waiting) <= residency.limits.num_device_pages
                assert engine.link.num_waited > 20 and engine.link.num_unasked == 0
            engine.coordinator.settle()
            engine.run_until_idle()
            assert_outputs(handles)
            assert_never_retracted(handles)
            finish(engine)
    assert peaks[1] > 3 * peaks[0], "the bound is not what held them"


@LOOPS
@pytest.mark.parametrize("mirroring", ["eager", "on_pressure"])
def test_spilling_waits_for_a_slow_link(mirroring: str, overlap: bool) -> None:
    """Goal: pressure on a slow link waits and does not fail. Method: the link copies only what a forward waits for."""
    with engine_for(overlap=overlap, config={"mirroring": mirroring}) as engine:
        engine.link._max_batches = 0
        handles = submit(engine, [500, 620, 560, 600, 610], 50)
        engine.run_until(lambda: all(handle.finished for handle in handles))
        assert_residency_sound(engine)
        assert engine.link.num_waited > 0 and engine.link.num_unasked == 0
        counters = engine.coordinator.residency.counters
        assert counters.pages_spilled > 10 and counters.leases_acquired > 0
        assert_outputs(handles)
        assert_never_retracted(handles)
        engine.coordinator.settle()
        finish(engine)


def test_soak() -> None:
    """Goal: nobody has thought of everything. Method: random engines, lives and faults for a while, the seed from the date."""
    seed = int(np.random.SeedSequence().entropy % 10**6)
    print(f"soak seed {seed}")
    started = time.monotonic()
    report = soak(seconds=20, seed=seed)
    assert report.lives >= 1 and report.requests > 5 and report.rows_read > 10_000
    assert time.monotonic() - started < 300
