"""Copies to the host by the GPU's copy engine, in runs of pages that lie side by side on both sides: an experiment, off by default.

The copy kernel holds multiprocessors while it runs: 8 blocks of 512 threads and 64 registers, half of an SM's registers each, so that no
block of a large GEMM or of the indexer fits beside one, and a forward whose kernels give every SM its share waits for those eight.
The copy engine takes none. Each run and layer is one call of the driver on the scheduler's thread; pages that lie so scattered that
there would be too many calls are left to the kernel. `SGLANG_HISPARSE_MIRROR_ENGINE=1` switches it on.
"""

from __future__ import annotations

import ctypes
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sglang_hisparse.memory.host_memory import chunk_ranges

if TYPE_CHECKING:
    from sglang_hisparse.memory.host_tier import HostTier
    from sglang_hisparse.memory.pool import HiSparsePool

logger = logging.getLogger(__name__)

ENGINE_VARIABLE = "SGLANG_HISPARSE_MIRROR_ENGINE"
MOST_CALLS = 512  #: of one mirror; a call costs the scheduler's thread 2 to 4 us

#: (host address, device address, bytes, stream); 0 or an error's number
Copy = Callable[[int, int, int, int], int]


def runs_of(host_pages: Sequence[int], device_pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first host page, first device page, pages) of each run: pages that ascend by one on both sides."""
    runs: list[tuple[int, int, int]] = []
    for host, device in sorted(zip(host_pages, device_pages, strict=True)):
        if runs:
            first, target, count = runs[-1]
            if host == first + count and device == target + count:
                runs[-1] = first, target, count + 1
                continue
        runs.append((host, device, 1))
    return runs


def driver_copy() -> Copy:
    """The driver's copy to the host. Raises OSError where there is no driver."""
    call = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoHAsync_v2
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p], ctypes.c_int
    return call


class CopyEngine:
    """host_bases, device_bases: addresses of page 0 of every layer. borders: offsets into host memory, ascending, across which no
    copy may go (it is registered in pieces); it begins at host_bases[0]."""

    def __init__(
        self, host_bases: Sequence[int], device_bases: Sequence[int], page_bytes: int, borders: Sequence[int], copy: Copy
    ) -> None:
        self._bases = list(zip(host_bases, device_bases, strict=True))
        self._page_bytes, self._copy = page_bytes, copy
        self._borders = [host_bases[0] + border for border in borders]
        self._is_refused = False

    @classmethod
    def from_env(cls, host: HostTier, pool: HiSparsePool) -> CopyEngine | None:
        """None where the variable is not set, or nothing runs on a GPU."""
        if os.environ.get(ENGINE_VARIABLE) != "1" or torch.device(pool.device).type != "cuda":
            return None
        borders = [offset for offset, _ in chunk_ranges(host.num_bytes, granularity=host.page_bytes)]
        return cls(host.layer_bases().tolist(), pool.device_bases().tolist(), host.page_bytes, borders, driver_copy())

    def to_host(self, host_pages: Sequence[int], device_pages: Sequence[int], stream: int) -> bool:
        """Enqueue all layers of these pages. False: the kernel must copy them, since they lie too scattered, or the driver has
        refused a copy, now or before; what was enqueued until then is copied twice, and alike."""
        if self._is_refused:
            return False
        runs = runs_of(host_pages, device_pages)
        if len(runs) * len(self._bases) > MOST_CALLS:
            return False
        size = self._page_bytes
        for host_base, device_base in self._bases:
            for first, source, count in runs:
                if not self._copy_run(host_base + first * size, device_base + source * size, count * size, stream):
                    return False
        return True

    def _copy_run(self, host: int, device: int, num_bytes: int, stream: int) -> bool:
        while num_bytes:
            place = bisect_right(self._borders, host)
            part = min(num_bytes, self._borders[place] - host) if place < len(self._borders) else num_bytes
            if error := self._copy(host, device, part, stream):
                self._is_refused = True
                logger.error(
                    "HiSparse: the driver refuses a copy of %d bytes to the host (CUresult %d); a kernel copies from now on", part, error
                )
                return False
            host, device, num_bytes = host + part, device + part, num_bytes - part
        return True
