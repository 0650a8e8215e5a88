"""Top-k of a decode step by the kernel that SGLang uses without HiSparse.

SGLang wants positions from the indexer of a decode step under HiSparse, and its fused top-k gives slots, so it falls back to an
unfused kernel with one block a row, whose time grows with the context. The fused one spreads long rows over clusters. With a page
table in which page i is page i, slots are positions; the rest is SGLang's own: its kernel, its plan for the step, its conditions.

A hook wraps the metadata that the indexer asks for its top-k (hooks.py). Nothing is copied, and nothing waits.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

logger = logging.getLogger(__name__)

TOP_K_VARIABLE = "SGLANG_HISPARSE_FUSED_TOP_K"
_MOST = 2048  # entries that the kernel can select


class DecodeTopK:
    """The table of pages in order, int32 [1, num_pages], whose address captured graphs keep."""

    def __init__(self, num_pages: int, device: torch.device) -> None:
        self._pages = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
        self._told: set[bool] = set()

    @classmethod
    def from_env(cls, num_pages: int, device: torch.device) -> DecodeTopK | None:
        """Of `num_pages` pages, as many as the longest request has; None where the variable is 0."""
        return None if os.environ.get(TOP_K_VARIABLE) == "0" else cls(num_pages, device)

    def select(self, metadata: Any, logits: torch.Tensor, top_k: int) -> torch.Tensor | None:
        """Positions int32 [rows, top_k] of the highest of logits float32 [rows, columns], in no order, -1 behind those of a row that
        has fewer. None where SGLang would not choose that kernel for such a step either; nothing was launched then."""
        step = metadata.attn_metadata
        applies = self._applies(metadata, step, logits, top_k)
        if applies not in self._told:
            self._told.add(applies)
            logger.info("HiSparse top-k of decode steps: %s", "plain SGLang's fused kernel" if applies else "what SGLang chooses for some")
        if not applies:
            return None
        from sglang.kernels.ops.attention.dsv4.topk import topk_transform_paged_v2

        positions = logits.new_empty((len(logits), top_k), dtype=torch.int32)
        pages = self._pages.expand(len(logits), -1)
        topk_transform_paged_v2(
            logits, metadata.get_seqlens_expanded(), pages, positions, step.page_size, step.topk_v2_plan
        )
        return positions

    def _applies(self, metadata: Any, step: Any, logits: torch.Tensor, top_k: int) -> bool:
        from sglang.srt.environ import envs
        from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod

        rows, plan = len(logits), step.topk_v2_plan
        return (
            envs.SGLANG_DSA_FUSE_TOPK.get()
            and metadata.topk_backend.should_use_topk_v2()
            and metadata.topk_transform_method is TopkTransformMethod.PAGED
            and rows == len(metadata.get_seqlens_expanded()) == len(step.real_page_table)
            and plan is not None
            and len(plan) == rows + 1
            and 0 < top_k <= _MOST
            and logits.dtype == torch.float32
            and logits.stride(1) == 1
            and logits.stride(0) % 4 == 0
        )


class TopKTap:
    """SGLang's indexer metadata, but for the top-k of a decode step."""

    def __init__(self, metadata: Any, kernel: DecodeTopK) -> None:
        self._metadata, self._kernel = metadata, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)

    def topk_transform(self, logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        positions = None if args or kwargs else self._kernel.select(self._metadata, logits, topk)
        return self._metadata.topk_transform(logits, topk, *args, **kwargs) if positions is None else positions
