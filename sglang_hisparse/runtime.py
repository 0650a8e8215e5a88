"""The coordinator class that SGLang calls: its method names on the outside, the residency protocol inside.

Takes the place of SGLang's HiSparseCoordinator. Scheduler, batch result processor, model runner and DSA backend call it;
it turns each call into residency transactions on the CPU, hands plans to the transfer worker, and launches the resolver
inside the captured graph. It takes no decision of its own and never waits for the device on a scheduler path.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

import torch

from sglang_hisparse import settings
from sglang_hisparse.admission import AdmissionGate
from sglang_hisparse.admission_view import gate_for
from sglang_hisparse.audit import RowAudit, RowFault
from sglang_hisparse.errors import HiSparseError, InvariantError
from sglang_hisparse.faults import FaultPlan, FaultSeam
from sglang_hisparse.layout_table import render
from sglang_hisparse.memory.allocator import HiSparseAllocator
from sglang_hisparse.memory.decode_steps import DecodeSteps
from sglang_hisparse.memory.elastic import ElasticBorder
from sglang_hisparse.memory.extends import Extends, Launch
from sglang_hisparse.memory.host_tier import HostTier
from sglang_hisparse.memory.pool import HiSparsePool
from sglang_hisparse.memory.sizing import current_plan, plan_as_built, prefill_rule
from sglang_hisparse.metrics import Reporter
from sglang_hisparse.ranks import is_one_of_several, least_of_ranks
from sglang_hisparse.recording.recorder import recorder_of
from sglang_hisparse.residency import ResidencyCoordinator, ResidencyLimits, SpillPolicy
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.shutdown import obey_sigterm
from sglang_hisparse.stats import StatsWriter, exceeds_device, residency_counts, resolver_counts
from sglang_hisparse.storage.counters import STORAGE_COUNTS
from sglang_hisparse.storage.tier import StorageTier
from sglang_hisparse.transfer.copy_engine import CopyEngine
from sglang_hisparse.transfer.decode_top_k import DecodeTopK
from sglang_hisparse.transfer.hot_buffer import GroupTable, HotBuffers, RealRows
from sglang_hisparse.transfer.last_resort import copy_to_host_now
from sglang_hisparse.transfer.prefix_stream import PrefixStream
from sglang_hisparse.transfer.worker import TransferWorker

logger = logging.getLogger(__name__)

def _refuse_mixtures(allocator: Any, pool: Any, num_draft_tokens: int) -> None:
    for part, wanted in ((allocator, HiSparseAllocator), (pool, HiSparsePool)):
        if not isinstance(part, wanted):
            raise HiSparseError(f"SGLang built {type(part).__name__} where {wanted.__name__} was hooked in; refusing a mixture")
    if num_draft_tokens:
        raise HiSparseError(f"speculative decoding ({num_draft_tokens} draft tokens) is not supported yet")


class HiSparseRuntime:
    """One for each rank's target model. Constructor arguments are those of SGLang's class."""

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        top_k: int,
        device_buffer_size: int,
        device: str,
        tp_group: Any,
        host_to_device_ratio: float = 2,
        swap_in_block_size: int | None = None,
        shared_index_layers: list[bool] | None = None,
        num_draft_tokens: int = 0,
    ) -> None:
        allocator, pool = token_to_kv_pool_allocator, token_to_kv_pool_allocator.get_kvcache()
        _refuse_mixtures(allocator, pool, num_draft_tokens)
        self.req_to_token_pool = req_to_token_pool
        self.allocator, self.pool = allocator, pool
        self.page_size = allocator.page_size
        self.top_k, self.device_buffer_size, self.device = top_k, device_buffer_size, device
        self.padded_buffer_size = device_buffer_size
        self.tp_group = tp_group
        self.ack_staging_queue: list[Any] = []  # nothing is ever staged: a prefilled request decodes in the next step
        num_slots = req_to_token_pool.req_to_token.shape[0]
        limits = ResidencyLimits(
            num_logical_pages=allocator.size_full // self.page_size,
            num_device_pages=allocator.device_pages.num_pages,
            num_slots=num_slots,
            max_pages_per_slot=-(-req_to_token_pool.max_context_len // self.page_size) + 1,
            hot_pages=device_buffer_size // self.page_size,
            page_size=self.page_size,
            border=pool.border,
        )
        self.mem_pool_host = HostTier.create(pool, allocator.size_full, self.page_size, pin=True)
        self.mem_pool_host.bind_available(allocator.available_size)
        self.groups = GroupTable.from_reuse_flags(shared_index_layers, pool.layer_num)
        self.hot = HotBuffers(
            groups=self.groups,
            num_slots=num_slots,
            buffer_size=device_buffer_size,
            page_size=self.page_size,
            top_k=top_k,
            max_pages=limits.max_pages_per_slot,
            row_bytes=pool.row_bytes,
            page_table=allocator.page_table,
            host_bases=self.mem_pool_host.layer_bases(),
            device_bases=pool.device_bases(),
            evicts_by_score=settings.resolved().evicts_by_score,
        )
        self.decode_top_k = DecodeTopK.from_env(limits.max_pages_per_slot, allocator.page_table.device)
        self.worker = TransferWorker(
            host_bases=self.hot.host_bases,
            device_bases=self.hot.device_bases,
            page_bytes=self.page_size * pool.row_bytes,
            page_table=allocator.page_table,
            hot_pages=self.hot.hot_pages,
            hot_state=self.hot,
        )
        self.worker.engine = CopyEngine.from_env(self.mem_pool_host, pool)
        policy = settings.residency_policy(self.worker.page_bytes * pool.layer_num)
        self.reporter = Reporter(self)
        self.residency = ResidencyCoordinator(limits, policy, allocator.device_pages, self.reporter.mirror)
        self.policy = SpillPolicy(self.residency)
        self.extends = self._build_extends()
        self._answer_failed_copies(tp_group)
        self.border = None if pool.elastic is None else ElasticBorder(self, pool.elastic)
        self.plant(FaultPlan.from_env())
        self.num_real_reqs = RealRows(self.hot.num_real_rows)
        self.audit, self.fault = RowAudit.from_env(self), RowFault.from_env(self)
        self.stats, self.recorder = StatsWriter.from_env(self), recorder_of(self)
        self._model_runner: Any = None
        self._scheduler: Any = None
        self.tree_cache: Any = None
        self.storage: StorageTier | None = None
        self.gate: AdmissionGate | None = None
        self._committed_seen = 0
        self._launch: Launch | None = None
        self.decode_steps = DecodeSteps(self.page_size, num_slots)
        allocator.bind_runtime(self)
        req_to_token_pool.hisparse_runtime = self

    def _answer_failed_copies(self, tp_group: Any) -> None:
        self.worker.on_failed = self.residency.on_failed
        self.worker.copy_now = functools.partial(copy_to_host_now, self.worker, self.pool, self.mem_pool_host)
        # A rank may not decide by a failure that the other ranks have not seen (R30): there no copy is given back.
        self.worker.must_succeed = is_one_of_several(tp_group)

    def _build_extends(self) -> Extends:
        """How prefills are made resident or streamed, and the scratch for it."""
        rule = prefill_rule(self.residency.limits, self.pool.row_bytes)
        if not rule.scratch_pages:
            return Extends(self.residency, self.make_room, rule, None)
        stream = self.pool.prefix_stream = PrefixStream(
            like=self.pool.kv_buffer[0],
            host_bases=self.hot.host_bases,
            device_bases=self.hot.device_bases,
            page_table=self.allocator.page_table,
            page_size=self.page_size,
            num_pages=rule.scratch_pages,
        )
        return Extends(self.residency, self.make_room, rule, stream)

    @property
    def extend_slots(self) -> list[int]:
        """Request slots of the extend batch that is being allocated, in batch order."""
        return self.extends.slots

    # -- wiring -----------------------------------------------------------------------------------------------------

    def bind_model_runner(self, model_runner: Any) -> None:
        """Gives access to the attention backend's metadata: the step's own snapshot of logical pages (R3)."""
        self._model_runner = model_runner

    def bind_scheduler(self, scheduler: Any) -> None:
        """The scheduler is built. Its staging flag goes off: with it, a prefilled request would wait for its host copy
        outside every batch (R31). The flag of the process stays, since other places need it."""
        self._scheduler, self.tree_cache = scheduler, scheduler.tree_cache
        scheduler.enable_hisparse = False
        self.hot.forget_counts()
        self.audit.forget_counts()
        first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if current_plan() is not None and first_rank:
            plan = plan_as_built(self.allocator.device_tokens, self.hot.hot_pages.shape[0], self.pool.border)
            logger.info("HiSparse memory of each rank\n%s", render(plan))
        self.reporter.bind(scheduler)
        self._open_storage(scheduler)
        if self.border is not None and is_one_of_several(self.tp_group):
            self.border.bind_agreement(functools.partial(least_of_ranks, self.tp_group))
        self.gate = gate_for(self)
        obey_sigterm(scheduler)

    def _open_storage(self, scheduler: Any) -> None:
        """SGLang's scheduler then asks the radix cache for prefetches, as it would with HiCache."""
        self.storage = StorageTier.of(self, scheduler)
        if self.storage is not None:
            self.tree_cache.storage = self.storage
            scheduler.enable_hicache_storage = True

    def plant(self, plan: FaultPlan) -> None:
        """Let the faults of `plan` happen from now on; none, when it names none (but for those of the captured graph)."""
        self.faults = self.worker.faults = FaultSeam(plan) if plan.needs_seam else None

    def set_decode_producer_stream(self, stream: Any) -> None:
        self.worker.forward_stream = stream

    # -- extend (called around SGLang's alloc_for_extend) -----------------------------------------------------------

    def begin_extend(self, batch: Any) -> None:
        """Hold the prefixes of the whole batch, spill, promote; SGLang allocates next (R21)."""
        self.extends.begin(batch)

    def allocate_spec_scratch(self, req_pool_indices: list[int]) -> None:
        """SGLang tells the request slots of the extend batch here, in batch order, before it allocates tokens."""
        self.extends.attach(req_pool_indices)

    def end_extend(self) -> None:
        self._launch = self.extends.end()
        if self.gate is not None:
            self.gate.note_extend()

    # -- decode (called around SGLang's alloc_for_decode, as decode_steps.begin is) ---------------------------------

    def end_decode(self, batch: Any) -> None:
        self._launch, slots = self.decode_steps.end(batch), self.decode_steps.slots
        self.hot.note_decode()
        if self.recorder.records:
            self.recorder.before_decode(slots.tolist(), (batch.seq_lens_cpu + 1).tolist())
        if self.gate is not None:
            self.gate.note_decode(len(slots))

    def make_room(self, num_pages: int) -> bool:
        """Spill until `num_pages` device pages are free."""
        if num_pages <= self.residency.device_pages.num_free:
            return True
        done = self.make_room_as_promised(num_pages)
        if done and not self.extends.is_allocating and exceeds_device(self.residency, num_pages):
            self.residency.counters.retractions_avoided += 1
        return done

    def make_room_as_promised(self, num_pages: int) -> bool:
        """What admission has promised does not fail with a copy: then the pages that are needed are copied the slow way."""
        failed_before = self.residency.counters.copies_failed
        if self.policy.make_room(num_pages):
            return True
        if self.residency.counters.copies_failed == failed_before:
            return False
        before, self.worker.must_succeed = self.worker.must_succeed, True
        try:
            return self.policy.make_room(num_pages)
        finally:
            self.worker.must_succeed = before

    def refuses(self) -> bool:
        """Whether fault injection answers this question for room with no."""
        return self.faults is not None and self.faults.refuses()

    def committed_device_pages(self) -> int:
        """Device pages that the live requests need at worst: the ledger of `memory/budget.py`."""
        return self.residency.book.committed_pages()

    def admission_may_have_room(self) -> bool:
        """Whether the ledger has shrunk or a prefill or lease has ended, the gate has new figures, or the last batch had no room
        in the scratch: SGLang stops asking once a batch was full."""
        if self.faults is not None:
            self.faults.abort_one(self._scheduler)
        before, self._committed_seen = self._committed_seen, self.committed_device_pages()
        has_news = self.residency.book.take_settled()
        has_news |= self.gate is not None and self.gate.take_news()
        has_news |= self.border is not None and self.border.take_news()
        return self._committed_seen < before or has_news or self.extends.take_refusal()

    def tick(self) -> None:
        """Before each batch is chosen, on all ranks alike; also while the server idles."""
        if self.storage is not None:
            self.storage.tick()
        if self.border is not None:
            self.border.tick()

    def want_logical(self, num_pages: int) -> None:
        """So many logical pages are about to be taken."""
        if self.border is not None:
            self.border.want(num_pages)

    def defers_to_border(self, num_pages: int) -> bool:
        """Whether who needs so many free logical pages waits for memory to move, rather than have cached prefixes evicted."""
        return self.border is not None and self.border.defers(num_pages)

    # -- the forward ------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """On the forward stream, before every forward of the target model, in every mode (R4)."""
        if done := self.worker.poll():
            self._note_completed(done)
        self.audit.before_plan()
        if self.gate is not None:
            self.gate.tick()
        self._tick_policy()
        if self.border is not None:
            self.border.before_plan()
        plan = self.residency.take_plan()
        self.worker.apply(plan)
        self.hot.before_forward()
        launch, self._launch = self._launch, None
        if launch is not None:
            self.residency.check_step(launch.slots)
        self.extends.before_forward(launch)
        if launch is not None and launch.changes_pages:
            self.residency.note_launch(launch.slots, launch.seq_lens, launch.prefill_ends)
        elif launch is not None:
            self.residency.note_quiet_launch()
        self.audit.after_plan(plan)
        self._report()

    def after_forward(self) -> None:
        """The forward has been launched."""
        self.extends.after_forward()

    def _note_completed(self, transfer_ids: list[int]) -> None:
        self.residency.on_completed(transfer_ids)
        self.reporter.note_completed(transfer_ids)

    def _tick_policy(self) -> None:
        """Below the low watermark the next steps would lack pages: what spilling gives then avoids a retraction too."""
        if self.policy.is_at_rest():
            return
        counters, low = self.residency.counters, self.policy.watermark_low_pages
        is_low, before = self.residency.device_pages.num_free < low, counters.pages_spilled
        self.policy.tick()
        if is_low and counters.pages_spilled > before and exceeds_device(self.residency, low):
            counters.retractions_avoided += 1

    def _report(self) -> None:
        self.recorder.before_forward()
        self.stats.tick()
        self.reporter.tick()

    def wait_for_pending_backup(self) -> None:
        """Nothing to wait for: `before_forward` has ordered the forward behind every copy that it depends on."""

    def swap_in_selected_pages(
        self, req_pool_indices: torch.Tensor, compressed_seq_lens: torch.Tensor, top_k_result: torch.Tensor, layer_id: int
    ) -> torch.Tensor:
        """Device rows int32 [rows, top_k] of the selected positions int32 [rows, top_k]; -1: no row.

        Inside the graph. The leader of an index group resolves and fetches for all its layers; followers reuse its rows.
        """
        layer = layer_id - self.pool.start_layer
        num_rows = top_k_result.shape[0]
        if self.groups.is_leader(layer):
            self.recorder.note(self.groups.group_of[layer], top_k_result)
            page_rows = self._model_runner.attn_backend.forward_metadata.real_page_table
            if page_rows.shape[0] < num_rows:
                raise InvariantError(f"page table of {page_rows.shape[0]} rows for {num_rows} rows of top-k")
            rows = self.hot.resolve(layer, top_k_result, page_rows, compressed_seq_lens, req_pool_indices)
            self.audit.check(layer, rows, top_k_result, page_rows, compressed_seq_lens, req_pool_indices)
        return self.fault.apply(self.hot.rows(num_rows), top_k_result)

    # -- the life of a request --------------------------------------------------------------------------------------

    def admit_request_into_staging(self, req: Any) -> None:
        """SGLang announces the end of a prefill. The request decodes in the next step; mirroring goes on behind it."""

    def collect_ready_reqs(self) -> list[Any]:
        return []

    def map_last_loc_to_buffer(self, *args: Any) -> None:
        """New tokens go to the resident tail page that `alloc_decode` gave them; there is nothing to map."""

    def request_finished(self, req: Any) -> None:
        """The lease goes back early; pages leave through the allocator, the slot through `release_slot` (R11, R12)."""
        if req.kv.req_pool_idx is not None:
            self.residency.release_lease(req.kv.req_pool_idx)

    def retract_req(self, req: Any) -> None:
        """Keep the request's full pages in the radix tree, so that its re-admission is a prefix hit (R13)."""
        tree = self.tree_cache
        if tree is not None and not tree.disable and not req.skip_radix_cache_insert:
            req.refresh_fill_ids()
            tree.checkpoint(req, up_to=req.owned_kv_len())
        self.request_finished(req)

    def release_slots(self, slots: list[int]) -> None:
        """The one release: every path of SGLang ends in ReqToTokenPool.free_rows. Idempotent."""
        self.recorder.release(slots)
        for slot in slots:
            self.residency.release(slot)

    # -- idle, flush, shutdown --------------------------------------------------------------------------------------

    def has_ongoing_staging(self, waits: bool = False) -> bool:
        """Whether a host copy is under way: the scheduler is not idle then (R29). waits: such copies are waited for, so that the
        ranks of a server answer alike."""
        self.audit.while_idle()
        self._report()
        self._note_completed(self.worker.settle() if waits else self.worker.poll())
        return self.worker.in_flight or self.residency.has_transfers

    def settle(self) -> None:
        """Wait for the host copies under way: SGLang asks once whether it is idle, and then acts."""
        self._note_completed(self.worker.settle())
        if self.storage is not None:
            self.storage.settle()

    def self_check(self) -> list[str]:
        """What is wrong with the pools now, in words; empty when nothing is. SGLang asks at idle."""
        self._report()
        try:
            check(self.residency)
        except InvariantError as error:
            return [f"hisparse: {error}"]
        if self.allocator.num_slow_frees:
            return [f"hisparse: {self.allocator.num_slow_frees} frees arrived as device tensors"]
        return []

    def clear(self) -> None:
        """Flush: drain the copies, forget every page; late acknowledgements find no transfer (I5). Tags need no reset: those of
        a slot are forgotten when it takes a lease."""
        if self.storage is not None:
            self.storage.forget_pages()
        self.worker.drain()
        self.residency.clear()
        self.worker.forget_all()
        self.reporter.forget_copies()
        self._launch = None

    def destroy(self) -> None:
        """Shutdown, on every rank, without a word to the others: each ends when it has written what is its own. A part that
        fails keeps no other from being released. SGLang's launcher kills a rank that takes 15 seconds."""
        with contextlib.ExitStack() as parts:  # last in, first out
            parts.callback(self.mem_pool_host.destroy)
            parts.callback(self.stats.close)
            parts.callback(self.recorder.close)
            parts.callback(self.worker.synchronize)
            parts.callback(self.worker.drain)
            if self.storage is not None:
                parts.callback(self.storage.close)
                parts.callback(lambda: self._note_completed(self.worker.settle()))

    def get_token_stats(self) -> Any:
        from sglang.srt.managers.hisparse_coordinator import HiSparseTokenStats

        device, book = self.allocator.device_pages, self.residency.book
        on_device, in_all = device.num_usable - device.num_free, book.num_usable - book.num_free
        shares = (on_device / device.num_usable, in_all * self.page_size / self.allocator.size)
        return HiSparseTokenStats(on_device * self.page_size, shares[0], in_all * self.page_size, shares[1])

    def counters(self) -> dict[str, int]:
        """Counts since start, for logs, metrics and the statistics file; device counts lag by a few steps."""
        counts = {**residency_counts(self), **resolver_counts(self.hot.counters()), **self.audit.counters()}
        counts |= self.extends.counters() | ({} if self.border is None else self.border.counters())
        return {**counts, **(dict.fromkeys(STORAGE_COUNTS, 0) if self.storage is None else self.storage.counters())}
