"""The host tier: every logical token's KV rows in page-locked host memory, host row number == logical id.

Owns the host buffer of one rank. Built by the coordinator from the device pool; the transfer worker and the resolver
read and write rows at the addresses of `layer_bases`. It must never hand out or take back rows: identity belongs to the
logical allocator alone, so there is no allocator here and SGLang's calls for one are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.memory.host_memory import HostMemory

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

_NO_ALLOCATOR = "the host tier has no allocator: a host row is the logical id that the logical allocator handed out"


class HostTier(MLATokenToKVPoolHost):
    """Host rows of one rank, laid out [layer][row][row_bytes]; rows 0..page_size-1 are the pad page.

    SGLang's constructor runs; four of its steps are replaced: `_allocate_host_buffer` and `init_kv_buffer` (our memory,
    no second budget check), `_initialize_transfer_views` (addresses on the CPU, no kernels compiled for HiCache) and
    `clear` (no free list). Everything that SGLang reads is set: size, page_num, page_size, layer_num, dtype,
    kv_cache_dim, token_stride_size, layout_dim, kv_buffer, data_refs, data_ptrs, pin_memory, lock.
    """

    @classmethod
    def create(cls, pool: MLATokenToKVPool, logical_tokens: int, page_size: int, pin: bool = True) -> HostTier:
        """Host rows for logical ids 0..logical_tokens+page_size-1 of every layer of `pool`, zeroed.

        Pinned only where the pool lives on a CUDA device. Blocks until the memory is there; raises HostMemoryError.
        """
        info = pool.get_device_pool_infos()[0].buffer_info
        return cls(
            info,
            host_to_device_ratio=0.0,
            host_size=0,
            page_size=page_size,
            layout="layer_first",
            pin_memory=pin and torch.device(pool.device).type == "cuda",
            override_kv_cache_dim=pool.kv_cache_dim,
            device_capacity_tokens=pool.size,
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
            target_layer_num=pool.layer_num,
            pool_label="hisparse",
            host_token_capacity=logical_tokens + page_size,
        )

    def _allocate_host_buffer(self) -> None:
        self.kv_buffer = self.init_kv_buffer()
        self.fd = None

    def init_kv_buffer(self) -> torch.Tensor:
        """Tensor [layers, rows, 1, kv_cache_dim] of the pool's storage dtype over one HostMemory."""
        self.token_stride_size = self.kv_cache_dim * self.dtype.itemsize
        self.layout_dim = self.token_stride_size * self.layer_num
        self._memory = HostMemory.allocate(
            self.layer_num * self.size * self.token_stride_size,
            device=self._transfer_device,
            pin=self.pin_memory,
            granularity=self.page_bytes,
        )
        assert self._memory.tensor is not None
        return self._memory.tensor.view(self.dtype).view(self.layer_num, self.size, 1, self.kv_cache_dim)

    def _initialize_transfer_views(self) -> None:
        self.can_use_jit = False
        self.data_refs = list(self.kv_buffer.unbind(0))
        # HostMemory has checked that the device sees these rows at their host addresses.
        self.data_ptrs = torch.tensor([ref.data_ptr() for ref in self.data_refs], dtype=torch.uint64)
        self._init_write_back_staging_buffers()
        self._available: Callable[[], int] = lambda: self.logical_tokens

    @property
    def logical_tokens(self) -> int:
        """Rows that can hold tokens: `size` without the pad page."""
        return self.size - self.page_size

    @property
    def row_bytes(self) -> int:
        return self.token_stride_size

    @property
    def page_bytes(self) -> int:
        """One page of one layer."""
        return self.page_size * self.token_stride_size

    @property
    def num_bytes(self) -> int:
        return self.layer_num * self.size * self.token_stride_size

    @property
    def numa_node(self) -> int | None:
        """Node that the rows were placed on, None where it is not known."""
        return self._memory.numa_node

    def layer_bases(self) -> torch.Tensor:
        """Addresses of row 0 of every layer, int64 [layers] on the CPU; equal on host and device."""
        return self.data_ptrs.view(torch.int64).clone()

    def layer_rows(self, layer: int) -> torch.Tensor:
        """One layer (counted from 0 on this rank) as uint8 [rows, row_bytes], a view."""
        return self.kv_buffer[layer].view(torch.uint8).view(self.size, self.token_stride_size)

    def bind_available(self, available: Callable[[], int]) -> None:
        """Mirror the logical allocator: `available()` gives its free tokens, and must be cheap and pure."""
        self._available = available

    def available_size(self) -> int:
        """Logical tokens not in use."""
        return self._available()

    def clear(self) -> None:
        """Nothing to forget: rows belong to logical ids. SGLang's constructor and flush call it."""

    def alloc(self, need_size: int) -> NoReturn:
        raise InvariantError(_NO_ALLOCATOR)

    def free(self, indices: torch.Tensor) -> NoReturn:
        raise InvariantError(_NO_ALLOCATOR)

    def destroy(self) -> None:
        """Unregister and let go of the memory. Idempotent; the caller has drained every stream that copies rows."""
        if getattr(self, "_destroyed", False):
            return
        self._destroyed = True
        self.kv_buffer = None
        self.data_refs = None
        self.data_ptrs = None
        self._memory.release()
