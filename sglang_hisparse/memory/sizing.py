"""How many device and logical tokens SGLang's KV cache configurator arrives at under HiSparse.

Owns the memory plan of this process: it is made once, after SGLang has measured the free GPU memory and before it turns
that into tokens, and the ratio in it is the only one used from then on (`current_ratio`). The functions named around_x
are hooked around SGLang's functions of the same name; the plan's arithmetic lies in layout.py. It must never allocate,
and every rank must arrive at the same plan: figures that are a rank's own are reduced to their minimum first.

The order of events at start, in each rank's process:

1. `around_profile_available_bytes`: free GPU bytes (SGLang's minimum over ranks), host bytes -> plan, ratio.
   A given ratio r solves  D * (kv + r * index) = bytes  for device tokens D; a derived one first takes the logical
   tokens L that host memory holds and solves  D * kv + L * index = bytes,  r = L / D. It returns D * cell, so that
2. SGLang's own division by `around_dsa_indexer_cell_size`'s cell gives exactly D;
3. pool and allocator are built with the ratio that the hook on SGLang's config parser reads from `current_ratio`;
4. `around_logical_token_capacity` tells the scheduler L instead of D.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import dsa_layer_skips_topk, get_dsa_index_head_dim, is_deepseek_dsa
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES, ranks_per_host
from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.layout import (
    HotShape,
    KVShape,
    MemoryPlan,
    describe_plan,
    logical_tokens,
    plan_memory,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SizingRequest:
    """What the settings and the kernels contribute to the plan.

    ratio: host_to_device_ratio, None to derive it. host_pool_bytes: cap on one rank's pinned memory. buffer_rows: rows
    of a hot buffer. top_k: rows of the resolver's output. hot_state_bytes(num_slots, buffer_rows): GPU bytes of one
    index group's hot state.
    """

    ratio: float | None
    host_pool_bytes: int | None
    buffer_rows: int
    top_k: int
    hot_state_bytes: Callable[[int, int], int]


class _Sizing:
    """The process's request and plan. A container, because hook propagation rebinds names in modules."""

    def __init__(self) -> None:
        self.provider: Callable[[], SizingRequest] | None = None
        self.plan: MemoryPlan | None = None

    def request(self) -> SizingRequest:
        if self.provider is None:
            raise InvariantError("sizing is used before bind() named where its settings come from")
        return self.provider()


_sizing = _Sizing()


def bind(provider: Callable[[], SizingRequest]) -> None:
    """Name where the settings come from; asked when sizing runs, since they are published after hooks are applied."""
    _sizing.provider = provider
    _sizing.plan = None


def current_plan() -> MemoryPlan | None:
    """The plan of this process, None before SGLang has measured its memory."""
    return _sizing.plan


def current_ratio() -> float | None:
    """Logical tokens per device token: the plan's; before there is one the given ratio, None where none was given."""
    return _sizing.request().ratio if _sizing.plan is None else _sizing.plan.ratio


def plan_as_built(device_tokens: int, num_slots: int) -> MemoryPlan:
    """The plan with the device tokens and request slots that SGLang came to in the end, for the log."""
    plan = _sizing.plan
    if plan is None:
        raise InvariantError("no memory plan was made: SGLang did not measure its memory through our hook")
    request = _sizing.request()
    hot = replace(plan.hot, num_slots=num_slots, state_bytes=request.hot_state_bytes(num_slots, request.buffer_rows))
    return describe_plan(
        plan.shape,
        hot,
        device_tokens=device_tokens,
        ratio=plan.ratio,
        requested_ratio=plan.requested_ratio,
        device_budget_bytes=plan.device_budget_bytes,
        host_budget_bytes=plan.host_budget_bytes,
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
    """Host memory that each rank may pin, the same figure on all ranks.

    SGLang's reserve stays free for everything else, but on a small machine no more than a quarter.
    """
    available = available_host_memory_bytes(allow_cgroup_fallback=True)
    reserve = min(HICACHE_HOST_MEMORY_RESERVE_BYTES, available // 4)
    return _min_over_ranks((available - reserve) // ranks_per_host())


def _min_over_ranks(value: int) -> int:
    # Also a barrier: no rank pins memory before every rank has looked at what is free.
    if get_parallel().launch_world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=get_parallel().world_group.cpu_group)
    return int(tensor.item())


def make_plan(configurator: KVCacheConfigurator, device_bytes: int, request: SizingRequest) -> MemoryPlan:
    """Divide device_bytes and this machine's host memory for the configurator's model. Raises ConfigError."""
    shape = kv_shape(configurator)
    # SGLang counts slots from the tokens it gets later; they cannot be more than for a pool of KV rows alone.
    num_slots = configurator.resolve_max_num_reqs(device_bytes // shape.kv_token_bytes) + 1
    hot = HotShape(
        num_slots=num_slots,
        buffer_rows=request.buffer_rows,
        num_groups=shape.num_leaders,
        state_bytes=request.hot_state_bytes(num_slots, request.buffer_rows),
        result_rows=request.top_k,
    )
    return plan_memory(
        shape,
        hot,
        device_bytes=device_bytes,
        available_host_bytes=host_bytes_per_rank(),
        ratio=request.ratio,
        host_pool_bytes=request.host_pool_bytes,
        max_device_tokens=get_schedule().max_total_tokens,
    )


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
    plan = make_plan(self, device_bytes, _sizing.request())
    _sizing.plan = plan
    if plan.host_bound:
        logger.warning(
            "host_to_device_ratio: %g shrinks to %.4g, since host memory holds %d tokens per rank",
            plan.requested_ratio,
            plan.ratio,
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
    ratio = current_ratio()
    if ratio is None:
        raise InvariantError("the ratio is asked for before it was derived")
    return logical_tokens(max_total_num_tokens, ratio, get_schedule().page_size)
