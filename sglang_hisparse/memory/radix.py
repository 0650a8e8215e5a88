"""SGLang's radix cache with its ids on the CPU.

The tree is SGLang's own; only where its values live changes. SGLang keeps logical ids in device tensors, so that whoever
must know *which* pages a prefix hit, a free or a de-duplication concerns has to wait for the device. Here the tree's values
are CPU tensors built from the residency coordinator's row of the request, so every id that leaves the tree is known at once,
and device copies follow where SGLang writes `req_to_token` (rule R1; ARCHITECTURE.md, "Who knows page numbers").

Where storage is configured, it also answers SGLang's questions about prefetches for waiting requests, in place of HiCache.

Created through SGLang's `create_unified_radix_cache(ctx, cache_class=...)`; never touches node internals, so both tree
cores (Rust and Python) serve.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import coalesce_ranges
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.sync_debug import without_device_sync

if TYPE_CHECKING:
    from sglang_hisparse.storage.tier import StorageTier


class _AllocatorOnCpu:
    """What the tree core sees of the allocator: everything, except that its ids are on the CPU."""

    device = "cpu"

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._allocator, name)


class HiSparseRadixCache(UnifiedRadixCache):
    """UnifiedRadixCache whose values are CPU int64 logical ids."""

    def __init__(self, params: Any) -> None:
        self._row_ids: torch.Tensor | None = None  # ids of the request being checkpointed
        self._path_pages: list[int] | None = None  # pages of the path that the row was repointed to
        allocator = params.token_to_kv_pool_allocator
        self.storage: StorageTier | None = None  # set by the runtime
        super().__init__(replace(params, token_to_kv_pool_allocator=_AllocatorOnCpu(allocator)))
        self.token_to_kv_pool_allocator = allocator

    # -- ids out of the tree ----------------------------------------------------------------------------------------

    def _on_device(self, ids: torch.Tensor) -> torch.Tensor:
        return self.token_to_kv_pool_allocator.ids_to_device(ids)

    def prefix_pages(self, req: Any) -> list[int]:
        """Logical pages of the prefix that `req` matched, in order; `req.prefix_len` is a multiple of the page."""
        ids = super().prefix_device_indices(req)
        return (ids[:: self.page_size] // self.page_size).tolist()

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        return self._on_device(super().prefix_device_indices(req))

    def path_device_indices(self, node: Any) -> torch.Tensor:
        ids = super().path_device_indices(node)
        if self._row_ids is not None:
            self._path_pages = (ids[:: self.page_size] // self.page_size).tolist()
        return self._on_device(ids)

    # -- ids into the tree ------------------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> Any:
        if params.value is not None and params.value.device.type != "cpu" or self._row_ids is not None:
            if self._row_ids is None:
                raise InvariantError("ids reach the radix tree outside a checkpoint; their pages would be unknown")
            params = replace(params, value=self._row_ids[: len(params.value)])
        return super().insert(params)

    @without_device_sync
    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        if self.disable:
            return super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        allocator = self.token_to_kv_pool_allocator
        slot = req.kv.req_pool_idx
        self._row_ids, self._path_pages = allocator.row_ids(slot), None
        try:
            with allocator.deferred_frees() as freed:
                super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
                if self._path_pages is not None:
                    replaced = allocator.residency.replace(slot, 0, self._path_pages)
                    # The tree frees exactly the request's duplicates; anything else would leak or free a page in use.
                    if set(replaced) != set(freed):
                        raise InvariantError(f"the tree freed pages {freed}, the request gave up {replaced}")
            if self.storage is not None and self._path_pages is not None:
                self.storage.note_cached(req.full_untruncated_fill_ids, (req.extra_key, req.cache_salt), self._path_pages)
        finally:
            self._row_ids = self._path_pages = None

    @without_device_sync
    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Give back row-position ranges by what the CPU knows of the row; no device tensor is read."""
        allocator, page_size = self.token_to_kv_pool_allocator, self.page_size
        for start, end in coalesce_ranges([r for r in ranges if r[0] < r[1]]):
            if start % page_size:
                raise InvariantError(f"row position {start} is freed from the middle of a page")
            allocator.free_pages_list(allocator.residency.unmap(kv.req_pool_idx, start // page_size, -(-end // page_size)))

    # -- storage: SGLang asks for HiCache's prefetches, and gets ours -------------------------------------------------

    def is_backuped(self, node_id: Any) -> bool:
        """Whether storage may be asked for what follows this node: pages of ours are keyed by tokens, so always."""
        return self.storage is not None or super().is_backuped(node_id)

    def get_last_hash_value(self, node_id: Any) -> str | None:
        return None if self.storage is not None else super().get_last_hash_value(node_id)

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: Any,
        new_input_tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Sequence[int] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """A request enters the waiting queue: ask storage for what the tree does not hold of its prompt."""
        if self.storage is not None:
            tokens = array("q", matched_prefix_tokens or ())
            matched = len(tokens)
            tokens.extend(new_input_tokens)
            self.storage.request(request, tokens, matched, (extra_key, cache_salt))

    def check_prefetch_progress(self, request: Any) -> bool:
        """Whether the request may start: storage has answered, or it has waited long enough."""
        return self.storage is None or self.storage.prefetches.is_over(request)

    def pop_prefetch_loaded_span(self, request: Any) -> tuple[int, int | None]:
        return (0, None) if self.storage is None else self.storage.prefetches.take_loaded(request)

    def release_aborted_request(self, request: Any) -> None:
        if self.storage is not None:
            self.storage.prefetches.cancel(request)
        super().release_aborted_request(request)

    def protected_size(self) -> int:
        """Tokens that cannot be evicted; those that are on their way from storage, and those beyond the border, count too, so
        that none is missing."""
        loading = 0 if self.storage is None else self.storage.loading_tokens
        return super().protected_size() + loading + self.token_to_kv_pool_allocator.unbacked_tokens
