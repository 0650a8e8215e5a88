"""Servers that share one storage folder: an engine on the CPU with HiCache's file backend.

Called by the tests of the storage tier. The engine's fake model judges every row and every index-K entry that is read, so a
wrong byte from storage ends a test. A test that wants another backend names a class of `backends`. A host-only prefix is promoted
here unless a test switches streaming on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.engine import Engine, Handle
from harness.hisparse import PAGE, engine_for

MODEL = "a-model"


def server(
    folder: Path,
    *,
    overlap: bool = True,
    wait_seconds: float = 20.0,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A context manager for an engine that keeps its pages in `folder`; two of them with equal arguments may share it."""
    keys = {
        "storage_backend": "file",
        "storage_extra_config": {"file_storage_path": str(folder)},
        "storage_wait_seconds": wait_seconds,
        "prefill_scratch_tokens": 0,
        **(config or {}),
    }
    changes.setdefault("served_model_name", MODEL)
    return engine_for(overlap=overlap, config=keys, **changes)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, 1000, num_tokens).tolist()


def submit(engine: Engine, tokens: list[int], new: int = 4, **fields: Any) -> Handle:
    """Queue a request; fields: further ones of SGLang's request, such as extra_key."""
    handle = engine.submit(tokens, new)
    for name, value in fields.items():
        assert hasattr(engine._inbox[-1], name)
        setattr(engine._inbox[-1], name, value)
    return handle


def serve(engine: Engine, prompts: Sequence[list[int]], new: int = 4, **fields: Any) -> list[Handle]:
    """Requests that run to their end, all at once."""
    handles = [submit(engine, tokens, new, **fields) for tokens in prompts]
    run(engine)
    return handles


def run(engine: Engine, seconds: float = 20.0) -> None:
    """Step until nothing is left; storage works on threads of its own, so steps alone are no measure of time."""
    ends = time.monotonic() + seconds
    while not (engine.idle and engine.scheduler.last_batch is None):
        assert time.monotonic() < ends, [handle.rid for handle in engine.handles.values() if not handle.finished]
        engine.step()
    engine.step()


def publish(engine: Engine, seconds: float = 20.0) -> int:
    """Step until every page that can be published is; returns how many have been."""
    ends = time.monotonic() + seconds
    publisher = engine.coordinator.storage.publisher
    while publisher.backlog:
        assert time.monotonic() < ends, f"{publisher.backlog} pages are not published"
        engine.step()
        time.sleep(0.001)
    return counts(engine)["storage_pages_published"]


def counts(engine: Engine) -> dict[str, int]:
    return {name: value for name, value in engine.coordinator.counters().items() if name.startswith("storage_")}


def units(folder: Path) -> list[Path]:
    """Files of pages, oldest first."""
    files = [path for path in folder.iterdir() if path.name.startswith("hisparse-") and "probe" not in path.name]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


def prefilled(engine: Engine) -> int:
    """Tokens whose rows the model has written, decoded ones included."""
    return engine.model.counters.rows_written // engine.config.num_layers


__all__ = ["PAGE", "counts", "prefilled", "prompt", "publish", "run", "serve", "server", "submit", "units"]
