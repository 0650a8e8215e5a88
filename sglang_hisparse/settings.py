"""The settings of this process: what `--hisparse-config` said, resolved for the model that is being served.

SGLang parses its own HiSparse configuration lazily, in each process; the hooks route that call here. Sizing resolves the
settings first (it knows the model), and fixes the ratio when it was left to be derived; everything later reads them.
"""

from __future__ import annotations

from typing import Any

from sglang_hisparse.config import ResolvedConfig
from sglang_hisparse.errors import HiSparseError
from sglang_hisparse.residency import ResidencyPolicy


class _State:
    resolved: ResolvedConfig | None = None
    ratio: float | None = None
    border_moves = False  # as sizing has decided


def resolve(model_config: Any) -> ResolvedConfig:
    """Resolve the settings for SGLang's ModelConfig, once a process. Raises ConfigError."""
    if _State.resolved is None:
        from sglang.srt.runtime_context import get_memory

        from sglang_hisparse.validation import resolve_settings

        _State.resolved = resolve_settings(get_memory().hisparse_config, model_config)
        _State.ratio = _State.resolved.host_to_device_ratio
    return _State.resolved


def resolved() -> ResolvedConfig:
    """The resolved settings; sizing has made them."""
    if _State.resolved is None:
        raise HiSparseError("the HiSparse settings are read before the pools are sized")
    return _State.resolved


def fix_ratio(ratio: float) -> None:
    """Sizing has derived logical tokens per device token; fixed for the life of the process."""
    _State.ratio = ratio


def ratio() -> float:
    """Logical tokens per device token."""
    if _State.ratio is None:
        raise HiSparseError("host_to_device_ratio is read before sizing has derived it")
    return _State.ratio


def fix_border(moves: bool) -> None:
    """Sizing has decided whether memory moves from KV to index-K; where the setting says it, that stays."""
    _State.border_moves = moves


def elastic_border() -> bool:
    """Whether memory moves from KV to index-K; no, where nothing was resolved, or nothing decided what was left open."""
    wanted = None if _State.resolved is None else _State.resolved.elastic_border
    return _State.border_moves if wanted is None else wanted


def reset() -> None:
    """Forget everything: for tests that size pools more than once in a process."""
    _State.resolved = _State.ratio = None
    _State.border_moves = False


def sparse_config() -> Any:
    """The settings in SGLang's own form, for the places in SGLang that ask for it."""
    from sglang.srt.mem_cache.sparsity.factory import SparseConfig

    settings = resolved()
    return SparseConfig(
        top_k=settings.top_k,
        device_buffer_size=settings.device_buffer_size,
        host_to_device_ratio=ratio(),
        page_size=settings.page_size,
        sparse_extra_config={},
    )


def residency_policy(page_bytes_all_layers: int) -> ResidencyPolicy:
    """The knobs of the residency coordinator; byte budgets become pages of `page_bytes_all_layers`."""
    settings = resolved()
    return ResidencyPolicy(
        mode=settings.residency,
        mirroring=settings.mirroring,
        watermark_low=settings.watermark_low,
        watermark_high=settings.watermark_high,
        mirror_pages_per_step=max(1, settings.mirror_bytes_per_step // page_bytes_all_layers),
        promote_pages_per_step=settings.promote_bytes_per_step // page_bytes_all_layers,
    )
