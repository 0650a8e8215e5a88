"""The bytes of logical pages: their KV rows in the host tier, their index-K on the device.

Owns the staging memory and streams of the storage threads, and the lock under which they touch host rows. The scheduler's
thread calls `pull_index` and `launched`, which wait for nothing; the storage threads call the rest and may wait. After `close`
no thread touches the host tier again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hisparse.kernels.page_copy import Direction, copy_pages
from sglang_hisparse.memory.host_memory import HostMemory
from sglang_hisparse.memory.host_tier import HostTier

_POLL_SECONDS = 0.0002


@dataclass(frozen=True, slots=True)
class Moment:
    """A point on a stream. event: None where everything is done at once (no GPU)."""

    event: Any

    @property
    def has_passed(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self, gives_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait, off the scheduler's thread, until the GPU has passed it. False: `gives_up` said so first."""
        # Queried, not synchronised: the scheduler's thread may have torch watch for synchronising calls.
        while not self.has_passed:
            if gives_up():
                return False
            time.sleep(_POLL_SECONDS)
        return True


class _IndexStaging:
    """Page-locked index-K of `slots` pages: uint8 [leaders, slots, page bytes]."""

    def __init__(self, leaders: int, slots: int, page_bytes: int, device: torch.device) -> None:
        self._memory = HostMemory.allocate(leaders * slots * page_bytes, device=device, pin=device.type == "cuda")
        assert self._memory.tensor is not None
        self.pages = self._memory.tensor.view(leaders, slots, page_bytes)
        step = slots * page_bytes
        first = self._memory.address
        self.bases = torch.tensor([first + leader * step for leader in range(leaders)], dtype=torch.int64).to(device)

    def release(self) -> None:
        self.pages = None
        self._memory.release()


class PageBytes:
    """Reads and writes whole logical pages.

    index_buffers: index-K of each layer that owns an indexer, uint8 [logical pages + 1 or more, page bytes]. batch: pages of one
    `pull_index`. forward_stream: the stream of the forwards, asked for at each use.
    """

    def __init__(
        self, host: HostTier, index_buffers: Sequence[torch.Tensor], *, batch: int, forward_stream: Callable[[], Any]
    ) -> None:
        self.guard = threading.Lock()
        self.closed = False
        self._host = host
        self._index = list(index_buffers)
        self._forward_stream = forward_stream
        self.device = self._index[0].device
        self.page_size = host.page_size
        self.index_page_bytes = self._index[0].shape[1]
        self.kv_bytes = host.layer_num * host.page_bytes
        self.index_bytes = len(self._index) * self.index_page_bytes
        self._kv = host.kv_buffer.view(torch.uint8).view(host.layer_num, -1, host.page_bytes)
        self._on_gpu = self.device.type == "cuda"
        self._device_bases = torch.tensor([buffer.data_ptr() for buffer in self._index], dtype=torch.int64).to(
            self.device
        )
        self._down = _IndexStaging(len(self._index), batch, self.index_page_bytes, self.device)
        self._up = _IndexStaging(len(self._index), 1, self.index_page_bytes, self.device)
        self._down_stream = torch.cuda.Stream(device=self.device) if self._on_gpu else None
        self._up_stream = torch.cuda.Stream(device=self.device) if self._on_gpu else None

    # -- on the scheduler's thread ----------------------------------------------------------------------------------

    def launched(self) -> Moment:
        """The last launched forward: whoever waits for it may write rows that it reads."""
        if not self._on_gpu:
            return Moment(None)
        event = torch.cuda.Event()
        event.record(self._forward_stream() or torch.cuda.current_stream(self.device))
        return Moment(event)

    def pull_index(self, pages: Sequence[int]) -> Moment:
        """Copy the index-K of `pages` (at most `batch`) to the staging memory, behind the last launched forward.

        A page that is freed before the copy has run may be overwritten under it: the caller compares generations afterwards.
        """
        if not self._on_gpu:
            for leader, buffer in enumerate(self._index):
                self._down.pages[leader, : len(pages)] = buffer[list(pages)]
            return Moment(None)
        behind = self.launched()
        with torch.cuda.stream(self._down_stream):
            self._down_stream.wait_event(behind.event)
            self._copy(Direction.TO_HOST, self._down, range(len(pages)), pages)
            event = torch.cuda.Event()
            event.record()
        return Moment(event)

    # -- on the storage threads -------------------------------------------------------------------------------------

    def read_kv(self, page: int, target: torch.Tensor) -> None:
        """Host rows of `page`, all layers, into uint8 [kv_bytes]. Under `guard`."""
        target.view(self._kv.shape[0], -1).copy_(self._kv[:, page])

    def pulled_index(self, slot: int, target: torch.Tensor) -> None:
        """What the last `pull_index` put into `slot`, into uint8 [index_bytes]. Under `guard`."""
        target.view(len(self._index), -1).copy_(self._down.pages[:, slot])

    def write(self, page: int, kv: torch.Tensor, index: torch.Tensor) -> None:
        """Put a page's KV (uint8 [kv_bytes]) into its host rows and its index-K (uint8 [index_bytes]) onto the device; both are
        there when this returns. Under `guard`; nobody may read or write the page meanwhile."""
        self._kv[:, page].copy_(kv.view(self._kv.shape[0], -1))
        parts = index.view(len(self._index), -1)
        if not self._on_gpu:
            for leader, buffer in enumerate(self._index):
                buffer[page] = parts[leader]
            return
        self._up.pages[:, 0] = parts
        with torch.cuda.device(self.device), torch.cuda.stream(self._up_stream):
            self._copy(Direction.TO_DEVICE, self._up, (0,), (page,))
            event = torch.cuda.Event()
            event.record()
        Moment(event).wait()

    def _copy(self, direction: Direction, staging: _IndexStaging, slots: Sequence[int], pages: Sequence[int]) -> None:
        numbers = torch.tensor([list(slots), list(pages)], dtype=torch.int32, pin_memory=True)
        host, device = numbers.to(self.device, non_blocking=True)
        copy_pages(
            direction=direction,
            host_bases=staging.bases,
            device_bases=self._device_bases,
            host_pages=host,
            device_pages=device,
            page_bytes=self.index_page_bytes,
        )

    def close(self) -> None:
        """From now on no storage thread touches the host tier; waits for the one that does (one page's copy)."""
        with self.guard:
            self.closed = True
            self._kv = None
        if self._on_gpu:
            self._down_stream.synchronize()
            self._up_stream.synchronize()
        self._down.release()
        self._up.release()
