"""SGLang's token-to-KV allocator over logical pages.

Owns the device page pool and answers SGLang's capacity questions in two ledgers: `available_size()` counts logical tokens
(what the radix tree may be evicted for), device pages are counted apart and are made free by spilling, never by evicting
the tree (R14, R15). Which page goes where is decided and remembered on the CPU; tensors of ids are made from that and
copied to the device without waiting. Capacity queries change nothing (R17).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.hisparse import HiSparseTokenToKVPoolAllocator

from sglang_hisparse.capacity import longest_request_tokens
from sglang_hisparse.layout import logical_tokens
from sglang_hisparse.memory.budget import HiSparsePrefillBudget
from sglang_hisparse.residency import DevicePages, ResidencyCoordinator

if TYPE_CHECKING:
    from sglang_hisparse.runtime import HiSparseRuntime


class _Ledger:
    """One count of pages in the form of an allocator, for the readers that look at the parts of the built-in one."""

    def __init__(self, size: int, page_size: int, free_pages: Any) -> None:
        self.size = size
        self.page_size = page_size
        self._free_pages = free_pages

    def available_size(self) -> int:
        return self._free_pages() * self.page_size


class HiSparseAllocator(HiSparseTokenToKVPoolAllocator):
    """Constructed by SGLang's KV cache configurator in place of the built-in class; same arguments."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: Any,
        kvcache: Any,
        need_sort: bool,
        host_to_device_ratio: float = 2,
    ) -> None:
        # The built-in constructor would allocate a map of one int64 per logical token and two device free lists.
        self._kvcache = kvcache
        self._size_full = logical_tokens(size, host_to_device_ratio, page_size)
        self._size_hisparse = size // page_size * page_size
        self._is_on_cpu = torch.device(device).type == "cpu"
        self.compress_ratio = 1
        self.dtype, self.device, self.page_size, self.need_sort = dtype, device, page_size, need_sort
        # No device free list exists; SGLang's page census skips a pool that has none.
        self.free_pages = self.release_pages = None
        self.free_group = None
        self.device_pages = DevicePages(self._size_hisparse // page_size)
        # What every accepted request may count on: a moving border only ever leaves this many device tokens.
        self._size_least = kvcache.border[-1].device_pages * page_size if kvcache.border else self._size_hisparse
        self.runtime: HiSparseRuntime | None = None
        self._one = torch.ones(1, dtype=torch.int64, device=device)  # makes int64 of int32 ids
        self._deferred: list[int] | None = None
        self.num_slow_frees = 0
        # Addresses are captured by CUDA graphs, so the table is allocated once, outside any memory-saver region.
        self.page_table = torch.zeros(self._size_full // page_size + 1, dtype=torch.int32, device=device)
        kvcache.bind_page_table(self.page_table)
        self.logical_attn_allocator = _Ledger(self._size_full, page_size, self._free_logical_pages)
        self.hisparse_attn_allocator = _Ledger(self._size_hisparse, page_size, lambda: self.device_pages.num_free)

    # -- wiring -----------------------------------------------------------------------------------------------------

    def bind_runtime(self, runtime: HiSparseRuntime) -> None:
        self.runtime = runtime

    @property
    def residency(self) -> ResidencyCoordinator:
        return self.runtime.residency

    # -- capacity (pure) --------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self._size_full

    @property
    def device_tokens(self) -> int:
        return self._size_hisparse

    @property
    def unbacked_tokens(self) -> int:
        """Logical tokens that nobody can have yet, since their index-K has no memory."""
        return 0 if self.runtime is None else self._size_full - self.residency.book.num_usable * self.page_size

    def _free_logical_pages(self) -> int:
        return self._size_full // self.page_size if self.runtime is None else self.residency.book.num_free

    def available_size(self) -> int:
        """Free logical tokens. Device pages are another ledger: see `device_pages`."""
        return self._free_logical_pages() * self.page_size

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        return 0  # leases are charged in device pages, by the prefill budget

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> HiSparsePrefillBudget:
        return HiSparsePrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    @property
    def streamed_tokens(self) -> int:
        """Longest prompt that can be prefilled without ever being resident as a whole; 0: none."""
        return 0 if self.runtime is None else self.runtime.extends.rule.longest_streamed_pages * self.page_size

    def max_request_tokens(self) -> int:
        """Longest request, prompt and output: see capacity.longest_request_tokens."""
        return longest_request_tokens(self._size_least, self._size_full, self.page_size, self.streamed_tokens)

    def max_new_tokens_for_memory(self, input_tokens: int, max_new_tokens: int, *, token_capacity: int, **kwargs: Any) -> int | None:
        # SGLang has clipped to `max_request_tokens` already; with that as capacity too, the longest prompts would get no output.
        return super().max_new_tokens_for_memory(
            input_tokens,
            max_new_tokens,
            token_capacity=min(token_capacity, max(self._size_least, self.streamed_tokens)),
            **kwargs,
        )

    def verify_byte_accounting(self) -> list[str]:
        """SGLang calls this at idle: the page book checks itself (I2, I3 and the counts behind them)."""
        return [] if self.runtime is None else self.runtime.self_check()

    # -- capacity (acting) ------------------------------------------------------------------------------------------

    def check_decode_capacity(self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None) -> bool:
        """Make the next decode step's pages available: evict the tree for logical ones, spill for device ones."""
        self.runtime.want_logical(-(-num_tokens // self.page_size))
        self.evict_to_free_tokens(tree_cache, num_tokens)
        if self.runtime.refuses():
            return False
        return self.available_size() >= num_tokens and self.runtime.make_room(-(-num_tokens // self.page_size))

    # -- allocation -------------------------------------------------------------------------------------------------

    def ids_to_device(self, ids: torch.Tensor) -> torch.Tensor:
        """A CPU tensor of ids on the pool's device, without waiting for it."""
        if self._is_on_cpu:
            return ids.clone()
        return ids.pin_memory().to(self.device, non_blocking=True)

    def row_ids(self, slot: int) -> torch.Tensor:
        """Logical ids of the slot's row, whole pages, int64 on the CPU."""
        pages = self.residency.book.pages(slot).astype(np.int64)
        return torch.from_numpy((pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1))

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Ids int64 [extend_num_tokens] for the tokens after each prefix, request after request; None: does not fit."""
        slots = self.runtime.extend_slots
        starts, ends = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist()
        if not self._append_pages(np.asarray(slots, dtype=np.int64), seq_lens_cpu.numpy()):
            return None
        parts = []
        for slot, start, end in zip(slots, starts, ends, strict=True):
            first = start // self.page_size
            pages = self.residency.book.slot_pages[slot, first : -(-end // self.page_size)].astype(np.int64)
            ids = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
            offset = first * self.page_size
            parts.append(ids[start - offset : end - offset])
        return self.ids_to_device(torch.from_numpy(np.concatenate(parts)))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor | None:
        """Ids int64 [batch] for token seq_len - 1 of each request of the decode batch; None: does not fit. last_loc: ids of the
        tokens before them, on the device."""
        steps = self.runtime.decode_steps
        if steps.is_quiet or ((positions := seq_lens_cpu.numpy() - 1) % self.page_size).all():
            return last_loc + self._one  # each in the page of the token before: nothing to look up or to send
        slots, book = steps.slots, self.residency.book
        index, lengths = positions // self.page_size, positions + 1
        # Most decode steps need no page.
        if np.count_nonzero(index >= book.num_pages[slots]) and not self._append_pages(slots, lengths):
            return None
        pages = book.slot_pages[slots, index]
        return self.ids_to_device(torch.from_numpy(positions + (pages - index) * self.page_size))

    def _append_pages(self, slots: np.ndarray, seq_lens: np.ndarray) -> bool:
        """Give each slot int64 [n] the pages that its length int64 [n] needs, all or nothing."""
        book = self.residency.book
        missing = -(-seq_lens // self.page_size) - book.num_pages[slots]
        short = np.flatnonzero(missing > 0)
        counts = missing[short].tolist()
        if (total := sum(counts)) > book.num_free or not self.runtime.make_room(total):
            return False
        pages = book.allocate(total)
        start = 0
        for slot, count in zip(slots[short].tolist(), counts, strict=True):
            self.residency.append(slot, pages[start : start + count])
            start += count
        return True

    def alloc(self, need_size: int) -> None:
        raise NotImplementedError("HiSparseAllocator allocates for requests only (alloc_extend, alloc_decode)")

    def alloc_logical_only(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("speculative reserves and prefill/decode landing are not supported yet")

    # -- free -------------------------------------------------------------------------------------------------------

    def free_pages_of(self, indices: torch.Tensor) -> list[int]:
        """Logical pages of a page-exact segment of ids."""
        if indices.device.type != "cpu":
            # Every free of a running server arrives with CPU ids; a device tensor costs a wait, so it is counted.
            self.num_slow_frees += 1
            indices = indices.cpu()
        return (indices[:: self.page_size] // self.page_size).tolist()

    def free_pages_list(self, pages: Iterable[int]) -> None:
        if self._deferred is not None:
            self._deferred.extend(pages)
        else:
            self.residency.free(pages)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel():
            self.num_slow_frees += free_index.device.type != "cpu"
            self.free_pages_list(dict.fromkeys((free_index.cpu() // self.page_size).tolist()))

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        if free_index.numel():
            self.free_pages_list(self.free_pages_of(free_index))

    @contextmanager
    def deferred_frees(self) -> Iterator[list[int]]:
        """Collect the pages freed inside the block, and free them at its end (the tree frees duplicates before the row
        stops using them)."""
        self._deferred = []
        try:
            yield self._deferred
        finally:
            pages, self._deferred = self._deferred, None
            self.residency.free(pages)

    def clear(self) -> None:
        if self.runtime is not None:
            self.runtime.clear()

    def resize(self, config: Any) -> None:
        raise NotImplementedError("the pools of HiSparse cannot be resized: captured graphs hold their addresses")

    def debug_print(self) -> str:
        return f"#device-pages-free: {self.device_pages.num_free} of {self.device_pages.num_usable}, "
