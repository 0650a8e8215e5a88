"""Attention of a streamed extend whose pages the scratch does not hold at once: window after window, in one forward.

Hooked around the two calls (capacity.WINDOWED_BACKENDS) in which SGLang's DSA backend launches its kernel for selected rows. A row of
attention depends on its own query and selected rows alone, so the batch can be cut between requests. Everything else of the layer
runs once for the batch.
Decode steps and extends of one window pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hisparse.memory.pool import HiSparsePool


@dataclass(frozen=True, slots=True)
class _Cut:
    """New tokens of one window, and where their rows are: `rows` int32 [tokens, top_k] of `keys` [rows, 1, dim]."""

    tokens: slice
    keys: torch.Tensor
    rows: torch.Tensor


def _cuts(pool: HiSparsePool, ids: torch.Tensor) -> Iterator[_Cut]:
    """Each window with its rows staged; what its consumer launches before it asks for the next one reads them.

    ids: logical ids int32 [tokens, top_k], -1 for none. Rows behind the last request (padding) go with the last window.
    """
    spans = pool.prefix_stream.windows
    for window, (first, last) in enumerate(spans):
        tokens = slice(first, last if window < len(spans) - 1 else None)
        keys, rows = pool.window_rows(window, ids[tokens])
        yield _Cut(tokens, keys, rows)
        pool.prefix_stream.leave()


class _Result:
    """Attention of the whole batch, put together as windows come: beside it there is one window's at most."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self.whole = num_rows, torch.empty(0)

    def put(self, cut: _Cut, part: torch.Tensor) -> None:
        if cut.tokens.start == 0:
            self.whole = part.new_empty((self._num_rows, *part.shape[1:]))
        self.whole[cut.tokens] = part


def _windowed_pool(backend: Any) -> HiSparsePool | None:
    """The pool, where the forward that runs now reads the scratch in several windows."""
    pool = getattr(backend, "token_to_kv_pool", None)
    return pool if isinstance(pool, HiSparsePool) and pool.reads_windows else None


def around_flashmla_sparse(original: Callable[..., torch.Tensor], backend: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """bf16: [tokens, heads, v_head_dim]."""
    return _in_windows(original, backend, _lengths_of, *args, **kwargs)


def around_flashmla_kv(original: Callable[..., torch.Tensor], backend: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """fp8: as above; its schedule over the multiprocessors is for so many rows, so each window gets its own."""
    return _in_windows(original, backend, _metadata_of, *args, **kwargs)


#: (backend, its pool, tokens of a window, tokens of the batch, arguments of the whole batch) -> those that a window has otherwise
_OwnArguments = Callable[[Any, HiSparsePool, slice, int, dict[str, Any]], dict[str, Any]]


def _in_windows(
    original: Callable[..., torch.Tensor], backend: Any, own: _OwnArguments, *args: Any, **kwargs: Any
) -> torch.Tensor:
    pool = _windowed_pool(backend)
    if pool is None:
        return original(backend, *args, **kwargs)
    return _cut_between_requests(original, backend, own, pool, *args, **kwargs)


def _cut_between_requests(
    original: Callable[..., torch.Tensor],
    backend: Any,
    own: _OwnArguments,
    pool: HiSparsePool,
    *,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table_1: torch.Tensor,
    **others: Any,
) -> torch.Tensor:
    result = _Result(len(q_all))
    for cut in _cuts(pool, page_table_1):
        given = others | own(backend, pool, cut.tokens, len(q_all), others)
        result.put(
            cut, original(backend, q_all=q_all[cut.tokens], kv_cache=cut.keys, page_table_1=cut.rows, **given)
        )
    return result.whole


def _lengths_of(
    backend: Any, pool: HiSparsePool, tokens: slice, num_tokens: int, whole: dict[str, Any]
) -> dict[str, Any]:
    lengths = whole.get("topk_length")
    if lengths is None or len(lengths) != num_tokens:  # which SGLang leaves out for a whole batch too
        return {"topk_length": None}
    return {"topk_length": lengths[tokens]}


class _WindowMetadata:
    """SGLang's metadata of the forward, but for the lengths and the schedule of one window."""

    def __init__(self, whole: Any, lengths: torch.Tensor, schedule: Any) -> None:
        self._whole = whole
        self.dsa_cache_seqlens_int32, self.flashmla_metadata = lengths, schedule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _metadata_of(
    backend: Any, pool: HiSparsePool, tokens: slice, num_tokens: int, whole: dict[str, Any]
) -> dict[str, Any]:
    kept, metadata = pool.prefix_stream.kept, whole["metadata"]
    if (own := kept.get(tokens.start)) is None:  # of the first layer; the others have the same
        lengths = metadata.dsa_cache_seqlens_int32[tokens]
        schedule = backend._compute_flashmla_metadata(cache_seqlens=lengths, seq_len_q=1)
        own = kept[tokens.start] = _WindowMetadata(metadata, lengths, schedule)
    return {"metadata": own}
