"""How many device and logical tokens SGLang's KV cache configurator arrives at under HiSparse.

Owns the memory plan of this process: it is made once, after SGLang has measured the free GPU memory and before it turns
that into tokens, and the ratio in it is the only one used from then on (`settings.ratio`). The functions named around_x
are hooked around SGLang's functions of the same name; the plan's arithmetic lies in layout.py. It must never allocate,
and every rank must arrive at the same plan: figures that are a rank's own are reduced to their minimum first.

The order of events at start, in each rank's process:

1. `around_profile_available_bytes`: free GPU bytes (SGLang's minimum over ranks), host bytes -> plan, ratio.
   A given ratio r solves  D * (kv + r * index) = bytes  for device tokens D; a derived one first takes the logical
   tokens L that host memory holds and solves  D * kv + L * index = bytes,  r = L / D. It returns D * cell, so that
2. SGLang's own division by `around_dsa_indexer_cell_size`'s cell gives exactly D;
3. pool and allocator are built with the ratio that the hook on SGLang's config parser takes from `settings.ratio`;
4. `around_logical_token_capacity` tells the scheduler L instead of D.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import dsa_layer_skips_topk, get_dsa_index_head_dim, is_deepseek_dsa
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES, ranks_per_host
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_exec, get_memory, get_parallel, get_schedule

from sglang_hisparse import settings
from sglang_hisparse.capacity import (
    WINDOWED_BACKENDS,
    PrefillRule,
    decide_plan,
    host_share_bytes,
    hot_shape,
    longest_pages,
    scratch_tokens,
)
from sglang_hisparse.config import ResolvedConfig
from sglang_hisparse.elastic_layout import reason_of, untried_obstacle, with_border
from sglang_hisparse.errors import HiSparseError, InvariantError
from sglang_hisparse.layout import (
    KVShape,
    MemoryPlan,
    describe_plan,
    logical_tokens,
)
from sglang_hisparse.memory import replicas
from sglang_hisparse.memory.elastic import memory_of
from sglang_hisparse.memory.virtual_memory import probe
from sglang_hisparse.validation import flags_obstacle

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    from sglang_hisparse.residency import BorderStep, ResidencyLimits

logger = logging.getLogger(__name__)


class _Plan:
    """The plan of this process. A container, because hook propagation rebinds names in modules."""

    current: MemoryPlan | None = None
    settings: ResolvedConfig | None = None  # that it was made for


def current_plan() -> MemoryPlan | None:
    """The plan of this process, None before SGLang has measured its memory."""
    return _Plan.current


def plan_as_built(device_tokens: int, num_slots: int, border: tuple[BorderStep, ...] = ()) -> MemoryPlan:
    """The plan with the device tokens and request slots that SGLang came to in the end, and the border of the pool."""
    plan = _Plan.current
    if plan is None:
        raise InvariantError("no memory plan was made: SGLang did not measure its memory through our hook")
    built = describe_plan(
        plan.shape,
        hot_shape(num_slots, plan.shape.num_leaders, settings.resolved(), plan.hot.result_rows - settings.resolved().top_k),
        device_tokens=device_tokens,
        ratio=plan.ratio,
        requested_ratio=plan.requested_ratio,
        device_budget_bytes=plan.device_budget_bytes,
        host_budget_bytes=plan.host_budget_bytes,
        scratch_tokens=plan.scratch_tokens,
    )
    return replace(with_border(built, border), fixed_because=plan.fixed_because)


def planned_scratch_tokens() -> int:
    """Tokens of the scratch of streamed prefills; where no plan was made for these settings, what they name, or none."""
    resolved = settings.resolved()
    if _Plan.current is not None and _Plan.settings is resolved:
        return _Plan.current.scratch_tokens
    return resolved.prefill_scratch_tokens or 0


def prefill_rule(limits: ResidencyLimits, row_bytes: int) -> PrefillRule:
    """How this server prefills: its chunks, its scratch, its short extends. row_bytes: of one token and layer."""
    schedule, page = get_schedule(), limits.page_size
    chunk_pages = -(-max(schedule.chunked_prefill_size or 0, 0) // page)
    scratch_pages = min(planned_scratch_tokens() // page, limits.num_logical_pages)
    if scratch_pages and check_cuda_graph_backend(Phase.PREFILL, Backend.FULL):
        logger.warning("HiSparse: no prefill is streamed, since --cuda-graph-backend-prefill full fixes what attention reads")
        scratch_pages = 0
    if get_memory().disable_radix_cache and chunk_pages > limits.least_device_pages - limits.hot_pages - 1:
        # SGLang then cuts prompts by itself, and asks nobody how long a chunk may be.
        scratch_pages = 0
    return PrefillRule(
        num_device_pages=limits.least_device_pages,
        hot_pages=limits.hot_pages,
        smallest_pages=limits.smallest_pages,
        scratch_pages=scratch_pages,
        chunk_pages=chunk_pages,
        short_extend_tokens=settings.resolved().stream_extend_tokens,
        union_tokens=settings.resolved().union_extend_tokens,
        top_k=settings.resolved().top_k,
        row_bytes=row_bytes,
        has_windows=get_exec().kernel.dsa_prefill_backend in WINDOWED_BACKENDS,
    )


def applies_to(configurator: KVCacheConfigurator) -> bool:
    """Whether this configurator builds the pools that HiSparse replaces: those of the target model."""
    return (
        get_memory().enable_hisparse
        and not configurator.is_draft_worker
        and not configurator.is_hybrid_swa
        and is_deepseek_dsa(configurator.model_config.hf_config)
    )


def leader_layers(configurator: KVCacheConfigurator, num_layers: int) -> int:
    """How many of this rank's layers own an indexer."""
    from sglang.srt.model_executor.pool_configurator import _get_dsa_cache_layer_ids

    config = configurator.model_config.hf_config
    return sum(not dsa_layer_skips_topk(config, layer) for layer in _get_dsa_cache_layer_ids(configurator, num_layers))


def kv_shape(configurator: KVCacheConfigurator) -> KVShape:
    """Bytes of one token in the pools that this configurator will build."""
    from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim

    dtype = configurator.kv_cache_dtype
    dim = calculate_mla_kv_cache_dim(model_config=configurator.model_config, kv_cache_dtype=dtype)
    head = get_dsa_index_head_dim(configurator.model_config.hf_config)
    num_layers = configurator.layer_info.num_effective_layers
    return KVShape(
        num_layers=num_layers,
        num_leaders=leader_layers(configurator, num_layers),
        row_bytes=dim * dtype.itemsize,
        index_row_bytes=head + head // DSATokenToKVPool.quant_block_size * 4,
        page_size=get_schedule().page_size,
    )


def host_bytes_per_rank() -> int:
    """Host memory that each rank may pin, the same figure on all ranks of a replica.

    SGLang's reserve stays free for everything else, but on a small machine no more than a quarter. Replicas divide what was free
    before the first of them pinned memory, and none takes more than is free now.
    """
    available = available_host_memory_bytes(allow_cgroup_fallback=True)
    share = host_share_bytes(available, HICACHE_HOST_MEMORY_RESERVE_BYTES, ranks_per_host())
    if get_parallel().dp_size > 1:
        at_first = replicas.first_seen(available)
        share = min(share, host_share_bytes(at_first, HICACHE_HOST_MEMORY_RESERVE_BYTES, ranks_on_host()))
    return _min_over_ranks(share)


def ranks_on_host() -> int:
    """Ranks of all replicas on this machine: SGLang counts those of its own world. With DP attention all are in one world."""
    return ranks_per_host() * get_parallel().dp_size


def _min_over_ranks(value: int) -> int:
    # Also a barrier: no rank pins memory before every rank has looked at what is free.
    if get_parallel().launch_world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=get_parallel().world_group.cpu_group)
    return int(tensor.item())


def make_plan(configurator: KVCacheConfigurator, device_bytes: int, resolved: ResolvedConfig) -> MemoryPlan:
    """Divide device_bytes and this machine's host memory for the configurator's model. Raises ConfigError.

    A ratio that was given is kept or refused: only host_pool_gib, which is a cap by its meaning, may shrink it.
    """
    shape = kv_shape(configurator)
    # SGLang counts slots from the tokens it gets later; they cannot be more than for a pool of KV rows alone.
    num_slots = configurator.resolve_max_num_reqs(device_bytes // shape.kv_token_bytes) + 1
    context_tokens = configurator.model_config.context_len
    return decide_plan(
        shape,
        hot_shape(num_slots, shape.num_leaders, resolved, longest_pages(context_tokens, shape)),
        device_bytes=device_bytes,
        host_bytes=host_bytes_per_rank(),
        ranks=ranks_on_host(),
        ratio=resolved.host_to_device_ratio,
        host_pool_bytes=resolved.host_pool_bytes,
        max_device_tokens=get_schedule().max_total_tokens,
        scratch_tokens=scratch_tokens(shape, device_bytes, context_tokens, resolved.prefill_scratch_tokens),
        elastic=resolved.elastic_border,
        obstacle=border_obstacle(configurator.device, resolved.elastic_border),
    )


def border_obstacle(device: Any, wanted: bool | None) -> str | None:
    """What keeps memory of the cache on `device` from moving between KV and index-K on any rank, the same verdict on all; None: nothing.

    wanted: the setting; where it is left open, a cache on the CPU and one of several GPUs have a fixed border.
    """
    if wanted is False:
        return None
    if torch.device(device).type == "cpu":
        return None if wanted else "needs a GPU, and the cache is on the CPU"
    if (untried := untried_obstacle(get_parallel().launch_world_size, wanted)) is not None:
        return untried  # on every rank, before they ask each other
    why = flags_obstacle(get_exec().features.enable_memory_saver)
    if why is None:
        try:
            probe(memory_of(device))
        except HiSparseError as error:
            why = f"needs virtual memory of the CUDA driver: {reason_of(error)}"
    if not _min_over_ranks(int(why is None)) and why is None:
        why = "needs virtual memory of the CUDA driver on all ranks, and another one has none"
    return why


def token_bytes(plan: MemoryPlan, device_bytes: int, max_device_tokens: int | None) -> int:
    """Bytes that SGLang divides by its cell to get the plan's device tokens.

    Where the user's cap decided, SGLang applies it itself: what would fit beyond it is left in, or SGLang would warn
    that the cap exceeds what fits.
    """
    shape = plan.shape
    cell = shape.kv_token_bytes + int(shape.index_token_bytes * plan.ratio)
    tokens = plan.device_tokens
    if max_device_tokens is not None and tokens == max_device_tokens // shape.page_size * shape.page_size:
        tokens += (device_bytes - plan.device_bytes) // cell // shape.page_size * shape.page_size
    return tokens * cell


def around_profile_available_bytes(
    original: Callable[..., int], self: KVCacheConfigurator, pre_model_load_memory: int
) -> int:
    """AROUND KVCacheConfigurator._profile_available_bytes: charge what is ours, fix the ratio, leave the tokens."""
    device_bytes = original(self, pre_model_load_memory)
    if not applies_to(self):
        return device_bytes
    resolved = settings.resolve(self.model_config)
    plan = make_plan(self, device_bytes, resolved)
    _Plan.current, _Plan.settings = plan, resolved
    settings.fix_ratio(plan.ratio)
    settings.fix_border(bool(plan.border))
    if plan.fixed_because is not None and (get_parallel().launch_world_size == 1 or torch.distributed.get_rank() == 0):
        logger.info("HiSparse: elastic_border is off, since %s", plan.fixed_because)
    if plan.host_bound:
        logger.warning(
            "host_to_device_ratio: %g shrinks to %.4g, since host_pool_gib holds %d tokens per rank",
            plan.requested_ratio,
            plan.ratio_at_end,
            plan.host_tokens,
        )
    return token_bytes(plan, device_bytes, get_schedule().max_total_tokens)


def around_dsa_indexer_cell_size(
    original: Callable[..., int],
    self: Any,
    *,
    kvc: KVCacheConfigurator,
    num_layers: int,
    allocate_all_layers: bool = False,
) -> int:
    """AROUND DefaultPoolConfigurator._compute_dsa_indexer_cell_size: followers have no index-K under HiSparse either.

    SGLang's arithmetic stays (bytes per row times ratio); it is only told how many layers there are.
    """
    if allocate_all_layers or not applies_to(kvc):
        return original(self, kvc=kvc, num_layers=num_layers, allocate_all_layers=allocate_all_layers)
    return original(self, kvc=kvc, num_layers=leader_layers(kvc, num_layers), allocate_all_layers=True)


def around_should_elide_dsa_index_k(original: Callable[..., bool], *, is_draft_worker: bool) -> bool:
    """AROUND kv_cache_configurator._should_elide_dsa_index_k: makes the pool get skip_topk_layers."""
    memory = get_memory()
    if memory.enable_hisparse and not is_draft_worker and not memory.enable_unified_cache_external_linker:
        return True
    return original(is_draft_worker=is_draft_worker)


def around_logical_token_capacity(
    original: Callable[..., int], self: KVCacheConfigurator, *, max_total_num_tokens: int
) -> int:
    """AROUND KVCacheConfigurator.logical_token_capacity: the scheduler counts logical tokens (R16)."""
    if not applies_to(self):
        return original(self, max_total_num_tokens=max_total_num_tokens)
    return logical_tokens(max_total_num_tokens, settings.ratio(), get_schedule().page_size)


_CONFIGURATOR = "mem_cache.kv_cache_configurator."

HOOKS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    (
        _CONFIGURATOR + "KVCacheConfigurator._profile_available_bytes",
        around_profile_available_bytes,
        "hot state, page table and index-K of all logical tokens are paid before tokens are counted; fixes the ratio",
    ),
    (
        "model_executor.pool_configurator.DefaultPoolConfigurator._compute_dsa_indexer_cell_size",
        around_dsa_indexer_cell_size,
        "index-K is charged for the layers that own an indexer, not for all (R25)",
    ),
    (
        _CONFIGURATOR + "_should_elide_dsa_index_k",
        around_should_elide_dsa_index_k,
        "layers that reuse another's top-k get no index-K buffer (R25)",
    ),
    (
        _CONFIGURATOR + "KVCacheConfigurator.logical_token_capacity",
        around_logical_token_capacity,
        "the scheduler, its statistics and its leak check count logical tokens (R16)",
    ),
)
"""What hooks.py hooks AROUND SGLang: target below `sglang.srt.`, function, reason."""
