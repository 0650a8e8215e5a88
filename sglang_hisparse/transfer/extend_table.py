"""The page table of an extend, translated once instead of what every layer selects from it: off by default, as long as no GPU has
compared its tokens with plain SGLang's. `SGLANG_HISPARSE_EXTEND_TABLE=1` switches it on.

In an extend SGLang's top-k looks the selected positions up in a table with the id of every token (`page_table_1`, int32 [requests,
longest]), and the backend then has our pool translate what was selected, in every layer: [new tokens, top_k], 67 MB read and as many
written for 8,192 tokens. Where every page is resident the table itself can hold device rows instead: a quarter of a megabyte for a prompt of
64,000 tokens, once a forward. The indexer goes by the table of pages, which stays logical. Rows come out as they would have: the table's
entry of a selected position is that position's device row, -1 where it has none.

Top-k must look into that table, then. It may look into the table of pages instead where a batch has as many new tokens as requests, which makes
its rows look like those of a decode step (SGLang's `DSATopKBackend.topk_transform`): a prompt of 65 tokens of which 64 are cached, or the
last token of a short chunked one. Such an extend keeps its ids; it has few rows to translate.

Hooked behind the call in which SGLang's DSA backend makes the tables of an eager forward. Only the table that this forward alone reads
is replaced, never written; what SGLang keeps for graphs is not touched. A streamed extend keeps its ids: each layer has its own rows.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from sglang_hisparse.memory.pool import HiSparsePool

TABLE_VARIABLE = "SGLANG_HISPARSE_EXTEND_TABLE"


def after_init_forward_metadata(result: None, backend: Any, forward_batch: Any) -> None:
    """AFTER DeepseekSparseAttnBackend.init_forward_metadata."""
    pool = getattr(backend, "token_to_kv_pool", None)
    if os.environ.get(TABLE_VARIABLE) != "1" or not isinstance(pool, HiSparsePool) or backend.hisparse_coordinator is None:
        return
    metadata = backend.forward_metadata
    # Also told of a table that stays as it is: it takes the place of one that may have been translated.
    rows = pool.translate_table(metadata.page_table_1 if _is_plain_extend(backend, forward_batch) else None)
    if rows is not None:
        backend.forward_metadata = replace(metadata, page_table_1=rows)


def _is_plain_extend(backend: Any, forward_batch: Any) -> bool:
    """Whether attention takes what top-k finds in the table, through the pool's translation, and nobody else reads the table
    or is given its entries, as a client is that asks for the indexer's choice."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

    mode, metadata = forward_batch.forward_mode, backend.forward_metadata
    is_paged = backend.get_topk_transform_method(mode) is TopkTransformMethod.PAGED
    reads_alone = not backend.use_mha and backend.dsa_index_kpool <= 1 and get_global_indexer_capturer() is None
    return mode == ForwardMode.EXTEND and is_paged and reads_alone and len(metadata.dsa_seqlens_expanded) != len(metadata.real_page_table)
