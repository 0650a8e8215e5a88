"""The device pool: KV rows of device pages for every layer, and index-K rows of all logical tokens for leader layers.

Owns the tensors that attention and the indexer read, and the translation of logical ids to device rows by the page
table, which the allocator owns and binds here. Constructed by SGLang's KV cache configurator in place of its own
HiSparse pool; called inside layers, so also while a CUDA graph is captured. It must never write the page table, never
synchronise, never translate in place (follower layers reuse the leader's index tensor), and never move rows.

Index-K is addressed by logical id and is never translated. While an extend is streamed (transfer/prefix_stream.py), attention gets
the scratch of that stream instead of a layer's buffer, and rows of the scratch instead of device rows; writers never do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import torch
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, unwrap_write_loc

from sglang_hisparse import settings
from sglang_hisparse.elastic_layout import ElasticShape, check_border, pool_obstacle
from sglang_hisparse.errors import ConfigError, InvariantError
from sglang_hisparse.layout import INDEX_ROW_BYTES, logical_tokens
from sglang_hisparse.memory.elastic import ElasticMemory, memory_of
from sglang_hisparse.residency import BorderStep

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_hisparse.transfer.prefix_stream import PrefixStream

ZERO_ROW = 0
"""Row 0 of the pad page. Padded tokens write to location 0, which SGLang's KV writers skip, so it stays zero."""


def _kernels() -> ModuleType:
    # Not at import: the pool serves CPU runs where no compiler for the kernel libraries is needed.
    from sglang_hisparse.kernels import resolver

    return resolver


def rows_for_writing(loc: torch.Tensor, page_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Device row of each logical id [n], in loc's dtype: page 0 for an id not resident, row 0 for a negative one."""
    if loc.is_cuda:
        return _kernels().write_rows(loc, page_table, page_size)
    ids = loc.clamp(min=0)
    return page_table[ids // page_size].to(loc.dtype) * page_size + ids % page_size


def rows_for_reading(ids: torch.Tensor, page_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Device row of each logical id, int32 of ids' shape: -1 for a negative id and for one that is not resident."""
    if ids.is_cuda:
        return _kernels().read_rows(ids, page_table, page_size)
    pages = torch.where(ids >= 0, page_table[ids.clamp(min=0) // page_size], 0)
    return torch.where(pages > 0, pages * page_size + ids % page_size, -1).to(torch.int32)


@dataclass(slots=True)
class _WriteRows:
    """Translation of one forward's out_cache_loc. `loc` is held so that its address goes to no other tensor."""

    loc: torch.Tensor
    rows: torch.Tensor

    def match(self, loc: torch.Tensor) -> bool:
        return loc is self.loc or (
            loc.data_ptr() == self.loc.data_ptr()
            and loc.shape == self.loc.shape
            and loc.stride() == self.loc.stride()
            and loc.dtype == self.loc.dtype
        )


class ElasticIndexKeyCache(IndexKeyCache):
    """SGLang's facade of index-K over buffers that are there already: one for each layer, without rows where it has none."""

    def __init__(self, pool: HiSparsePool, buffers: list[torch.Tensor]) -> None:
        self.pool, self.buffer = pool, buffers


class HiSparsePool(HiSparseDSATokenToKVPool):
    """DSA pool of `size` device tokens whose index-K spans `logical_tokens`.

    The built-in constructor is bypassed (it multiplies size and ratio as integers); the plain DSA pool's runs. Every
    attribute that SGLang reads from the built-in class is set but the int64 map, which does not exist here.
    """

    _in_forward = False  # a forward of the model runs, and what is set up for it ends with it
    _table_is_translated = False  # what attention of that forward selects are device rows already

    def __init__(
        self,
        size: int,
        page_size: int,
        kv_lora_rank: int,
        dtype: torch.dtype,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str,
        index_head_dim: int,
        enable_memory_saver: bool,
        kv_cache_dim: int,
        start_layer: int | None = None,
        end_layer: int | None = None,
        index_kpool: int = 1,
        index_kpool_compress: bool = False,
        tail_extra_slots: int = 0,
        max_running_requests: int | None = None,
        skip_topk_layers: list[bool] | None = None,
        host_to_device_ratio: float = 2,
    ) -> None:
        if index_kpool != 1:
            raise ConfigError(f"index_kpool: {index_kpool} is not supported with HiSparse; allowed: 1")
        if size % page_size:
            raise InvariantError(f"device pool of {size} tokens is not a whole number of pages of {page_size}")
        self.logical_tokens = logical_tokens(size, host_to_device_ratio, page_size)
        self.page_table: torch.Tensor | None = None
        self.prefix_stream: PrefixStream | None = None  # bound by the runtime
        self._write_rows: _WriteRows | None = None
        self.elastic: ElasticMemory | None = None
        self._saves_memory = enable_memory_saver
        self._has_index = [not follows for follows in skip_topk_layers or [False] * layer_num]
        DSATokenToKVPool.__init__(
            self,
            size=size,
            page_size=page_size,
            kv_lora_rank=kv_lora_rank,
            dtype=dtype,
            qk_rope_head_dim=qk_rope_head_dim,
            layer_num=layer_num,
            device=device,
            index_head_dim=index_head_dim,
            enable_memory_saver=enable_memory_saver,
            kv_cache_dim=kv_cache_dim,
            start_layer=start_layer,
            end_layer=end_layer,
            index_buf_size=self.logical_tokens,
            index_kpool=index_kpool,
            index_kpool_compress=index_kpool_compress,
            tail_extra_slots=tail_extra_slots,
            max_running_requests=max_running_requests,
            skip_topk_layers=skip_topk_layers,
        )
        # Translated rows are this rank's own: SGLang's writers must not apply a context-parallel owner rule to them.
        self.dcp_replicated = True
        self.bytes_per_token = self.kv_cache_dim * self.store_dtype.itemsize
        self.data_strides = torch.full_like(self.data_ptrs, self.bytes_per_token)

    @property
    def border(self) -> tuple[BorderStep, ...]:
        """Where the border between KV and index-K may stand; empty: it does not move."""
        return () if self.elastic is None else self.elastic.steps

    def _create_buffers(self) -> None:
        """KV of all layers. With a moving border, index-K of the leaders too: they share their memory."""
        if not settings.elastic_border():
            super()._create_buffers()
            return
        # Validation and sizing have asked by flags; this is what SGLang has made of them.
        check_border(True, pool_obstacle(saves_memory=self._saves_memory, has_custom_pool=bool(self.custom_mem_pool)))
        row_bytes = self.kv_cache_dim * self.store_dtype.itemsize
        shape = ElasticShape(
            device_pages=self.size // self.page_size,
            logical_pages=self.num_logical_pages,
            page_bytes=self.page_size * row_bytes,
            index_page_bytes=self.page_size * INDEX_ROW_BYTES,
            num_layers=self.layer_num,
            num_leaders=sum(self._has_index),
        )
        self.elastic = ElasticMemory(memory_of(self.device), shape)
        self.kv_buffer = [
            rows.view(self.store_dtype).view(self.size + self.page_size, 1, self.kv_cache_dim) for rows in self.elastic.kv()
        ]

    def _create_index_key_cache(self) -> IndexKeyCache:
        if self.elastic is None:
            return super()._create_index_key_cache()
        pages, width = self.num_logical_pages + 1, self.page_size * INDEX_ROW_BYTES
        held = iter(self.elastic.index())
        none = torch.zeros((0, width), dtype=self.index_k_with_scale_buffer_dtype, device=self.device)
        return ElasticIndexKeyCache(
            self, [next(held).view(pages, width) if has_index else none.clone() for has_index in self._has_index]
        )

    @property
    def row_bytes(self) -> int:
        """One token's KV in one layer."""
        return self.bytes_per_token

    @property
    def page_bytes(self) -> int:
        """One page of one layer."""
        return self.page_size * self.bytes_per_token

    @property
    def num_rows(self) -> int:
        """Rows of each KV buffer, pad page included."""
        return self.size + self.page_size

    @property
    def num_logical_pages(self) -> int:
        """Logical pages that can be handed out: 1..num_logical_pages."""
        return self.logical_tokens // self.page_size

    def device_bases(self) -> torch.Tensor:
        """Addresses of row 0 of every layer's KV buffer, int64 [layers] on the CPU."""
        return torch.tensor([buffer.data_ptr() for buffer in self.kv_buffer], dtype=torch.int64)

    def layer_rows(self, layer: int) -> torch.Tensor:
        """One layer (counted from 0 on this rank) as uint8 [num_rows, row_bytes], a view."""
        return self.kv_buffer[layer].view(torch.uint8).view(self.num_rows, self.bytes_per_token)

    def bind_page_table(self, page_table: torch.Tensor) -> None:
        """Take the allocator's table: int32 [num_logical_pages + 1] on the pool's device, entry 0 is 0.

        Its address is captured in CUDA graphs, so a second table is refused. Raises InvariantError.
        """
        expected = (self.num_logical_pages + 1,)
        if page_table.dtype != torch.int32 or tuple(page_table.shape) != expected or not page_table.is_contiguous():
            raise InvariantError(f"page table: got {page_table.dtype} {tuple(page_table.shape)}, need int32 {expected}")
        if page_table.device.type != torch.device(self.device).type:
            raise InvariantError(f"page table is on {page_table.device}, the pool on {self.device}")
        if self.page_table is not None and self.page_table.data_ptr() != page_table.data_ptr():
            raise InvariantError("page table: already bound to another tensor; its address is fixed for life")
        self.page_table = page_table

    def register_mapping(self, full_to_hisparse_device_index_mapping: torch.Tensor) -> NoReturn:
        raise InvariantError("the pool translates by page table: call bind_page_table, not register_mapping")

    def _table(self) -> torch.Tensor:
        if self.page_table is None:
            raise InvariantError("no page table is bound to the pool yet")
        return self.page_table

    def write_rows(self, loc: torch.Tensor) -> torch.Tensor:
        """Device rows to write to: [n] int of loc's dtype, a new tensor. Missing and negative ids give the pad page."""
        return rows_for_writing(loc, self._table(), self.page_size)

    def read_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Device rows to read: int32 of ids' shape, a new tensor. -1 for negative ids and for rows not resident."""
        return rows_for_reading(ids, self._table(), self.page_size)

    def translate_loc_to_hisparse_device(self, compressed_indices: torch.Tensor) -> torch.Tensor:
        """SGLang's name for both translations; the rank tells them apart.

        The DSA backend's extend path passes the 2-D rows that attention will read, padded with -1. Every 1-D call is
        the location list of a writer.
        """
        if compressed_indices.ndim == 1:
            return self.write_rows(compressed_indices)
        if self._table_is_translated or self.reads_windows:
            return compressed_indices  # each window translates its own (transfer/attention_windows.py)
        if (stream := self._running_stream()) is not None:
            stream.select(compressed_indices)
            return rows_for_reading(compressed_indices, stream.table, self.page_size)
        return self.read_rows(compressed_indices)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around each forward of the model, its tables included, and around no capture of a graph."""
        self._in_forward, self._table_is_translated = True, False
        try:
            yield
        finally:
            self._in_forward = self._table_is_translated = False

    def translate_table(self, ids: torch.Tensor | None) -> torch.Tensor | None:
        """Device rows int32 for the ids in a table from which all layers of this forward select: a new tensor, to be put in its
        place; what attention then passes to be translated are rows. None where layers must translate for themselves: a table that
        is no such one (`ids` None), an extend that is streamed, or no forward that `forward` knows of."""
        self._table_is_translated = ids is not None and self._in_forward and self._running_stream() is None
        return self.read_rows(ids) if self._table_is_translated else None

    def _running_stream(self) -> PrefixStream | None:
        """The stream that attention reads from in this forward, None where it reads the pool."""
        stream = self.prefix_stream
        return stream if stream is not None and stream.active else None

    @property
    def reads_windows(self) -> bool:
        """Whether attention of the forward that runs now reads the scratch in several windows."""
        stream = self._running_stream()
        return stream is not None and bool(stream.windows)

    def window_rows(self, window: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(buffer [num_rows, 1, dim], its rows int32 of ids' shape) of a window of the layer that attention has asked for."""
        layer = self.prefix_stream.layer
        scratch = self.prefix_stream.enter(window)
        if scratch is None:
            return super().get_key_buffer(layer + self.start_layer), self.read_rows(ids)
        self.prefix_stream.select(ids)
        return self._as_keys(scratch), rows_for_reading(ids, self.prefix_stream.table, self.page_size)

    def _as_keys(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.store_dtype == self.dtype else rows.view(self.dtype)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """What attention of the layer reads: its buffer [num_rows, 1, dim], or the scratch of a streamed extend.

        The backend asks for it after it has written the layer's new rows, and before it launches attention.
        """
        if (stream := self._running_stream()) is None:
            return super().get_key_buffer(layer_id)
        return self._as_keys(stream.stage(layer_id - self.start_layer))

    def _translate_loc_to_hisparse_device(self, compressed_indices: torch.Tensor) -> torch.Tensor:
        return self.translate_loc_to_hisparse_device(compressed_indices)

    def _rows_of_forward(self, layer_id: int, loc: torch.Tensor) -> torch.Tensor:
        """Translate out_cache_loc once a forward: at the first layer, reused by the layers after it.

        A captured graph replays the first layer's translation and the others read its output, whose memory belongs to
        the graph. The last layer lets go of it, so that nothing of one forward is kept for the next.
        """
        local = layer_id - self.start_layer
        if (stream := self._running_stream()) is not None:
            stream.note_write(local)
        cached = self._write_rows
        if local == 0 or cached is None or not cached.match(loc):
            cached = _WriteRows(loc, self.write_rows(loc))
            self._write_rows = cached
        if local == self.layer_num - 1:
            self._write_rows = None
        return cached.rows

    def set_kv_buffer(
        self,
        layer: RadixAttention,
        loc_info: object,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        loc, _, _ = unwrap_write_loc(loc_info)
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        rows = self._rows_of_forward(layer_id, loc)
        DSATokenToKVPool.set_kv_buffer(self, layer, rows, cache_k, cache_v, layer_id_override)

    def set_mla_kv_buffer(
        self,
        layer: RadixAttention,
        loc_info: object,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        loc, _, _ = unwrap_write_loc(loc_info)
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        rows = self._rows_of_forward(layer_id, loc)
        DSATokenToKVPool.set_mla_kv_buffer(self, layer, rows, cache_k_nope, cache_k_rope, layer_id_override)

    def _scatter_mla_rows(
        self, dst_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        if dst_buffer.is_cuda:
            super()._scatter_mla_rows(dst_buffer, loc, cache_k_nope, cache_k_rope)
        else:
            packed = torch.cat([cache_k_nope.flatten(1), cache_k_rope.flatten(1)], dim=-1)
            kept = loc != ZERO_ROW
            dst_buffer[loc[kept]] = packed[kept].unsqueeze(1)

    def get_mla_kv_buffer(
        self, layer: RadixAttention, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Latent and rope parts of resident rows, each [n, 1, dim].

        The gather of this path cannot skip a row, so a host-only id reads the zero row; its callers (prefill with
        full attention) run on promoted prefixes only. SGLang takes no such path with HiSparse, streamed or not.
        """
        if self._running_stream() is not None:
            raise InvariantError("I6: full attention asked for rows of a streamed extend, which are not all on the device")
        rows = self.read_rows(loc).clamp_(min=ZERO_ROW)
        if rows.is_cuda:
            return DSATokenToKVPool.get_mla_kv_buffer(self, layer, rows, dst_dtype)
        packed = self.get_key_buffer(layer.layer_id)[rows.long()].to(dst_dtype or self.dtype)
        latent, rope = packed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        return latent.contiguous(), rope.contiguous()

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> NoReturn:
        raise InvariantError("rows are not moved between logical ids under HiSparse (speculative decoding is refused)")

    def transfer_values_on_device(self, dst_indices: torch.Tensor, src_indices: torch.Tensor) -> NoReturn:
        raise InvariantError("device rows are moved by page through the transfer worker only")

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: object = None, req_pool_index: object = None
    ) -> NoReturn:
        raise InvariantError("a retracted request keeps its rows under its logical ids: no CPU copy is made of them")

    def load_cpu_copy(
        self, kv_cache_cpu: object, indices: torch.Tensor, mamba_indices: object = None, req_pool_index: object = None
    ) -> NoReturn:
        raise InvariantError("a retracted request keeps its rows under its logical ids: there is no CPU copy to load")
