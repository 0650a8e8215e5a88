"""Decode graphs without SGLang's page table of single rows.

SGLang's DSA backend keeps, for its decode graphs, the id of every token of every row of the batch (int32 [rows, context], 335 MB for 512
rows of 163,840 tokens) and rewrites it before each replay. It leaves that table out where its top-k and attention read the table of
pages alone, but never under HiSparse. Under our pool nothing of a decode graph reads it either: top-k gives positions
(`force_unfused_topk`, or transfer/decode_top_k.py), which the resolver looks up in the table of pages, and the indexer scores by that
table. So SGLang is asked as if there were no HiSparse, and answers by its own conditions; where it keeps the table, so do we.

Hooked around the call that allocates what the graphs share, before any capture; nothing of a graph or of a step is hooked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_hisparse.memory.pool import HiSparsePool

logger = logging.getLogger(__name__)


def around_init_cuda_graph_state(original: Callable[..., None], backend: Any, max_bs: int, max_num_tokens: int) -> None:
    """AROUND DeepseekSparseAttnBackend.init_cuda_graph_state."""
    if not isinstance(getattr(backend, "token_to_kv_pool", None), HiSparsePool) or backend.hisparse_coordinator is None:
        original(backend, max_bs, max_num_tokens)
        return
    # The only reader of the coordinator in that function is the condition. It is back before anything else runs.
    coordinator, backend.hisparse_coordinator = backend.hisparse_coordinator, None
    try:
        original(backend, max_bs, max_num_tokens)
    finally:
        backend.hisparse_coordinator = coordinator
    table_mb = max_num_tokens * backend.req_to_token.shape[1] * 4 / 1e6
    if backend.dsa_drop_wide_page_table:
        logger.info("HiSparse decode graphs: without the page table of single rows (%.0f MB)", table_mb)
    else:
        logger.info("HiSparse decode graphs: with SGLang's page table of single rows (%.0f MB), which nothing reads", table_mb)
