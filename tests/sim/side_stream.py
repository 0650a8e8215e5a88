"""Streamed extends on the simulator's GPU: a side stream and a scratch of two layers, in which every row knows its layer.

Part of GpuModel. It knows the plan of an extend and nothing of the coordinator; the memories have one layer's content, so what
could be read of a wrong layer is told apart by the layer that the scratch remembers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sglang_hisparse.residency.types import StreamPlan

STREAM_LAYERS = 4


@dataclass(slots=True, eq=False)
class StreamedExtend:
    """One extend: where its pages are, and the layer whose host pages have arrived last."""

    plan: StreamPlan
    fetched: int = -1


@dataclass(slots=True)
class SideStream:
    """`fetches`: (forward operations that must have run, extend, layer), in order. `scratch[half]`: logical page -> (extend,
    layer, rows)."""

    fetches: deque[tuple[int, StreamedExtend, int]] = field(default_factory=deque)
    scratch: tuple[dict[int, Any], dict[int, Any]] = field(default_factory=lambda: ({}, {}))

    def step(self, gpu: Any) -> bool:
        """Copy the host pages of one layer, if what it must come behind has run."""
        if not self.fetches or self.fetches[0][0] > gpu.num_done:
            return False
        _, extend, layer = self.fetches.popleft()
        size = gpu.page_size
        for page in extend.plan.host_pages.tolist():
            self.put(extend, layer, page, gpu.host[page * size : (page + 1) * size])
        extend.fetched = layer
        return True

    def stage(self, gpu: Any, extend: StreamedExtend, layer: int) -> bool:
        """The forward's share: wait for the host pages, copy the resident ones."""
        if extend.fetched < layer:
            return False
        size, plan = gpu.page_size, extend.plan
        for page, device_page in zip(plan.resident_pages.tolist(), plan.device_pages.tolist(), strict=True):
            gpu._touch(device_page)
            self.put(extend, layer, page, gpu.device[device_page * size : (device_page + 1) * size])
        return True

    def put(self, extend: StreamedExtend, layer: int, page: int, rows: list[int]) -> None:
        self.scratch[layer % 2][page] = (extend, layer, list(rows))

    def find(self, extend: StreamedExtend, layer: int, page: int) -> list[int] | None:
        """The page's rows of that layer, None where the scratch holds another layer's or none."""
        entry = self.scratch[layer % 2].get(page)
        return entry[2] if entry is not None and entry[0] is extend and entry[1] == layer else None
