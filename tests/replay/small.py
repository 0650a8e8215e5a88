"""Options of a replay that shows everything within a second or two."""

from __future__ import annotations

from sglang_hisparse.replay.options import ReplayOptions

SMALL = {
    "top_k": 32,
    "buffer_size": 64,
    "row_bytes": 16,
    "page_size": 16,
    "device_pages": 60,
    "max_requests": 6,
    "min_context": 128,
    "max_context": 320,
    "max_output": 40,
    "chunk_tokens": 96,
    "scale": 0.4,
    "mirror_pages_per_step": 8,
    "promote_pages_per_step": 4,
}


def small_options(**changes: object) -> ReplayOptions:
    return ReplayOptions(**{**SMALL, **changes})  # type: ignore[arg-type]
