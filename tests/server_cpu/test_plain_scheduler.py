"""Goal: the harness itself is sound. Method: drive plain SGLang through its whole request life and compare with the
reference; then break memory on purpose and see that the fake model notices.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from harness.engine import Engine, Handle, make_scheduler
from harness.fake_model import WrongRowError


def submit_shared(engine: Engine, count: int, *, shared: int = 300, own: int = 40, new: int = 20) -> list[Handle]:
    """`count` requests that share a prefix of `shared` tokens and differ afterwards."""
    rng = np.random.default_rng(7)
    prefix = rng.integers(10, 1000, shared).tolist()
    return [
        engine.submit(prefix + rng.integers(10, 1000, own + 37 * i).tolist(), new + i) for i in range(count)
    ]


def assert_outputs(handles: list[Handle]) -> None:
    for handle in handles:
        assert handle.finish_reason == "length"
        assert handle.output == handle.history.output(handle.max_new_tokens), handle.rid


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
def test_outputs_equal_reference(radix: bool, overlap: bool) -> None:
    """Goal: requests with a shared prefix end right. Method: chunked prefill, decode, compare with reference."""
    with make_scheduler(radix=radix, overlap=overlap, index_topk_freq=2) as engine:
        assert engine.scheduler.enable_overlap == overlap
        handles = submit_shared(engine, 8)
        engine.run_until_idle()
        assert_outputs(handles)
        cached = [handle.cached_tokens for handle in handles]
        assert max(cached) == (256 if radix else 0)
        assert engine.allocator.available_size() + engine.tree.evictable_size() == 64 * 64
        counters = engine.model.counters
        assert counters.rows_read_decode > 10_000 and counters.rows_read_extend > 10_000
        assert counters.rows_read_late > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
def test_pressure_retracts_and_recovers(overlap: bool) -> None:
    """Goal: a full pool retracts and still answers right. Method: 2,048 tokens for requests that grow to 3,500."""
    with make_scheduler(device_tokens=2048, overlap=overlap, schedule_conservativeness=0.1) as engine:
        rng = np.random.default_rng(3)
        handles = []
        for _ in range(2):
            handles += [engine.submit(rng.integers(10, 1000, 100).tolist(), 300) for _ in range(4)]
            engine.step(10)
        engine.run_until_idle()
        assert_outputs(handles)
        assert sum(handle.retractions for handle in handles) > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
def test_abort_in_every_phase(overlap: bool) -> None:
    """Goal: aborts release everything. Method: abort a queued, a half-prefilled and a decoding request."""
    with make_scheduler(overlap=overlap, max_running_requests=3) as engine:
        handles = submit_shared(engine, 4, shared=600, new=60)
        engine.step()
        assert engine.scheduler.chunked_req is not None
        engine.abort(handles[0])
        engine.abort(handles[3])
        engine.step()
        assert handles[3].finish_reason == "abort"
        engine.run_until(lambda: len(handles[1].output) >= 3)
        engine.abort(handles[1])
        engine.run_until_idle()
        assert [handle.finish_reason for handle in handles] == ["abort", "abort", "length", "abort"]
        assert_outputs([handles[2]])
        assert handles[1].output == handles[1].history.output(len(handles[1].output))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
def test_retract_pause_and_flush(overlap: bool) -> None:
    """Goal: the control messages work as in a server. Method: force a retraction, pause both ways, flush, go on."""
    with make_scheduler(overlap=overlap) as engine:
        handles = submit_shared(engine, 4, new=80)
        engine.run_until(lambda: all(len(handle.output) >= 5 for handle in handles))
        assert engine.retract() >= 1
        engine.run_until(lambda: all(len(handle.output) >= 12 for handle in handles))
        engine.pause("in_place")
        lengths = [len(handle.output) for handle in handles]
        engine.step(5)
        assert [len(handle.output) for handle in handles] == lengths
        assert not engine.flush()
        engine.resume()
        engine.run_until(lambda: all(len(handle.output) >= 20 for handle in handles))
        engine.pause("retract")
        assert engine.num_running() == 0
        assert engine.flush()
        engine.resume()
        engine.run_until_idle()
        assert_outputs(handles)
        assert engine.flush()
        assert engine.allocator.available_size() == 64 * 64


def test_wrong_row_is_noticed() -> None:
    """Goal: the judge bites. Method: overwrite one row of a decoding request between two steps."""
    with make_scheduler() as engine:
        handle = submit_shared(engine, 1, shared=60, own=20)[0]
        engine.run_until(lambda: len(handle.output) >= 2)
        slot = engine.find(handle).kv.req_pool_idx
        row = int(engine.req_to_token_pool.req_to_token[slot, 17])
        engine.pool.kv_buffer[1].view(torch.int16)[row, 0, 3] ^= 1
        with pytest.raises(WrongRowError, match="changed after the launch"):
            engine.step(2)


def test_swapped_rows_are_noticed() -> None:
    """Goal: a right row at a wrong place is wrong. Method: exchange two entries of req_to_token between two steps."""
    with make_scheduler() as engine:
        handle = submit_shared(engine, 1, shared=60, own=20)[0]
        engine.run_until(lambda: len(handle.output) >= 2)
        slot = engine.find(handle).kv.req_pool_idx
        table = engine.req_to_token_pool.req_to_token
        table[slot, [10, 11]] = table[slot, [11, 10]]
        with pytest.raises(WrongRowError, match="wrong at position 10"):
            engine.step(2)
