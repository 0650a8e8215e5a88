"""Every place where this package enters SGLang 0.5.23, with the reason beside it.

`HOOKS` is the whole list; `plugin.register` puts it into SGLang's HookRegistry, and `verify` proves at start that each one
took. Hooks are thin: they find the runtime and call it. Originals are never kept in module-level names, because SGLang
rewrites those when it propagates a patch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sglang_hisparse import settings
from sglang_hisparse.errors import HiSparseError
from sglang_hisparse.memory import replicas, sizing
from sglang_hisparse.memory.allocator import HiSparseAllocator
from sglang_hisparse.memory.budget import HiSparsePrefillBudget
from sglang_hisparse.memory.pool import HiSparsePool
from sglang_hisparse.memory.radix import HiSparseRadixCache
from sglang_hisparse.runtime import HiSparseRuntime
from sglang_hisparse.shutdown import with_shutdown
from sglang_hisparse.sync_debug import no_device_sync
from sglang_hisparse.transfer.attention_windows import around_flashmla_kv, around_flashmla_sparse
from sglang_hisparse.transfer.decode_graphs import around_init_cuda_graph_state
from sglang_hisparse.transfer.decode_top_k import TopKTap
from sglang_hisparse.transfer.extend_table import after_init_forward_metadata
from sglang_hisparse.transfer.index_scores import ScoreTap
from sglang_hisparse.validation import validate_server_args

SRT = "sglang.srt."


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook: target below `sglang.srt.`, kind (a HookType's name), what is hooked in, and why."""

    target: str
    kind: str
    function: Callable[..., Any]
    why: str

    @property
    def path(self) -> str:
        return SRT + self.target


# -- before weights load ------------------------------------------------------------------------------------------------


def around_validate(original: Callable[[Any], None], server_args: Any) -> None:
    validate_server_args(server_args, original)


# -- allocation ---------------------------------------------------------------------------------------------------------


def _runtime_of(batch: Any) -> HiSparseRuntime | None:
    allocator = batch.token_to_kv_pool_allocator
    return allocator.runtime if isinstance(allocator, HiSparseAllocator) else None


def around_alloc_for_extend(original: Callable[[Any], Any], batch: Any) -> Any:
    runtime = _runtime_of(batch)
    if runtime is None:
        return original(batch)
    with no_device_sync():
        runtime.begin_extend(batch)
        result = original(batch)
        runtime.end_extend()
    return result


def around_alloc_for_decode(original: Callable[..., Any], batch: Any, token_per_req: int) -> Any:
    runtime = _runtime_of(batch)
    if runtime is None:
        return original(batch, token_per_req)
    with no_device_sync():
        runtime.decode_steps.begin(batch)
        result = original(batch, token_per_req)
        runtime.end_decode(batch)
    return result


def before_check_prefill(adder: Any, req: Any, **kwargs: Any) -> None:
    if isinstance(adder.memory_budget, HiSparsePrefillBudget):
        adder.memory_budget.consider(req)


def after_free_rows(result: None, pool: Any, indices: list[int]) -> None:
    runtime = getattr(pool, "hisparse_runtime", None)
    if runtime is not None:
        runtime.release_slots(indices)


def around_radix_cache_factory(original: Callable[[Any], Any], ctx: Any) -> Any:
    if not isinstance(ctx.params.token_to_kv_pool_allocator, HiSparseAllocator):
        return original(ctx)
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    return create_unified_radix_cache(ctx, cache_class=HiSparseRadixCache)


# -- the forward --------------------------------------------------------------------------------------------------------


def _is_ours(model_runner: Any) -> bool:
    return isinstance(getattr(model_runner, "hisparse_coordinator", None), HiSparseRuntime)


def after_init_coordinator(result: None, model_runner: Any) -> None:
    if _is_ours(model_runner):
        model_runner.hisparse_coordinator.bind_model_runner(model_runner)


def around_forward_raw(original: Callable[..., Any], model_runner: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_ours(model_runner):
        return original(model_runner, *args, **kwargs)
    runtime = model_runner.hisparse_coordinator
    with no_device_sync():
        runtime.before_forward()
    with runtime.pool.forward():
        result = original(model_runner, *args, **kwargs)
    runtime.after_forward()
    return result


def around_topk_paged(
    original: Callable[..., Any], indexer: Any, forward_batch: Any, layer_id: int, q_fp8: Any, weights: Any, metadata: Any
) -> Any:
    runtime = getattr(forward_batch, "hisparse_coordinator", None)
    if isinstance(runtime, HiSparseRuntime):
        if runtime.decode_top_k is not None and forward_batch.forward_mode.is_decode_or_idle():
            metadata = TopKTap(metadata, runtime.decode_top_k)
        if runtime.hot.scores is not None:
            metadata = ScoreTap(metadata, runtime.hot.scores, layer_id - runtime.pool.start_layer)
    return original(indexer, forward_batch, layer_id, q_fp8, weights, metadata)


# -- the scheduler ------------------------------------------------------------------------------------------------------


def after_scheduler_init(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    runtime = scheduler.hisparse_coordinator
    if runtime is None:
        return
    if not isinstance(runtime, HiSparseRuntime):
        raise HiSparseError(f"SGLang built {type(runtime).__name__} where HiSparseRuntime was hooked in; refusing a mixture")
    verify()
    runtime.bind_scheduler(scheduler)


def after_pull_requests(result: list[Any] | None, receiver: Any) -> list[Any] | None:
    return with_shutdown(result)


def before_launch_replicas(controller: Any, server_args: Any, port_args: Any) -> None:
    from sglang.srt.runtime_context import get_memory

    if get_memory().enable_hisparse:
        replicas.open_ledger()


def before_get_next_batch(scheduler: Any, running_batch: Any, *args: Any, **kwargs: Any) -> None:
    runtime = scheduler.hisparse_coordinator
    if not isinstance(runtime, HiSparseRuntime):
        return
    runtime.tick()
    if runtime.admission_may_have_room():
        running_batch.batch_is_full = False


def after_add_request(result: None, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Not one that SGLang has refused (its queue is full, or priorities are off). Without disaggregation, the only mode that is
    accepted, whom it takes is last in the queue; what it takes to abort has one token left, which is no page."""
    runtime, queue = scheduler.hisparse_coordinator, scheduler.waiting_queue
    if isinstance(runtime, HiSparseRuntime) and runtime.border is not None and queue and queue[-1] is req:
        runtime.border.note_arrival(req)


def around_update_running_batch(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """None: no decode step in this iteration, which SGLang knows too (it waits so for requests that are about to end)."""
    runtime = scheduler.hisparse_coordinator
    if isinstance(runtime, HiSparseRuntime) and runtime.border is not None and runtime.border.decode_waits(batch):
        return None
    return original(scheduler, batch)


def after_is_fully_idle(
    result: bool, scheduler: Any, for_health_check: bool = False, ignore_waiting: bool = False
) -> bool:
    """SGLang drops or runs a health check, and flushes now or later, by the answer: it may not depend on one rank's link."""
    runtime = scheduler.hisparse_coordinator
    if not isinstance(runtime, HiSparseRuntime) or for_health_check or not result:
        return result
    return not runtime.has_ongoing_staging(waits=runtime.worker.must_succeed)


def before_flush(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    _settle(scheduler)


def before_memory_release(updater: Any, *args: Any, **kwargs: Any) -> None:
    _settle(updater.scheduler)


def _settle(scheduler: Any) -> None:
    runtime = getattr(scheduler, "hisparse_coordinator", None)
    if isinstance(runtime, HiSparseRuntime):
        runtime.settle()


def after_weight_update(result: None, updater: Any, *args: Any, **kwargs: Any) -> None:
    runtime = getattr(updater.scheduler, "hisparse_coordinator", None)
    if isinstance(runtime, HiSparseRuntime) and runtime.storage is not None:
        runtime.storage.weights_changed()


def around_clear_storage(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    runtime = scheduler.hisparse_coordinator
    if not isinstance(runtime, HiSparseRuntime) or runtime.storage is None:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    runtime.storage.clear()
    return ClearHiCacheReqOutput(success=True)


def after_token_info(stats: Any, observer: Any) -> Any:
    """SGLang counts as used what is neither free nor evictable, logical tokens beyond the border too."""
    allocator = observer.token_to_kv_pool_allocator
    if isinstance(allocator, HiSparseAllocator) and allocator.unbacked_tokens:
        used = stats.full_num_used - allocator.unbacked_tokens
        stats = replace(stats, full_num_used=used, full_token_usage=used / stats.full_capacity)
    return stats


def after_get_worker_info(result: tuple, worker: Any) -> tuple:
    allocator = worker.model_runner.token_to_kv_pool_allocator
    if not isinstance(allocator, HiSparseAllocator):
        return result
    # (max tokens, max prefill tokens, max requests, max queued, max_req_len, max_req_input_len, ...)
    longest = allocator.max_request_tokens()
    return (*result[:4], min(result[4], longest), min(result[5], longest - 5), *result[6:])


HOOKS: tuple[Hook, ...] = (
    Hook(
        "arg_groups.hisparse_hook.validate_hisparse",
        "AROUND",
        around_validate,
        "our configuration is checked before weights load, and the radix cache is allowed",
    ),
    Hook(
        "mem_cache.sparsity.factory._parse_sparse_config",
        "REPLACE",
        settings.sparse_config,
        "one strict schema instead of SGLang's lenient one",
    ),
    Hook(
        "managers.hisparse_coordinator.HiSparseCoordinator",
        "REPLACE",
        HiSparseRuntime,
        "our protocol behind SGLang's method names",
    ),
    Hook(
        "mem_cache.allocator.hisparse.HiSparseTokenToKVPoolAllocator",
        "REPLACE",
        HiSparseAllocator,
        "logical ids known on the CPU, two ledgers",
    ),
    Hook(
        "mem_cache.hisparse_memory_pool.HiSparseDSATokenToKVPool",
        "REPLACE",
        HiSparsePool,
        "translation by page table, index-K for the layers that own an indexer",
    ),
    *(Hook(target, "AROUND", function, why) for target, function, why in sizing.HOOKS),
    Hook(
        "mem_cache.allocation.alloc_for_extend",
        "AROUND",
        around_alloc_for_extend,
        "prefixes are held, room is made and host-only prefixes are promoted before an extend allocates (R21)",
    ),
    Hook(
        "mem_cache.allocation.alloc_for_decode",
        "AROUND",
        around_alloc_for_decode,
        "tells which request slots the decode batch has, on the CPU (R1)",
    ),
    Hook(
        "managers.schedule_policy.PrefillAdder._check_prefill_budget",
        "BEFORE",
        before_check_prefill,
        "what a request costs depends on where its cached prefix lies, and SGLang asks the budget by lengths alone",
    ),
    Hook(
        "mem_cache.memory_pool.ReqToTokenPool.free_rows",
        "AFTER",
        after_free_rows,
        "the one place where every release of a request ends (R12)",
    ),
    Hook(
        "mem_cache.registry.default_radix_cache_factory",
        "AROUND",
        around_radix_cache_factory,
        "the radix tree keeps its ids on the CPU, so that no free and no prefix hit waits for the device (R1)",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.maybe_init_hisparse_coordinator",
        "AFTER",
        after_init_coordinator,
        "gives the resolver the attention backend's own page-table snapshot (R3)",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner._forward_raw",
        "AROUND",
        around_forward_raw,
        "tables and leases change on the forward stream only, before each forward, in every mode (R4)",
    ),
    Hook(
        "layers.attention.dsa.dsa_indexer.Indexer._get_topk_paged",
        "AROUND",
        around_topk_paged,
        "the indexer's scores of a decode step say which hot rows leave, where the configuration wants that; its top-k may come "
        "from the kernel that SGLang uses without HiSparse",
    ),
    Hook(
        "layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_flashmla_sparse",
        "AROUND",
        around_flashmla_sparse,
        "attention of a streamed batch that reads more than its scratch holds runs window after window (bf16)",
    ),
    Hook(
        "layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_flashmla_kv",
        "AROUND",
        around_flashmla_kv,
        "the same for fp8 rows",
    ),
    Hook(
        "layers.attention.dsa_backend.DeepseekSparseAttnBackend.init_forward_metadata",
        "AFTER",
        after_init_forward_metadata,
        "an extend whose pages are all resident translates its page table once, not what every layer selects from it",
    ),
    Hook(
        "layers.attention.dsa_backend.DeepseekSparseAttnBackend.init_cuda_graph_state",
        "AROUND",
        around_init_cuda_graph_state,
        "decode graphs need no page table of single rows: all that they read is in the table of pages (R3)",
    ),
    Hook(
        "managers.scheduler.Scheduler.__init__",
        "AFTER",
        after_scheduler_init,
        "no staging: a prefilled request decodes in the next step (R31); gives the runtime the radix cache",
    ),
    Hook(
        "managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        "AFTER",
        after_pull_requests,
        "SIGTERM to the first rank ends all ranks in one iteration, by the message that SGLang's launcher sends",
    ),
    Hook(
        "managers.data_parallel_controller.DataParallelController.launch_dp_schedulers",
        "BEFORE",
        before_launch_replicas,
        "replicas share this machine's host memory: they divide what the first of them sees",
    ),
    Hook(
        "managers.scheduler.Scheduler.get_next_batch_to_run",
        "BEFORE",
        before_get_next_batch,
        "a request that has ended its prefill needs fewer device pages: admission is asked again (R31); pages go to storage "
        "and come from it",
    ),
    Hook(
        "managers.scheduler.Scheduler._add_request_to_queue",
        "AFTER",
        after_add_request,
        "whether prompts return decides whether memory moves for cached prefixes, and is known first when they arrive",
    ),
    Hook(
        "managers.scheduler.Scheduler.update_running_batch",
        "AROUND",
        around_update_running_batch,
        "a decode step waits for memory that moves to index-K, rather than have requests retracted",
    ),
    Hook(
        "managers.scheduler.Scheduler.is_fully_idle",
        "AFTER",
        after_is_fully_idle,
        "nothing is flushed or released while a host copy is under way (R29)",
    ),
    Hook(
        "managers.scheduler.Scheduler.flush_cache",
        "BEFORE",
        before_flush,
        "a flush that plain SGLang would make is not refused for a host copy: it waits for it (R29)",
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation",
        "BEFORE",
        before_memory_release,
        "SGLang asserts that the server is idle, and would end it for a host copy that is under way (R29)",
    ),
    Hook(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.record_weight_version_after_update",
        "AFTER",
        after_weight_update,
        "pages in storage belong to the weights that the server started with",
    ),
    Hook(
        "managers.scheduler.Scheduler.clear_hicache_storage_wrapped",
        "AROUND",
        around_clear_storage,
        "the user's word to empty storage reaches ours",
    ),
    Hook(
        "managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver._get_token_info",
        "AFTER",
        after_token_info,
        "logs, metrics and load balancing show tokens in use; those without index-K yet are used by nobody",
    ),
    Hook(
        "managers.tp_worker.TpModelWorker.get_worker_info",
        "AFTER",
        after_get_worker_info,
        "a request may be as long as its prefill can be resident, not as long as the logical pool (R16, I8)",
    ),
)


def verify() -> None:
    """Prove that every hook is live in this process. Raises HiSparseError naming those that are not."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = []
    for hook in HOOKS:
        present = pkgutil.resolve_name(hook.path)
        live = present is hook.function if isinstance(hook.function, type) else hasattr(present, "__wrapped__")
        if not live or hook.path not in HookRegistry._patched:
            missing.append(hook.path)
    if missing:
        raise HiSparseError(f"SGLang did not take these hooks: {', '.join(missing)}; refusing to run a mixture")
