"""Two ranks of one server as two processes: SGLang's real Scheduler with --tp-size 2 over gloo, on the CPU.

`test_tensor_parallel` starts this file as a program; it forks the ranks of each life, which write their decisions step by step.
Every rank has a copy link of its own speed, and in some lives faults of its own. Beside what harness/bootstrap.py bypasses, no
NCCL communicator is made. It judges nothing but the rows that the fake model reads: comparing the ranks is for the test.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import zmq
from two_ranks import PAGE, RANKS, Trace, engine_of

CHURN, DRAIN = 140, 140  # steps with new events, and without


def churn(engine: Any, trace: Trace, *, seed: int, longest: int, steps: int = CHURN) -> None:
    """Submit, abort, retract, pause and flush by the seed; then run on without events."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(10, 1000, int(rng.integers(PAGE, longest // 2))).tolist() for _ in range(3)]
    for _ in range(steps):
        event, live = rng.random(), [handle for handle in engine.handles.values() if not handle.finished]
        if event < 0.25 and len(live) < 10:
            own = rng.integers(10, 1000, int(rng.integers(1, longest // 2))).tolist()
            engine.submit(prefixes[int(rng.integers(3))] + own, int(rng.integers(1, 90)))
        elif event < 0.28 and live:
            engine.abort(live[int(rng.integers(len(live)))])
        elif event < 0.30:
            engine.retract()
        elif event < 0.31:
            engine.pause("retract")
            engine.flush()
            engine.resume()
        trace.step(engine)
    trace.step(engine, DRAIN)


# -- lives --------------------------------------------------------------------------------------------------------------


def links_of_two_speeds(rank: int, port: int, trace: Trace) -> None:
    """Nothing differs but when copies are done and observed."""
    with engine_of(rank, port, {}, device_tokens=24 * PAGE) as engine:
        assert engine.coordinator.worker.must_succeed
        engine.link._max_batches = 1 + 2 * rank
        churn(engine, trace, seed=11, longest=1000)


def a_link_that_fails_on_each_rank(rank: int, port: int, trace: Trace) -> None:
    """Copies fail, are late and come out of order, on each rank others (R30)."""
    with engine_of(rank, port, {}, device_tokens=24 * PAGE) as engine:
        _plant_own_faults(engine, rank)
        churn(engine, trace, seed=12, longest=1000)
        trace.write({"told": engine.coordinator.faults.fired})


def failures_given_back(rank: int, port: int, trace: Trace) -> None:
    """The same, with what a single rank does: a failed copy is given back. It must be seen to part the ranks."""
    with engine_of(rank, port, {}, device_tokens=24 * PAGE) as engine:
        _plant_own_faults(engine, rank)
        engine.coordinator.worker.must_succeed = False
        churn(engine, trace, seed=12, longest=1000)


def _plant_own_faults(engine: Any, rank: int) -> None:
    from sglang_hisparse.faults import FaultPlan

    engine.coordinator.plant(FaultPlan.parse(f"copy_fail:0.2,copy_delay:4,copy_reorder:0.5,seed:{rank + 1}"))


def a_gate_measured_on_one_rank(rank: int, port: int, trace: Trace, *, shared: bool = True) -> None:
    """Admission by measured times: a slow link, a clock of its own on each rank, read on the first rank alone. Each rank's
    resolver claims other counts besides.

    shared False: each rank measures for itself, which must be seen to part the ranks.
    """
    from sglang_hisparse import admission_view
    from sglang_hisparse.admission import AdmissionGate, StepModel
    from sglang_hisparse.admission_view import HotLink, misses_of, pool_of, share_of
    from sglang_hisparse.ranks import is_first

    with engine_of(rank, port, {}, device_tokens=24 * PAGE) as engine:
        runtime = engine.coordinator
        group = runtime.tp_group
        random, now = np.random.default_rng(rank), [0.0]

        def clock() -> float:
            assert is_first(group) or not shared, "a second rank looks at its clock"
            now[0] += float(random.uniform(0.0005, 0.02 * (1 + 20 * rank)))
            return now[0]

        model = StepModel(HotLink(runtime, 2e7, SimpleNamespace(begin=lambda: None, bytes_per_second=lambda: 2e7))) if is_first(group) or not shared else None
        share = share_of(group) if shared else lambda figures: figures
        if not shared:
            admission_view.is_first, admission_view.share_of = lambda _: True, lambda *_: share
        _count_by_rank(runtime, rank)
        misses = misses_of(runtime)
        runtime.gate = AdmissionGate(
            lambda: pool_of(runtime.residency), model, share, clock, lambda pool: misses.end_round(pool.host_pages > 0)
        )
        churn(engine, trace, seed=13, longest=1400)
        # Long enough for the two rounds that a request's misses take, and too large for the device together.
        rng = np.random.default_rng(17)
        for _ in range(3):
            engine.submit(rng.integers(10, 1000, 10 * PAGE).tolist(), 140)
        trace.step(engine, 150)


def _count_by_rank(runtime: Any, rank: int) -> None:
    """Counts as they arrive, but more of them for some slots than for others: the first slots here, the last ones there."""
    latest = runtime.hot.latest_counts

    def counted() -> Any:
        counts = latest()
        factors = np.arange(1, counts.by_slot.shape[0] + 1)[:: 1 - 2 * rank]
        return dataclasses.replace(counts, by_slot=counts.by_slot * factors[:, None])

    runtime.hot.latest_counts = counted


def a_gate_on_each_rank(rank: int, port: int, trace: Trace) -> None:
    """See `a_gate_measured_on_one_rank`."""
    a_gate_measured_on_one_rank(rank, port, trace, shared=False)


def a_border_seen_at_two_speeds(rank: int, port: int, trace: Trace, *, agreed: bool = True) -> None:
    """Memory moves from KV to index-K; each rank sees its forward stream pass at another time.

    agreed False: each rank goes on by what it has seen itself, which must be seen to part the ranks.
    """
    from harness.hisparse import small_chunks

    with (
        small_chunks(),
        engine_of(rank, port, {"elastic_border": True}, device_tokens=32 * PAGE, num_layers=8, index_topk_freq=8) as engine,
    ):
        border, seen = engine.coordinator.border, np.random.default_rng(rank)
        border.memory.has_vacated = lambda: seen.random() < (0.9, 0.2)[rank]
        if not agreed:
            border.bind_agreement(lambda value: value)
        churn(engine, trace, seed=17, longest=1000)
        told, border.border.calm_looks, places = border.counters(), 10, []
        if agreed:
            for _ in range(500):
                if engine.idle:
                    break
                trace.step(engine)
            engine.coordinator.settle()
            assert engine.flush()
            for _ in range(150):
                engine.step()
                pages = engine.coordinator.residency
                places.append((border.border.begun, pages.device_pages.num_free, pages.book.num_free))
        trace.write({"told": told, "places": places, "returns": border.border.num_returns})


def a_border_seen_by_each_rank_alone(rank: int, port: int, trace: Trace) -> None:
    """See `a_border_seen_at_two_speeds`."""
    a_border_seen_at_two_speeds(rank, port, trace, agreed=False)


def prompts_that_do_not_return(rank: int, port: int, trace: Trace) -> None:
    """Prompts that are sent once, then conversations, then prompts again; each rank's copies are done, and its forward stream passes, at
    another time."""
    from harness.hisparse import small_chunks

    sizes = {"device_tokens": 60 * PAGE, "num_layers": 8, "index_topk_freq": 8, "max_running_requests": 4}
    with small_chunks(), engine_of(rank, port, {"elastic_border": True, "device_buffer_size": 128}, **sizes) as engine:
        border, seen = engine.coordinator.border, np.random.default_rng(rank)
        border.memory.has_vacated = lambda: seen.random() < (0.9, 0.2)[rank]
        border.border.watch_looks, border.border.give_up_pages, engine.link._max_batches = 40, 8, 1 + 2 * rank
        rng, histories, most = np.random.default_rng(19), [[] for _ in range(14)], 0
        for phase in range(6):
            turns = [[*history, *rng.integers(10, 1000, 20 if history else 640).tolist()] for history in histories]
            prompts = turns if phase in (2, 3) else [rng.integers(10, 1000, 640).tolist() for _ in range(24)]
            handles = []
            while prompts or not all(handle.finished for handle in handles):
                while prompts and sum(not handle.finished for handle in handles) < 5:
                    handles.append(engine.submit(prompts.pop(0), 10))
                trace.step(engine)
                most = max(most, border.border.ended)
            if phase in (2, 3):
                histories = [[*handle.prompt, *handle.output] for handle in handles]
        trace.write({"told": border.counters() | {"most_steps": most}})


def turns_in_windows(rank: int, port: int, trace: Trace) -> None:
    """Next turns that come together read more of the host than the scratch holds; one prefix is on the device, and the ledger cannot
    keep it there. Copies are done at two speeds."""
    settings = {"prefill_scratch_tokens": 20 * PAGE, "stream_extend_tokens": 128, "union_extend_tokens": 0, "promote_mib_per_step": 0}
    with engine_of(rank, port, settings, device_tokens=40 * PAGE) as engine:
        engine.link._max_batches = 1 + 2 * rank
        rng = np.random.default_rng(18)
        for _ in range(3):
            histories = [engine.submit(rng.integers(10, 1000, 900 + 10 * number).tolist(), 12) for number in range(4)]
            trace.step(engine, 150)
            assert engine.coordinator.make_room(40)
            histories.append(engine.submit(rng.integers(10, 1000, 12 * PAGE - 20).tolist(), 12))
            trace.step(engine, 60)
            turns = [engine.submit([*one.prompt, *one.output, 11, 12, 13], 25) for one in histories]
            trace.step(engine, 150)
            assert all(turn.output == turn.history.output(25) for turn in turns)
        counts = engine.coordinator.counters()
        trace.write({"told": [counts[f"streamed_{name}"] for name in ("extends", "windows")]})


def storage_of_two_speeds(rank: int, port: int, trace: Trace) -> None:
    """The first rank publishes; after a flush both load, the second slowly, and start with the same prefix."""
    folder = Path(os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"])
    settings = {"storage_backend": "file", "storage_wait_seconds": 20}
    # The harness gives each process a checkpoint folder of its own, and a page belongs to a model by name.
    with engine_of(rank, port, settings, device_tokens=48 * PAGE, served_model_name="two-ranks") as engine:
        storage, store = engine.coordinator.storage, engine.coordinator.storage.loader._store
        assert (storage.publisher is not None) == (rank == 0)
        rng = np.random.default_rng(14)
        prompts = [rng.integers(10, 1000, 9 * PAGE + 7).tolist() for _ in range(3)]
        for prompt in prompts:
            engine.submit(prompt, 5)
        trace.step(engine, 60)
        _step_until(engine, group=engine.coordinator.tp_group, holds=lambda: rank or not storage.publisher.backlog)
        assert len(list(folder.iterdir())) >= 27
        assert engine.flush()
        store.get = _slowed(store.get, 0.02 * rank)
        handles = [engine.submit(prompt, 5) for prompt in prompts]
        _step_until(engine, engine.coordinator.tp_group, lambda: all(handle.finished for handle in handles))
        assert all(handle.output == handle.history.output(5) for handle in handles)
        trace.step(engine)
        trace.write({"told": {"cached": [handle.cached_tokens for handle in handles], **storage.counters()}})


def _slowed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return call(*args)

    return slow


def _step_until(engine: Any, group: Any, holds: Callable[[], bool], most: int = 4000) -> None:
    """Step both ranks alike until it holds on both: threads work beside the scheduler here, and take their time."""
    import torch

    for _ in range(most):
        value = torch.tensor(int(bool(holds())))
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN, group=group)
        if value.item():
            return
        engine.step()
        time.sleep(0.002)
    raise AssertionError("it never held")


def questions_while_copies_run(rank: int, port: int, trace: Trace) -> None:
    """A flush that may wait, and health checks, asked for while each rank's copies are at another point."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    with engine_of(rank, port, {}, device_tokens=48 * PAGE) as engine:
        prefix = np.random.default_rng(15).integers(10, 1000, 6 * PAGE).tolist()
        for number in range(24):
            engine.submit([*prefix, 10 + number], 3)
            for _ in range(7):
                trace.step(engine)
                idle = engine.scheduler.is_fully_idle
                trace.write({"told": [idle(for_health_check=True), idle(), len(engine.control_outputs)]})
            if number % 2:
                engine._inbox.append(FlushCacheReqInput(timeout_s=30.0))


def told_to_end(rank: int, port: int, trace: Trace, *, alone: bool = False) -> None:
    """SGLang's own process function and request receiver; SIGTERM to the second rank, and later to the first.

    alone True: each rank obeys its own signal, which must be seen to end one of them by a failure.
    """
    settings = {"storage_backend": "file", "record_file": str(trace.path.with_suffix(".recording"))}
    with engine_of(rank, port, settings, device_tokens=48 * PAGE, served_model_name="told-to-end") as engine:
        storage, scheduler = engine.coordinator.storage, engine.scheduler
        storage.loader._store.put = _slowed(storage.loader._store.put, 0.1)
        rng = np.random.default_rng(16)
        for _ in range(3):
            engine.submit(rng.integers(10, 1000, 9 * PAGE + 7).tolist(), 600)
        if alone:
            signal.signal(signal.SIGTERM, lambda *_: setattr(scheduler, "gracefully_exit", True))
        told = _run_as_a_process(engine, signal_at=30 if rank else 60)
        trace.write({"told": {**told, **storage.counters()}})
        engine._stack.pop_all()  # its process groups are gone


def each_told_to_end_alone(rank: int, port: int, trace: Trace) -> None:
    """See `told_to_end`."""
    told_to_end(rank, port, trace, alone=True)


def told_to_end_with_dp_attention(rank: int, port: int, trace: Trace) -> None:
    """`told_to_end` on an idle server whose ranks have an attention each: SGLang broadcasts control messages alone to both."""
    flags = {"dp_size": RANKS, "enable_dp_attention": True}
    with (
        mock.patch("sglang.srt.server_args.wait_port_available", lambda *args, **kwargs: None),  # the other rank has it
        engine_of(rank, port, {}, device_tokens=48 * PAGE, **flags) as engine,
    ):
        trace.write({"told": _run_as_a_process(engine, signal_at=30 if rank else 60)})
        engine._stack.pop_all()  # its process groups are gone


def _run_as_a_process(engine: Any, signal_at: int) -> dict[str, Any]:
    """SGLang's `run_scheduler_process` on the engine's scheduler, which gets SIGTERM in this iteration of its loop."""
    import torch
    from sglang.srt.managers import scheduler as module
    from sglang.srt.managers.scheduler_components import request_receiver

    scheduler, runtime = engine.scheduler, engine.coordinator
    told: dict[str, Any] = {"iterations": 0, "failed": "", "backlog": 0}
    parent = SimpleNamespace(send_signal=lambda number: told.update(failed=f"signal {number} to the launcher"))
    inbox, engine._inbox = engine._inbox, []

    def receive(channel: Any, flags: int) -> Any:
        if not inbox:
            raise zmq.Again
        return inbox.pop(0)

    ingest = scheduler.ingest_requests

    def counted(*args: Any, **kwargs: Any) -> Any:
        told["iterations"] += 1
        if told["iterations"] == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return ingest(*args, **kwargs)

    def begin() -> None:
        module.dispatch_event_loop(scheduler)
        publisher = runtime.storage and runtime.storage.publisher
        told["backlog"] = publisher.backlog if publisher else 0

    scheduler.init_request_receiver()
    scheduler.gracefully_exit = False
    scheduler.ingest_requests, scheduler.run_event_loop = counted, begin
    scheduler.get_init_info = dict
    with (
        mock.patch.object(module, "Scheduler", lambda *args: scheduler),
        mock.patch.object(module, "publish", lambda *args, **kwargs: None),
        mock.patch.object(module, "configure_scheduler_process", lambda *args, **kwargs: None),
        mock.patch.object(module.psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent)),
        mock.patch.object(request_receiver, "sock_recv", receive),
    ):
        writer = SimpleNamespace(send=lambda info: None)
        module.run_scheduler_process(scheduler.server_args, None, 0, torch.distributed.get_rank(), 0, None, writer)
    return {**told, "released": runtime.mem_pool_host.kv_buffer is None, "forwards": runtime.residency.step}


LIVES: dict[str, Callable[[int, int, Trace], None]] = {
    life.__name__: life
    for life in (
        links_of_two_speeds,
        a_link_that_fails_on_each_rank,
        failures_given_back,
        a_gate_measured_on_one_rank,
        a_gate_on_each_rank,
        a_border_seen_at_two_speeds,
        a_border_seen_by_each_rank_alone,
        prompts_that_do_not_return,
        turns_in_windows,
        storage_of_two_speeds,
        questions_while_copies_run,
        told_to_end,
        told_to_end_with_dp_attention,
        each_told_to_end_alone,
    )
}


def live(name: str, rank: int, port: int, path: Path) -> None:
    """One rank's life, in a process of its own. What goes wrong is the last line of its trace."""
    trace = Trace(path)
    try:
        LIVES[name](rank, port, trace)
    except BaseException:  # noqa: BLE001 - the test reads it
        trace.write({"error": traceback.format_exc()[-3000:]})


def main(folder: Path, names: list[str]) -> None:
    """Fork the ranks of one life after another: what is imported before is imported once."""
    import harness.engine  # noqa: F401
    import sglang.srt.managers.scheduler  # noqa: F401
    from fake_sglang import free_port
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()
    for name in names:
        port, children = free_port(), []
        os.environ["SGLANG_HISPARSE_STATS_FILE"] = str(folder / "stats.json")
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / f"{name}.pages")
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                live(name, rank, port, folder / f"{name}.{rank}")
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(LIVES))
