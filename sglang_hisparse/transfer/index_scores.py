"""The indexer's scores on their way from its top-k to the resolver of the same layer: a reference, for one layer at a time.

A hook wraps the metadata that SGLang's indexer asks for its top-k (hooks.py), so that the scores pass through here; HotBuffers
takes them when it resolves. Nothing is copied, and nothing waits. Inside a captured graph the reference keeps the memory of
the scores from being given to another tensor before the resolver has been recorded; afterwards it must be gone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


class IndexScores:
    """At most one layer's scores, float32 [rows, columns]."""

    def __init__(self) -> None:
        self._layer = -1
        self._scores: torch.Tensor | None = None
        self._refused: torch.dtype | None = None

    def put(self, layer: int, scores: torch.Tensor) -> None:
        """The indexer of `layer`, counted from 0, is about to select by these scores."""
        if scores.dtype != torch.float32 or scores.ndim != 2 or (scores.shape[1] > 1 and scores.stride(1) != 1):
            if self._refused != scores.dtype:
                self._refused = scores.dtype
                logger.warning(
                    "HiSparse evicts by age: the indexer's scores are %s %s", scores.dtype, tuple(scores.shape)
                )
            return
        self._layer, self._scores = layer, scores

    def take(self, layer: int) -> torch.Tensor | None:
        """The scores of `layer`, once; None where its indexer had no need of any."""
        scores, self._scores = self._scores, None
        return scores if self._layer == layer else None


class ScoreTap:
    """SGLang's indexer metadata, of which nothing is changed; tells `scores` what the top-k of `layer` is taken from."""

    def __init__(self, metadata: Any, scores: IndexScores, layer: int) -> None:
        self._metadata, self._scores, self._layer = metadata, scores, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)

    def topk_transform(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._scores.put(self._layer, logits)
        return self._metadata.topk_transform(logits, *args, **kwargs)
