"""Goal: every end and every interruption of a request returns every pool to empty, and the others' tokens are right.

Method: SGLang's scheduler with HiSparse on the CPU, host copies as late as allowed; clients leave at chosen moments,
control messages arrive at bad times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("sglang")

from harness.checks import (
    assert_outputs,
    assert_pools_empty,
    assert_prefix_of_reference,
    assert_residency_sound,
)
from harness.engine import Engine, Handle
from harness.hisparse import PAGE, engine_for, finish, submit

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
Moment = Callable[[Engine, Handle], bool]
# Three of them fill the device; the fourth is admitted when the others can shrink, and then they must.
PROMPTS = [500, 620, 560, 600]
# Pages are copied only when they must leave, so that they are on their way when they do.
LATE_COPIES = {"mirroring": "on_pressure"}


def slot_of(engine: Engine, handle: Handle) -> int | None:
    req = engine.find(handle)
    return None if req is None or not req.kv.holds_kv else req.kv.req_pool_idx


def waits(engine: Engine, handle: Handle) -> bool:
    return engine.num_running() > 0 and any(req.rid == handle.rid for req in engine.scheduler.waiting_queue)


def is_half_prefilled(engine: Engine, handle: Handle) -> bool:
    chunked = engine.scheduler.chunked_req
    return chunked is not None and chunked.rid == handle.rid and slot_of(engine, handle) is not None


def has_just_been_prefilled(engine: Engine, handle: Handle) -> bool:
    batch = engine.scheduler.last_batch
    if batch is None or not batch.forward_mode.is_extend() or is_half_prefilled(engine, handle):
        return False
    return any(req.rid == handle.rid for req in batch.reqs)


def decodes(engine: Engine, handle: Handle) -> bool:
    return len(handle.output) >= 5


def is_being_spilled(engine: Engine, handle: Handle) -> bool:
    """It holds a lease and host-only pages, one of which is still on its way to the host."""
    slot, residency = slot_of(engine, handle), engine.coordinator.residency
    if slot is None or slot not in residency.hot_lease:
        return False
    book = residency.book
    return any(book.is_host_only(page) and book.transfer[page] for page in book.pages(slot).tolist())


def has_just_been_promoted(engine: Engine, handle: Handle) -> bool:
    """Its cached prefix has come back from the host in the step before."""
    return engine.coordinator.residency.counters.pages_promoted > 0 and slot_of(engine, handle) is not None


def run_until_one(engine: Engine, handles: list[Handle], moment: Moment) -> Handle:
    """Step until it is the moment of one of `handles`, and return that one, the latest if there are several."""
    engine.run_until(lambda: any(moment(engine, handle) for handle in handles), max_steps=400)
    return next(handle for handle in reversed(handles) if moment(engine, handle))


@LOOPS
@pytest.mark.parametrize(
    "moment",
    [waits, is_half_prefilled, has_just_been_prefilled, decodes, is_being_spilled],
    ids=lambda moment: moment.__name__,
)
def test_client_abort(moment: Moment, overlap: bool) -> None:
    """Goal: the client may leave in any phase. Method: abort one of four long requests in that phase."""
    with engine_for(overlap=overlap, config=LATE_COPIES) as engine:
        handles = submit(engine, PROMPTS, 50)
        victim = run_until_one(engine, handles, moment)
        engine.abort(victim)
        engine.step(2)
        assert_residency_sound(engine)
        engine.run_until_idle()
        assert victim.finish_reason == "abort"
        assert_outputs([handle for handle in handles if handle is not victim])
        assert_prefix_of_reference([victim])
        finish(engine)


@LOOPS
def test_client_abort_during_promotion(overlap: bool) -> None:
    """Goal: pages on their way back belong to nobody's ghost. Method: a prefix goes to the host, its next turn is aborted."""
    with engine_for(overlap=overlap) as engine:
        first = submit(engine, [900], 20)[0]
        engine.run_until_idle()
        others = submit(engine, [900, 900, 700], 20, seed=5)
        engine.run_until_idle()
        assert engine.coordinator.residency.counters.pages_promoted == 0
        again = engine.submit(list(first.prompt) + first.output, 20)
        engine.run_until(lambda: has_just_been_promoted(engine, again), max_steps=50)
        engine.abort(again)
        engine.run_until_idle()
        assert again.finish_reason == "abort"
        once_more = engine.submit(list(first.prompt) + first.output, 20)
        engine.run_until_idle()
        assert_outputs([first, *others, once_more])
        finish(engine)


def abort_everything(engine: Engine) -> None:
    """Pause mode "abort", as the server does it: no new requests, and an abort of all until none is left."""
    engine.abort_all()
    engine.step(3)


@LOOPS
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("moment", [is_half_prefilled, is_being_spilled], ids=lambda moment: moment.__name__)
def test_pause_and_continue(moment: Moment, mode: str, overlap: bool) -> None:
    """Goal: a pause keeps what it says it keeps. Method: all three modes, during a chunked prefill and during a spill."""
    with engine_for(overlap=overlap, config=LATE_COPIES) as engine:
        handles = submit(engine, PROMPTS, 60)
        run_until_one(engine, handles, moment)
        if mode == "abort":
            abort_everything(engine)
            assert all(handle.finish_reason == "abort" for handle in handles)
            handles = submit(engine, [500, 620], 30, seed=2)
        else:
            engine.pause(mode)
            lengths = [len(handle.output) for handle in handles]
            engine.step(3)
            assert [len(handle.output) for handle in handles] == lengths
            # Kept requests keep their pages, so a flush is refused; retracted ones wait without any.
            assert engine.flush() == (mode == "retract")
            assert_residency_sound(engine)
            if mode == "retract":
                assert_pools_empty(engine)
            engine.resume()
        engine.run_until_idle()
        assert_outputs(handles)
        finish(engine)


@LOOPS
def test_flush_does_not_wait_for_a_second_call(overlap: bool) -> None:
    """Goal: an idle server flushes at once, though host copies are under way. Method: a link that does nothing by itself."""
    with engine_for(overlap=overlap) as engine:
        engine.link._max_batches = 0
        handles = submit(engine, [500, 400], 20)
        engine.run_until(lambda: all(handle.finished for handle in handles))
        engine.run_until(lambda: engine.scheduler.last_batch is None, max_steps=5)
        assert engine.coordinator.worker.in_flight
        assert engine.flush()
        assert_outputs(handles)
        assert_pools_empty(engine)


def spoil_all_rows(engine: Engine) -> None:
    """Nothing that was written so far is worth anything. The last forward is over, so the judge need not look again,
    and the link works again."""
    engine.model._launched_reads.clear()
    engine.link._max_batches = 2
    for layer, rows in enumerate(engine.pool.kv_buffer):
        rows.fill_(1.0)
        engine.coordinator.mem_pool_host.layer_rows(layer).fill_(7)


def send(engine: Engine, message: Any) -> Any:
    """One control message in a step of its own; returns the last reply."""
    engine._inbox.append(message)
    engine.step()
    return engine.control_outputs[-1]


@LOOPS
@pytest.mark.parametrize("paused", [False, True], ids=["idle", "paused"])
def test_memory_release_and_resume(paused: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: KV memory is given up only when no copy reads it. Method: release while copies lag; resume; go on right."""
    import torch
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

    monkeypatch.setattr(torch, "get_device_module", lambda *args: torch.cpu)
    with engine_for(overlap=overlap) as engine:
        engine.link._max_batches = 0
        copies_at_release = []
        updater = engine.scheduler.weight_updater
        pause = updater.memory_saver_adapter.pause
        monkeypatch.setattr(
            updater.memory_saver_adapter,
            "pause",
            lambda tag: (copies_at_release.append(engine.coordinator.worker.in_flight), pause(tag))[1],
            raising=False,
        )
        handles = submit(engine, PROMPTS, 30)
        if paused:
            run_until_one(engine, handles, is_being_spilled)
            engine.pause("retract")
        else:
            engine.run_until(lambda: all(handle.finished for handle in handles))
            engine.run_until(lambda: engine.scheduler.last_batch is None, max_steps=5)
        assert engine.coordinator.worker.in_flight, "there is nothing to wait for"
        send(engine, ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
        assert copies_at_release == [False]
        assert_pools_empty(engine)
        spoil_all_rows(engine)
        send(engine, ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
        if paused:
            engine.resume()
        else:
            handles += submit(engine, [600, 500], 20, seed=3)
        engine.run_until_idle()
        assert_outputs(handles)
        finish(engine)


@LOOPS
def test_weight_update(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: nothing that old weights wrote is used after an update. Method: pause, update with flush, spoil all rows, go on."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    with engine_for(overlap=overlap) as engine:
        engine.link._max_batches = 0
        handles = submit(engine, PROMPTS, 40)
        run_until_one(engine, handles, is_being_spilled)
        engine.pause("retract")
        monkeypatch.setattr(
            type(engine.runner.weight_updater), "update_weights_from_disk", lambda *args, **kwargs: (True, "")
        )
        reply = send(engine, UpdateWeightFromDiskReqInput(model_path="new", flush_cache=True))
        assert reply.success, reply.message
        assert_pools_empty(engine)
        spoil_all_rows(engine)
        engine.resume()
        engine.run_until_idle()
        assert_outputs(handles)
        finish(engine)


@LOOPS
@pytest.mark.parametrize("mode", ["hybrid", "always_host"])
def test_retraction_recomputes_at_most_a_page(mode: str, overlap: bool) -> None:
    """Goal: re-admission is a prefix hit, generated tokens too. Method: rows written with and without a forced retraction."""
    written = []
    for retractions in (0, 1):
        with engine_for(mode=mode, overlap=overlap) as engine:
            handles = submit(engine, [500, 620, 300], 70)
            engine.run_until(lambda handles=handles: min(len(handle.output) for handle in handles) >= 30)
            retracted = engine.retract() if retractions else 0
            assert_residency_sound(engine)
            engine.run_until_idle()
            assert_outputs(handles)
            assert retracted >= retractions
            layers = engine.model.num_layers
            written.append((engine.model.counters.rows_written / layers, retracted))
            finish(engine)
    (without, _), (with_retraction, retracted) = written
    assert 0 < with_retraction - without <= retracted * (PAGE + 2)
