"""Goal: SIGTERM ends a scheduler through its loop. Method: real signals to this process; SGLang's receiver beside it.

Two ranks in two processes: test_tensor_parallel.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import AbortReq, ShutdownReq
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.runtime_context import get_parallel

from sglang_hisparse import shutdown
from sglang_hisparse.shutdown import obey_sigterm, with_shutdown


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    shutdown._Signal.has_come = False


def placed(**ranks: Any) -> Any:
    """This process at a place in a server; without DP attention unless `ranks` say so."""
    values = {"tp_rank": 0, "attn_tp_rank": 0, "attn_dp_enabled": False, **ranks}
    return get_parallel().override(enable_dp_attention_local_control_broadcast=values.pop("local", False), **values)


def told(monkeypatch: pytest.MonkeyPatch, ranks: int) -> SimpleNamespace:
    """A scheduler in a world of `ranks`, after a SIGTERM to this process."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: ranks > 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
    scheduler = SimpleNamespace(gracefully_exit=False)
    obey_sigterm(scheduler)
    os.kill(os.getpid(), signal.SIGTERM)
    return scheduler


def test_a_single_rank_leaves_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one rank needs no message. Method: the flag of its loop; nothing is added to what it receives."""
    assert told(monkeypatch, ranks=1).gracefully_exit is True
    received: list[Any] = []
    assert with_shutdown(received) is received == []


def test_the_first_of_several_passes_the_signal_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one message behind what has arrived, once. Method: two pulls after the signal."""
    abort = AbortReq(rid="r")
    with placed():
        assert told(monkeypatch, ranks=2).gracefully_exit is False
        first, end = with_shutdown([abort])
        assert first is abort and isinstance(end, ShutdownReq)
        assert with_shutdown([]) == []


@pytest.mark.parametrize(
    ("place", "speaks"),
    [
        ({"tp_rank": 1, "attn_tp_rank": 1}, False),
        ({"tp_rank": 2, "attn_tp_rank": 0, "attn_dp_enabled": True}, False),
        ({"tp_rank": 0, "attn_tp_rank": 0, "attn_dp_enabled": True}, True),
        ({"tp_rank": 2, "attn_tp_rank": 0, "attn_dp_enabled": True, "local": True}, True),
        ({"tp_rank": 3, "attn_tp_rank": 1, "attn_dp_enabled": True, "local": True}, False),
    ],
)
def test_who_speaks_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: dict[str, Any], speaks: bool
) -> None:
    """Goal: the rank whose control messages SGLang broadcasts, and no other. Method: places in a server; the log line."""
    with placed(**place):
        scheduler = told(monkeypatch, ranks=4)
        received = with_shutdown([] if place["attn_tp_rank"] == 0 else None)
        assert bool(received) is speaks and scheduler.gracefully_exit is False
        assert ("ends with the others" in caplog.text) is not speaks


def test_the_message_goes_to_all_attention_groups() -> None:
    """Goal: with DP attention it is broadcast to all ranks. Method: how SGLang splits what is received."""
    work, control = SchedulerRequestReceiver._split_work_and_control_reqs(None, [ShutdownReq()])
    assert work == [] and len(control) == 1


def test_other_threads_leave_signals_alone() -> None:
    """Goal: an engine in a thread starts all the same. Method: Python allows handlers in the main thread only."""
    before = signal.getsignal(signal.SIGTERM)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            obey_sigterm(SimpleNamespace())
        except BaseException as error:  # noqa: BLE001 - the test reads it
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures and signal.getsignal(signal.SIGTERM) is before


def test_a_part_that_fails_keeps_no_memory_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: host memory is released whatever goes wrong before. Method: copies cannot be waited for, statistics not written."""
    from runtime_world import make_world

    def fail() -> None:
        raise OSError("no space left")

    closed: list[str] = []
    with make_world() as world:
        runtime = world.runtime
        monkeypatch.setattr(runtime, "stats", SimpleNamespace(close=fail))
        monkeypatch.setattr(runtime, "recorder", SimpleNamespace(close=lambda: closed.append("recorder")))
        monkeypatch.setattr(runtime.worker, "drain", fail)
        with pytest.raises(OSError, match="no space left"):
            runtime.destroy()
        assert runtime.mem_pool_host.kv_buffer is None and closed == ["recorder"]
        monkeypatch.undo()
