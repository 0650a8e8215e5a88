"""One rank of two: its engine, and the file in which it writes down what it has decided. Used by tensor_parallel.py."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

RANKS = 2
PAGE = 64
CONFIG = {"top_k": 128, "device_buffer_size": 256, "host_to_device_ratio": 4}


def decisions(engine: Any) -> dict[str, Any]:
    """What must be equal on all ranks after a step. Page states are left out: CLEAN says that a rank has seen a copy end."""
    from sglang_hisparse.residency import PageState
    from sglang_hisparse.stats import residency_counts

    runtime, scheduler = engine.coordinator, engine.scheduler
    book = runtime.residency.book
    tables = (engine.allocator.page_table.numpy(), runtime.hot.hot_pages.numpy(), book.device_page, book.users)
    on_host = book.state == int(PageState.HOST)
    border = None if runtime.border is None else runtime.border.border
    figures = None if runtime.gate is None else list(vars_of(runtime.gate.figures))
    return {
        "waiting": [req.rid for req in scheduler.waiting_queue],
        "running": [req.rid for req in scheduler.running_batch.reqs],
        "tokens": {rid: len(handle.output) for rid, handle in engine.handles.items()},
        "ended": {rid: handle.finish_reason for rid, handle in engine.handles.items()},
        "tables": [hashlib.sha1(table.tobytes()).hexdigest()[:12] for table in (*tables, on_host)],
        "counts": residency_counts(runtime),
        "cached": int(engine.tree.evictable_size()),
        "border": None if border is None else [border.begun, border.ended, border.num_returns, border.returns.are_rare, book.fill_limit],
        "figures": figures,
        "misses": book.misses.tolist(),
    }


def vars_of(figures: Any) -> Iterator[float]:
    """The figures by which all ranks admit."""
    return (getattr(figures, name) for name in type(figures).__slots__)


class Trace:
    """A file with one line of decisions a step; `told` of the last line says how the life ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")

    def step(self, engine: Any, count: int = 1) -> None:
        for _ in range(count):
            engine.step()
            self.write(decisions(engine))

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


@contextlib.contextmanager
def engine_of(rank: int, port: int, config: dict[str, Any], **changes: Any) -> Iterator[Any]:
    """This rank's engine; blocks until the other rank builds its own."""
    import sglang.srt.runtime_context as context
    from harness.engine import make_scheduler
    from sglang.srt.distributed.device_communicators import pynccl

    changes.setdefault("index_topk_freq", 2)
    real = context.SpawnRanks
    with (
        mock.patch.object(context, "SpawnRanks", lambda **kwargs: real(**{**kwargs, "world_rank": rank})),
        mock.patch.object(pynccl, "PyNcclCommunicator", lambda **kwargs: SimpleNamespace(disabled=True)),
        mock.patch.dict(os.environ, {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * RANKS)}),
        make_scheduler(
            {**CONFIG, **config},
            tp_size=RANKS,
            nccl_port=port,
            disable_custom_all_reduce=True,
            overlap=True,
            link_seed=5 + 7 * rank,
            **changes,
        ) as engine,
    ):
        yield engine
