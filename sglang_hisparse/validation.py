"""What `--enable-hisparse` accepts: SGLang's own checks but two, and ours, before any weight is loaded.

The hook around SGLang's `validate_hisparse` calls `validate_server_args`; pool sizing calls `check_host_memory`; the
runtime calls `resolve_settings` again in each process. The rules on flags are one table, `FLAG_RULES`, from which
README's list is generated. It changes no argument and allocates nothing; a refusal is a ConfigError of one line.
"""

import enum
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hisparse.config import DEFAULT_PAGE_SIZE, GIB, ModelFacts, ResolvedConfig, parse_config
from sglang_hisparse.config_text import refuse
from sglang_hisparse.elastic_layout import check_border, pool_obstacle
from sglang_hisparse.index_groups import index_groups
from sglang_hisparse.recording.writer import check_record_file
from sglang_hisparse.storage.checks import check_storage

logger = logging.getLogger(__name__)

_FLAG = "--enable-hisparse"


class Accepts(enum.Enum):
    """The only values of a flag that HiSparse can run with."""

    OFF = "leave it out"
    ONE = "1"
    NULL = "null"
    NONE = "none"

    def holds(self, value: Any) -> bool:
        """Whether `value` of the flag is accepted."""
        if self is Accepts.OFF:
            return not value
        if self is Accepts.ONE:
            return value is None or value == 1
        # SGLang upper-cases some algorithm names, so words are compared without case.
        return value is None or str(value).lower() == self.value


@dataclass(frozen=True, slots=True)
class FlagRule:
    """A server argument that HiSparse cannot run with unless it has the accepted value."""

    field: str
    accepts: Accepts
    why: str

    @property
    def flag(self) -> str:
        """The argument as it is written on the command line."""
        return "--" + self.field.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raise ConfigError unless `value` is accepted."""
        if not self.accepts.holds(value):
            refuse(self.flag, value, f"cannot be combined with {_FLAG} ({self.why})", self.accepts.value)


_SECOND_TIER = "our host tier takes its place: a host row is the token's id, so no host copy may outlive the id"
_STORAGE_KEY = "storage below the host tier is named by storage_backend of --hisparse-config"
_SPLIT_POOL = "every rank must hold whole pages of every layer"
_LEFT_ROWS = "rows would outlive the request or the tree node that owns their page"

FLAG_RULES: tuple[FlagRule, ...] = (
    FlagRule(
        "disaggregation_mode",
        Accepts.NULL,
        "a prefill instance would send ids for rows, and a decode instance "
        "needs a landing path that does not exist yet",
    ),
    FlagRule("enable_pd_role_switch", Accepts.OFF, "prefill-decode disaggregation is not supported yet"),
    FlagRule("disaggregation_decode_enable_offload_kvcache", Accepts.OFF, _SECOND_TIER),
    FlagRule("decoupled_spec_role", Accepts.NULL, "speculative decoding is not supported yet"),
    FlagRule("speculative_algorithm", Accepts.NONE, "speculative decoding is not supported yet"),
    FlagRule("enable_hierarchical_cache", Accepts.OFF, f"{_SECOND_TIER}; {_STORAGE_KEY}"),
    FlagRule("hicache_storage_backend", Accepts.OFF, _STORAGE_KEY),
    FlagRule("enable_lmcache", Accepts.OFF, _SECOND_TIER),
    FlagRule("enable_flexkv", Accepts.OFF, _SECOND_TIER),
    FlagRule("enable_unified_cache_external_linker", Accepts.OFF, _SECOND_TIER),
    FlagRule(
        "radix_cache_backend", Accepts.OFF, "only SGLang's own radix cache is known to free ids through the allocator"
    ),
    FlagRule("enable_session_radix_cache", Accepts.OFF, _LEFT_ROWS),
    FlagRule("enable_streaming_session", Accepts.OFF, _LEFT_ROWS),
    FlagRule("strip_thinking_cache", Accepts.OFF, _LEFT_ROWS),
    FlagRule("enable_mixed_chunk", Accepts.OFF, "a batch is either prefill or decode: only decode rows are resolved"),
    FlagRule("enable_two_batch_overlap", Accepts.OFF, "one resolver state serves one batch at a time"),
    FlagRule("enable_pdmux", Accepts.OFF, "prefill and decode would run at once on the same pages"),
    FlagRule("pp_size", Accepts.ONE, "a page holds a row of every layer"),
    FlagRule("enable_prefill_cp", Accepts.OFF, _SPLIT_POOL),
    FlagRule("attn_cp_size", Accepts.ONE, _SPLIT_POOL),
    FlagRule("dcp_size", Accepts.ONE, _SPLIT_POOL),
    FlagRule("enable_kv_cache_sharding", Accepts.OFF, _SPLIT_POOL),
    FlagRule("enable_dsa_cache_layer_split", Accepts.OFF, _SPLIT_POOL),
    FlagRule("enable_unified_memory", Accepts.OFF, "it would resize pools whose addresses the page table and captured graphs hold"),
    FlagRule("enable_page_major_kv_layout", Accepts.OFF, "rows are addressed layer by layer"),
    FlagRule("prefill_only_disable_kv_cache", Accepts.OFF, "there would be no cache"),
    FlagRule("kv_canary", Accepts.NONE, "it reads rows by token id, and an id is not a device row"),
)


def validate_server_args(view: Any, original: Callable[[Any], None] | None = None) -> ResolvedConfig | None:
    """Check the server arguments; returns the resolved settings, or None where HiSparse is off.

    view: SGLang's resolved view of its arguments, as `validate_hisparse` receives it. original: that function, which is
    run last, with the demand for a disabled radix cache lifted. Raises ConfigError for our rules and whatever SGLang
    raises for its own (cache dtype, attention backends).
    """
    if not view.enable_hisparse:
        return None
    config = parse_config(view.hisparse_config)
    _check_platform(view)
    for rule in FLAG_RULES:
        rule.check(getattr(view, rule.field))
    model_config = _model_config_of(view)
    _check_model(model_config)
    _check_pool_resize(view)
    _check_padding(view)
    resolved = resolve_settings(view.hisparse_config, model_config, page_size=view.page_size)
    if resolved.record_file is not None:
        check_record_file(Path(resolved.record_file))
    _check_border(resolved, view)
    check_storage(resolved, radix_cache=not view.disable_radix_cache)
    if original is not None:
        original(_radix_lifted(view))
    for note in config.notes():
        logger.warning("HiSparse: %s", note)
    logger.info("HiSparse: %s", resolved.summary())
    return resolved


def resolve_settings(text: str | None, model_config: Any, *, page_size: int | None = None) -> ResolvedConfig:
    """Settings for SGLang's ModelConfig, from the text of --hisparse-config; the same result in every process.

    page_size: the allocator's page in tokens; None stands for 64, which all DSA models use on CUDA. Raises ConfigError.
    """
    text_config = model_config.hf_text_config
    index_groups(text_config)
    facts = ModelFacts.from_text_config(text_config, page_size=page_size or DEFAULT_PAGE_SIZE)
    return parse_config(text).resolve(facts)


def check_host_memory(
    required_bytes: int,
    available_bytes: int,
    ranks: int,
    *,
    ratio: float | None = None,
    bytes_at_ratio: Callable[[float], int] | None = None,
) -> None:
    """Raise ConfigError unless every rank's pinned host pool fits, naming the figures that would.

    required_bytes: one rank's host pool. available_bytes: what the ranks of this machine may use together. ratio: the
    host_to_device_ratio that was asked for. bytes_at_ratio: one rank's host pool at another ratio, growing with it.
    """
    share = available_bytes // ranks
    if required_bytes <= share:
        return
    key, value = ("host_to_device_ratio", ratio) if ratio is not None else ("host_pool_gib", required_bytes / GIB)
    why = (
        f"needs {_gib_up(required_bytes)} GiB of host memory per rank, and {_gib_down(share)} GiB are free for each of "
        f"{ranks} ranks"
    )
    if bytes_at_ratio is not None and bytes_at_ratio(1.0) > share:
        refuse(key, _short(value), why, f"a machine with {_gib_up(bytes_at_ratio(1.0) * ranks)} GiB free, for ratio 1")
    allowed = f"host_pool_gib {_gib_down(share)}"
    if bytes_at_ratio is not None and ratio is not None:
        allowed += f", or host_to_device_ratio {_largest_ratio(bytes_at_ratio, share, ratio):g}"
    refuse(key, _short(value), why, allowed)


# ---- checks that no table can hold -----------------------------------------------------------------------------------


def _check_platform(view: Any) -> None:
    from sglang.srt.runtime_context import get_platform

    if view.device != "cuda" or not get_platform().is_cuda:
        refuse(
            "--device", view.device, f"is no NVIDIA GPU here, and {_FLAG} needs its kernels", "cuda on an NVIDIA GPU"
        )


def flags_obstacle(saves_memory: bool) -> str | None:
    """What flags and environment put in the way of a border that moves; None: nothing. saves_memory: --enable-memory-saver."""
    from sglang.srt.environ import envs

    return pool_obstacle(saves_memory=saves_memory, has_custom_pool=envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() is not None)


def _check_border(resolved: ResolvedConfig, view: Any) -> None:
    """What needs no look at a GPU; sizing asks the rest."""
    check_border(resolved.elastic_border, flags_obstacle(view.enable_memory_saver))


def _check_pool_resize(view: Any) -> None:
    from sglang.srt.arg_groups.overrides import post_capture_kv_sizing_planned

    if post_capture_kv_sizing_planned(view):
        refuse(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
            1,
            "resizes the pool after graph capture, and the page table's address and length are fixed",
            "0",
        )


def _check_padding(view: Any) -> None:
    """Ranks with DP attention that are all padded to the longest batch: SGLang runs a decode batch beside an extend as one of one token a
    request then (`ForwardBatch.prepare_mlp_sync_batch`), and no extend resolves rows: those of host-only pages would be left out."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import attn_dp_enabled_of

    backend = view.moe_a2a_backend
    pads = backend == "pplx" or (backend == "deepep_v2" and envs.SGLANG_DEEPEP_V2_FORCE_MAX_LEN.get())
    if pads and attn_dp_enabled_of(view):
        why = f"cannot be combined with {_FLAG} and DP attention (decode batches beside an extend would run as extends, without the resolver)"
        refuse("--moe-a2a-backend", backend, why, "another, deepep_v2 without SGLANG_DEEPEP_V2_FORCE_MAX_LEN")


def _check_model(model_config: Any) -> None:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import (
        get_dsa_index_kpool,
        is_deepseek_dsa,
        is_deepseek_v4,
        is_minimax_sparse,
    )

    hf_config = model_config.hf_config
    name = (getattr(hf_config, "architectures", None) or ["a model without architectures"])[0]
    allowed = "models with a DSA indexer, such as DeepSeek-V3.2 and GLM-5"
    if is_deepseek_v4(hf_config) or is_minimax_sparse(hf_config):
        refuse(
            "--model-path",
            name,
            "has a sparse cache of another layout, which SGLang's own HiSparse serves and this "
            "plugin does not (SGLANG_PLUGINS can leave it out)",
            allowed,
        )
    if not is_deepseek_dsa(hf_config):
        refuse("--model-path", name, "has no DSA indexer", allowed)
    kpool = get_dsa_index_kpool(hf_config)
    if kpool > 1:
        refuse("index_kpool", kpool, f"of {name} pools index keys over tokens", "1, as in DeepSeek-V3.2 and GLM-5")
    if mambaish_config(model_config) is not None:
        refuse("--model-path", name, "mixes DSA with layers that have no such cache", allowed)


def _model_config_of(view: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(view)


def _radix_lifted(view: Any) -> Any:
    """`view`, but with the radix cache reading as disabled, for SGLang's own check."""
    from sglang.srt.arg_groups.overrides import ResolvedView

    # SGLang's check looks for declarations before it asks the view; it must find none that contradict this one.
    return ResolvedView(view, overlay={"disable_radix_cache": True, "_resolved_overrides": ()})


# ---- figures in refusals ---------------------------------------------------------------------------------------------


def _gib_up(count: int) -> float:
    return math.ceil(count / GIB * 10) / 10


def _gib_down(count: int) -> float:
    return math.floor(count / GIB * 10) / 10


def _short(value: float) -> float:
    return round(value, 2)


def _largest_ratio(bytes_at_ratio: Callable[[float], int], share: int, above: float) -> float:
    """The largest ratio in hundredths, at least 1, whose pool fits `share`; the pool at `above` does not fit."""
    low, high = 100, math.floor(above * 100)
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_at_ratio(middle / 100) <= share:
            low = middle
        else:
            high = middle - 1
    return low / 100


def refusals_markdown() -> str:
    """The flag rules as a Markdown table, as README carries it (a test holds the two equal)."""
    lines = ["| flag | accepted | why |", "|---|---|---|"]
    lines += [f"| `{rule.flag}` | {rule.accepts.value} | {rule.why} |" for rule in FLAG_RULES]
    return "\n".join(lines)
