"""Engines with HiSparse whose device pool is far too small, and what is done with them at the end.

Called by the tests of life cycle, pressure and faults, and by the soak. A test states its sizes here and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from sglang_hisparse import elastic_layout
from sglang_hisparse.faults import FaultPlan
from sglang_hisparse.memory import pool
from sglang_hisparse.memory.virtual_memory import HostTwin

from .checks import assert_no_request_left, assert_pools_empty, used_host_tier
from .engine import Engine, Handle, make_scheduler

PAGE = 64
CHUNK_BYTES = 1 << 14


@contextlib.contextmanager
def small_chunks(chunk_bytes: int = CHUNK_BYTES) -> Iterator[None]:
    """Chunks of 16 KiB, if nothing else is given, for engines with a moving border: rows of the harness's model are small too. The plan of a server is made for
    chunks of 2 MiB, so here it is that of a fixed border, whose ratio is the pool's."""
    with (
        mock.patch.object(pool, "memory_of", lambda device: HostTwin(chunk_bytes)),
        mock.patch.object(elastic_layout, "elastic_plan", lambda plan, cap: plan),
    ):
        yield


def engine_for(
    *,
    mode: str = "hybrid",
    overlap: bool = True,
    radix: bool = True,
    device_pages: int = 32,
    ratio: float = 4,
    hot_pages: int = 4,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A context manager: two layers per index group, a lagging link, a fixed border. config: further keys of
    --hisparse-config."""
    values = {
        "top_k": 128,
        "device_buffer_size": hot_pages * PAGE,
        "host_to_device_ratio": ratio,
        "residency": mode,
        "elastic_border": False,
        **(config or {}),
    }
    changes.setdefault("link_seed", 1)
    changes.setdefault("index_topk_freq", 2)
    return make_scheduler(values, device_tokens=device_pages * PAGE, overlap=overlap, radix=radix, **changes)


def submit(engine: Engine, lengths: list[int], new: int, *, shared: int = 0, seed: int = 0) -> list[Handle]:
    """Requests of the given prompt lengths, the first `shared` tokens of which are the same."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(10, 1000, shared).tolist()
    return [engine.submit(prefix + rng.integers(10, 1000, length - shared).tolist(), new) for length in lengths]


def finish(engine: Engine) -> None:
    """Run to the end, then look for anything left behind, and flush."""
    engine.run_until_idle()
    used_host_tier(engine)
    assert_no_request_left(engine)
    assert engine.flush()
    assert_pools_empty(engine)


def plant(engine: Engine, text: str) -> Any:
    """Let faults happen, in the grammar of SGLANG_HISPARSE_FAULT; returns the seam, None for no fault."""
    engine.coordinator.plant(FaultPlan.parse(text))
    return engine.coordinator.faults
