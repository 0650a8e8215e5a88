"""Goal: HiSparse gives the reference's tokens and returns every page, under pressure, through every end of a request.
Method: SGLang's scheduler with our hooks on the CPU; a device pool far too small, host copies as late as allowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from harness.checks import (
    assert_no_request_left,
    assert_outputs,
    assert_pools_empty,
    assert_prefix_of_reference,
    assert_residency_sound,
    used_host_tier,
)
from harness.engine import Engine, Handle, make_scheduler
from harness.scenarios import random_life

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
RADIX = pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
MODES = pytest.mark.parametrize("mode", ["hybrid", "always_host"])
DEVICE_TOKENS = 32 * 64


def config(**changes: Any) -> dict[str, Any]:
    """A hot buffer of four pages, logical tokens four times the device's."""
    return {"top_k": 128, "device_buffer_size": 256, "host_to_device_ratio": 4, **changes}


def engine_for(*, mode: str = "hybrid", overlap: bool = True, radix: bool = True, **changes: Any) -> Any:
    """32 device pages, 128 logical pages; two layers per index group; a lagging link."""
    changes.setdefault("device_tokens", DEVICE_TOKENS)
    changes.setdefault("link_seed", 1)
    return make_scheduler(config(residency=mode), overlap=overlap, radix=radix, index_topk_freq=2, **changes)


def submit(engine: Engine, lengths: list[int], new: int, *, shared: int = 0, seed: int = 0) -> list[Handle]:
    """Requests of the given prompt lengths, the first `shared` tokens of which are the same."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(10, 1000, shared).tolist()
    return [engine.submit(prefix + rng.integers(10, 1000, length - shared).tolist(), new) for length in lengths]


def finish(engine: Engine) -> None:
    """Run to the end, then look for anything left behind, and flush."""
    engine.run_until_idle()
    assert_no_request_left(engine)
    assert engine.flush()
    assert_pools_empty(engine)


@LOOPS
@RADIX
@MODES
def test_pressure(mode: str, radix: bool, overlap: bool) -> None:
    """Goal: 6 long requests on a device for 3 end right. Method: they must go mixed; rows come from the host tier."""
    with engine_for(mode=mode, overlap=overlap, radix=radix) as engine:
        handles = submit(engine, [500, 620, 560, 700, 530, 610], 60)
        engine.run_until_idle()
        assert_outputs(handles)
        counters = used_host_tier(engine)
        assert counters["pages_spilled"] > 0 and counters["rows_fetched"] > 100 and counters["rows_hot"] > 100
        finish(engine)


@LOOPS
@MODES
def test_shared_prefix_under_pressure(mode: str, overlap: bool) -> None:
    """Goal: shared pages may go to the host under all their users. Method: a long shared prefix, then a second wave."""
    with engine_for(mode=mode, overlap=overlap) as engine:
        handles = submit(engine, [700, 760, 720, 800], 40, shared=640)
        engine.run_until_idle()
        handles += submit(engine, [690, 710, 1000], 40, shared=640)
        engine.run_until_idle()
        assert_outputs(handles)
        assert max(handle.cached_tokens for handle in handles[4:]) == 640
        used_host_tier(engine)
        finish(engine)


@LOOPS
def test_cached_prefix_comes_back_from_the_host(overlap: bool) -> None:
    """Goal: an evicted-from-GPU prefix is promoted. Method: turn 2 repeats turn 1 after others filled the device."""
    with engine_for(overlap=overlap) as engine:
        first = submit(engine, [900], 30)[0]
        engine.run_until_idle()
        others = submit(engine, [900, 900, 700], 30, seed=5)
        engine.run_until_idle()
        again = engine.submit(list(first.prompt) + first.output, 30)
        engine.run_until_idle()
        assert_outputs([first, *others, again])
        assert again.cached_tokens >= 896
        assert used_host_tier(engine)["pages_promoted"] > 0
        finish(engine)


@LOOPS
@MODES
def test_abort_in_every_phase(mode: str, overlap: bool) -> None:
    """Goal: an abort at any moment leaves nothing. Method: abort while queued, between chunks, decoding, mixed."""
    with engine_for(mode=mode, overlap=overlap) as engine:
        handles = submit(engine, [900, 600, 620, 640, 660], 80)
        engine.step()
        assert engine.scheduler.chunked_req is not None
        engine.abort(handles[0])
        engine.abort(handles[4])
        engine.run_until(lambda: len(handles[1].output) >= 2)
        engine.abort(handles[1])
        engine.run_until(lambda: len(handles[2].output) >= 40)
        engine.abort(handles[2])
        engine.run_until_idle()
        assert_outputs([handles[3]])
        assert [handle.finish_reason for handle in handles] == ["abort", "abort", "abort", "length", "abort"]
        assert_prefix_of_reference(handles)
        finish(engine)


@LOOPS
@RADIX
@MODES
def test_retraction_keeps_pages(mode: str, radix: bool, overlap: bool) -> None:
    """Goal: a retracted request goes on right, from its cached pages. Method: force retractions while it decodes."""
    with engine_for(mode=mode, overlap=overlap, radix=radix) as engine:
        handles = submit(engine, [500, 620, 560], 80)
        retracted = 0
        for output_tokens in (10, 40, 60):
            engine.run_until(lambda least=output_tokens: max(len(handle.output) for handle in handles) >= least)
            retracted += engine.retract()
            assert_residency_sound(engine)
        engine.run_until_idle()
        assert retracted >= 2
        assert_outputs(handles)
        used_host_tier(engine)
        finish(engine)


@LOOPS
@MODES
def test_pause_flush_resume(mode: str, overlap: bool) -> None:
    """Goal: pausing both ways and a flush in between lose nothing. Method: pause in place, retract, flush, resume."""
    with engine_for(mode=mode, overlap=overlap) as engine:
        handles = submit(engine, [500, 620, 560, 700], 60)
        engine.run_until(lambda: max(len(handle.output) for handle in handles) >= 8)
        engine.pause("in_place")
        assert not engine.flush()
        engine.resume()
        engine.run_until(lambda: max(len(handle.output) for handle in handles) >= 20)
        engine.pause("retract")
        engine.run_until(lambda: not engine.coordinator.has_ongoing_staging(), max_steps=50)
        assert engine.flush()
        assert_pools_empty(engine)
        engine.resume()
        engine.run_until_idle()
        assert_outputs(handles)
        finish(engine)


@LOOPS
def test_equal_prompts_at_once(overlap: bool) -> None:
    """Goal: deduplicated inserts keep residency right. Method: the same prompt four times at once, under pressure."""
    with engine_for(overlap=overlap) as engine:
        prompt = np.random.default_rng(3).integers(10, 1000, 450).tolist()
        handles = [engine.submit(prompt, 70) for _ in range(4)] + submit(engine, [700, 650], 40)
        engine.run_until_idle()
        assert_outputs(handles)
        used_host_tier(engine)
        finish(engine)


@LOOPS
@MODES
def test_longest_request(mode: str, overlap: bool) -> None:
    """Goal: what the engine accepts runs alone in an empty system (I8). Method: prompts at its limit, and one beyond.

    SGLang cuts the output of a request that leaves no room for it; what is left of it must be right.
    """
    with engine_for(mode=mode, overlap=overlap) as engine:
        limit = engine.scheduler.max_req_input_len
        refused = submit(engine, [limit], 30)[0]
        engine.run_until_idle()
        assert refused.finish_reason == "abort"
        for length in (limit - 1, limit - 65, limit - 200):
            handle = submit(engine, [length], 30)[0]
            engine.run_until_idle()
            assert handle.finish_reason == "length"
            assert_prefix_of_reference([handle])
        assert_outputs([handle])
        finish(engine)


def test_leases_stay_within_the_ledger() -> None:
    """Goal: no lease takes pages that admission has promised (I7). Method: a life that once ended in a failed prefill:
    requests shorter than their hot buffer, all sent to the host, on a device of 24 pages.
    """
    settings = config(
        device_buffer_size=384, host_to_device_ratio=1, residency="always_host", mirroring="on_pressure",
        watermark_low=0.2, watermark_high=0.3,
    )  # fmt: skip
    with make_scheduler(
        settings, device_tokens=24 * 64, overlap=True, radix=False, index_topk_freq=2, link_seed=108,
        chunked_prefill_size=128, max_running_requests=3, schedule_conservativeness=0.05,
    ) as engine:  # fmt: skip
        handles = random_life(engine, seed=108, num_events=120, max_prompt=1200, max_new=90)
        assert_outputs([handle for handle in handles if handle.finish_reason != "abort"])
        finish(engine)


@pytest.mark.parametrize("seed", range(4))
def test_random_life(seed: int) -> None:
    """Goal: no order of events breaks it. Method: seeded random submits, aborts, retractions, pauses and flushes."""
    mode = "always_host" if seed == 1 else "hybrid"
    with engine_for(mode=mode, overlap=seed % 2 == 0, radix=seed != 2, link_seed=seed) as engine:
        handles = random_life(engine, seed=seed, num_events=80)
        assert_outputs([handle for handle in handles if handle.finish_reason != "abort"])
        assert_prefix_of_reference(handles)
        used_host_tier(engine)
        finish(engine)
