"""A stepwise engine: SGLang's real Scheduler, driven one event-loop iteration at a time.

Owns the handles of requests and the stepping. Tests call `make_scheduler` and then submit, step, abort, retract, pause,
flush. It must never reach into a batch, a pool or a tree to change it: every effect goes through a control message or
through the scheduler's own loop (`event_loop_normal` or `event_loop_overlap`, one iteration per step).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from . import bootstrap
from .fake_model import FakeDsaModel, WrongRowError
from .lagging_link import LaggingLink
from .reference import History


class StuckError(AssertionError):
    """The engine did not become idle within the steps it was given."""


@dataclass(slots=True)
class Handle:
    """One request as its client sees it. finish_reason: "length", "abort", ... once it has ended, else None."""

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    history: History
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    retractions: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class Engine:
    """The scheduler with its client side. Build it with `make_scheduler`; close it, or the next one cannot start.

    Attributes for inspection: scheduler, runner, pool, allocator, req_to_token_pool, tree, coordinator (None without
    HiSparse), model (whose `counters` say what was verified), steps.
    """

    def __init__(self, config: bootstrap.HarnessConfig) -> None:
        self.config = config
        self._stack = contextlib.ExitStack()
        # Tensors here are tiny: a second thread only costs time, most of all on a busy machine.
        self._stack.callback(torch.set_num_threads, torch.get_num_threads())
        try:
            self.scheduler, self.model, self._sender = bootstrap.build_scheduler(config, self._stack)
        except BaseException:
            self._stack.close()
            raise
        torch.set_num_threads(1)
        self.handles: dict[str, Handle] = {}
        self.control_outputs: list[Any] = []
        self._given_up: set[str] = set()  # requests that ran alone and that the scheduler found no room for
        self.link: LaggingLink | None = None
        self.steps = 0
        self._inbox: list[Any] = []
        self._carried_results: deque[Any] = deque()
        self._launched_tables: dict[str, torch.Tensor] = {}
        self._install_stepping()

    # ------------------------------------------------------------------ what tests look at

    @property
    def runner(self) -> Any:
        return self.scheduler.tp_worker.model_runner

    @property
    def pool(self) -> Any:
        return self.runner.token_to_kv_pool

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    @property
    def req_to_token_pool(self) -> Any:
        return self.scheduler.req_to_token_pool

    @property
    def tree(self) -> Any:
        return self.scheduler.tree_cache

    @property
    def coordinator(self) -> Any:
        return self.runner.hisparse_coordinator

    @property
    def idle(self) -> bool:
        """No request and no message anywhere: SGLang's own test, plus the inbox."""
        return not self._inbox and self.scheduler.is_fully_idle()

    def find(self, handle: Handle) -> Any:
        """The scheduler's Req of a live handle (for looking at, not for changing), or None."""
        scheduler = self.scheduler
        live = [*scheduler.waiting_queue, *scheduler.collect_inflight_reqs()]
        if scheduler.chunked_req is not None:
            live.append(scheduler.chunked_req)
        return next((req for req in live if req.rid == handle.rid), None)

    def num_running(self) -> int:
        """Requests that decode."""
        return self.scheduler.running_batch.batch_size()

    # ------------------------------------------------------------------ the client side

    def submit(self, token_ids: Sequence[int], max_new_tokens: int, rid: str | None = None) -> Handle:
        """Queue a greedy request; it enters the scheduler at the next step. Rids must not be prefixes of each other."""
        from array import array

        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        rid = rid or f"r{len(self.handles):05d}"
        prompt = tuple(int(token) for token in token_ids)
        history = History(prompt, self.config.vocab_size)
        handle = Handle(rid, prompt, max_new_tokens, history)
        self.handles[rid] = handle
        self.model.histories[rid] = history
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        sampling.normalize(None)
        self._inbox.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text=None,
                input_ids=array("q", prompt),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=True,
            )
        )
        return handle

    def abort(self, handle: Handle) -> None:
        """Queue a client abort; it is handled at the start of the next step."""
        from sglang.srt.managers.io_struct import AbortReq

        self._inbox.append(AbortReq(rid=handle.rid))

    def abort_all(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self._inbox.append(AbortReq(abort_all=True))

    def pause(self, mode: str = "retract") -> None:
        """Pause at the next step. mode: "in_place" keeps everything, "retract" sends all requests back to the queue."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._inbox.append(PauseGenerationReqInput(mode=mode))
        self.step()

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._inbox.append(ContinueGenerationReqInput(torch_empty_cache=False))

    def flush(self) -> bool:
        """Flush the caches with a step of its own; returns what the client would be told."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput

        self._inbox.append(FlushCacheReqInput())
        seen = len(self.control_outputs)
        self.step()
        replies = [out for out in self.control_outputs[seen:] if isinstance(out, FlushCacheReqOutput)]
        assert len(replies) == 1, f"expected one flush reply, got {self.control_outputs[seen:]}"
        return replies[0].success

    def retract(self) -> int:
        """One step in which the scheduler retracts as if decode had run out of memory; returns how many it retracted.

        SGLang's own test switch (SGLANG_TEST_RETRACT) is used. It retracts one request at least, if any decodes and no
        prefill is due in this step.
        """
        from unittest import mock

        from sglang.srt.managers import scheduler as scheduler_module

        before = {rid: req.retraction_count for rid, req in self._live_requests().items()}
        with (
            mock.patch.object(scheduler_module, "TEST_RETRACT", True),
            mock.patch.object(scheduler_module, "TEST_RETRACT_INTERVAL", 1),
        ):
            self.step()
        after = self._live_requests()
        return sum(req.retraction_count > before.get(rid, 0) for rid, req in after.items())

    # ------------------------------------------------------------------ time

    def step(self, count: int = 1) -> None:
        """Run `count` iterations of the scheduler's own event loop."""
        for _ in range(count):
            self._one_iteration()
            self.steps += 1
            self._collect_outputs()

    def run_until_idle(self, max_steps: int = 5000) -> None:
        """Step until nothing is left, then once more: SGLang's idle checks (leaks, tree) run. Raises StuckError."""
        for _ in range(max_steps):
            if self.idle and self.scheduler.last_batch is None:
                self.step()
                return
            self.step()
        unfinished = [h.rid for h in self.handles.values() if not h.finished]
        raise StuckError(f"not idle after {max_steps} steps; unfinished: {unfinished}")

    def run_until(self, condition: Any, max_steps: int = 5000) -> None:
        """Step until condition() holds. Raises StuckError."""
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise StuckError(f"condition not met after {max_steps} steps")

    def close(self) -> None:
        """Release host memory as SGLang does on exit, and free the process for the next engine."""
        try:
            self.scheduler.release_host_resources()
        finally:
            self._stack.close()

    # ------------------------------------------------------------------ inside

    def _install_stepping(self) -> None:
        """One call of the event loop shall be one iteration: the loop is told to end when it asks for requests.

        `gracefully_exit` is read at the top of the loop only. `event_loop_overlap` starts with an empty result queue,
        so the results in flight are carried from call to call.
        """
        scheduler = self.scheduler
        scheduler._war_barrier_enabled = False
        scheduler.metrics_reporter.start_scheduler_time_accounting()

        def recv_requests(local_reqs: list[Any] | None = None) -> list[Any]:
            scheduler.gracefully_exit = True
            if self.config.overlap:
                scheduler.result_queue = self._carried_results
            received, self._inbox = self._inbox, []
            return [*(local_reqs or []), *received]

        scheduler.request_receiver = SimpleNamespace(recv_requests=recv_requests)
        worker = scheduler.tp_worker
        original = worker.forward_batch_generation

        def forward_batch_generation(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.model.check_launched_reads()
            self._check_device_tables()
            self._follow_refusals(batch)
            result = original(batch, *args, **kwargs)
            self._launched_tables = {name: table.clone() for name, table in self._device_tables().items()}
            return result

        worker.forward_batch_generation = forward_batch_generation
        if self.coordinator is not None and self.coordinator.border is not None:
            self._follow_idle_plans(self.coordinator.worker)

    def _follow_idle_plans(self, worker: Any) -> None:
        """While no forward comes, a moving border has its plan executed behind the launched one: whose reads are judged first."""
        original = worker.apply

        def apply(plan: Any) -> None:
            self.model.check_launched_reads()
            self.model.forget_launched_reads()
            original(plan)
            self._launched_tables = {name: table.clone() for name, table in self._device_tables().items()}

        worker.apply = apply

    def _device_tables(self) -> dict[str, torch.Tensor]:
        """What kernels inside layers read besides rows: only a forward may find them changed (R4)."""
        if self.coordinator is None:
            return {}
        hot = self.coordinator.hot
        tables = {"page_table": self.allocator.page_table, "hot_pages": hot.hot_pages}
        for group in range(len(hot.state)):
            tables[f"tags of group {group}"] = hot.state[group].tags
            tables[f"header of group {group}"] = hot.state[group].header
        return tables

    def _check_device_tables(self) -> None:
        """Between two launches nothing may write what the first of them can still be reading (R4, R5)."""
        for name, table in self._device_tables().items():
            before = self._launched_tables.get(name)
            if before is not None and not torch.equal(before, table):
                raise WrongRowError(f"{name} changed after a launch and before the next one")

    def _follow_refusals(self, batch: Any) -> None:
        """SGLang runs a refused request once, with one token 0 in place of its prompt; the judge follows."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        for req in batch.reqs:
            if isinstance(req.to_finish, FINISH_ABORT) and list(req.origin_input_ids) == [0]:
                self.model.histories[req.rid] = History((0,), self.config.vocab_size)

    def _one_iteration(self) -> None:
        scheduler = self.scheduler
        scheduler.gracefully_exit = False
        if self.config.overlap:
            scheduler.event_loop_overlap()
            self._carried_results = scheduler.result_queue
        else:
            scheduler.event_loop_normal()

    def _live_requests(self) -> dict[str, Any]:
        live = [*self.scheduler.waiting_queue, *self.scheduler.collect_inflight_reqs()]
        return {req.rid: req for req in live}

    def _collect_outputs(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput

        for output in self._sender.sent:
            if isinstance(output, BatchTokenIDOutput):
                self._take_tokens(output)
            elif isinstance(output, AbortReq):
                self.handles[output.rid].finish_reason = "abort"
                if "Out of memory" in (output.finished_reason or {}).get("message", ""):
                    self._given_up.add(output.rid)
            else:
                self.control_outputs.append(output)
        self._sender.sent.clear()

    def _take_tokens(self, output: Any) -> None:
        for i, rid in enumerate(output.rids or []):
            handle = self.handles[rid]
            if rid in self._given_up:
                continue  # SGLang still sends the token of the forward under way, and its tokenizer drops it
            assert not handle.finished, f"{rid} got output after its end"
            handle.output.extend(output.output_ids[i])
            handle.cached_tokens = output.cached_tokens[i]
            if output.retraction_counts:
                handle.retractions = output.retraction_counts[i]
            reason = output.finished_reasons[i]
            if reason is not None:
                handle.finish_reason = reason["type"]


@contextlib.contextmanager
def make_scheduler(
    hisparse_config: dict[str, Any] | None = None,
    *,
    device_tokens: int = 64 * 64,
    max_running_requests: int = 8,
    chunked_prefill_size: int = 256,
    radix: bool = True,
    overlap: bool = False,
    page_size: int = 64,
    num_layers: int = 4,
    top_k: int = 128,
    index_topk_freq: int = 1,
    vocab_size: int = 1000,
    context_length: int = 8192,
    link_seed: int | None = None,
    **server_args: Any,
) -> Iterator[Engine]:
    """A running engine, closed at the end of the with block.

    hisparse_config: the --hisparse-config object, or None for plain SGLang. device_tokens: --max-total-tokens.
    index_topk_freq: layers per index group. link_seed: host copies run as late as they may (see lagging_link), in an
    order drawn from the seed; None: they run at once. server_args: further fields of SGLang's ServerArgs.
    SGLang's busy leak check runs after every step, its idle checks whenever the engine is idle; both raise.
    """
    from sglang.srt.environ import envs

    config = bootstrap.HarnessConfig(
        device_tokens=device_tokens,
        max_running_requests=max_running_requests,
        chunked_prefill_size=chunked_prefill_size,
        page_size=page_size,
        radix=radix,
        overlap=overlap,
        hisparse_config=hisparse_config,
        num_layers=num_layers,
        top_k=top_k,
        index_topk_freq=index_topk_freq,
        vocab_size=vocab_size,
        context_length=context_length,
        server_args=server_args,
    )
    with (
        envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.override(1),
        envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.override(True),
        envs.SGLANG_CHECK_KV_PAGE_INVARIANTS.override(hisparse_config is None),
    ):
        engine = Engine(config)
        if link_seed is not None:
            engine.link = LaggingLink(engine.coordinator, seed=link_seed)
        try:
            yield engine
        finally:
            engine.close()


__all__ = ["Engine", "FakeDsaModel", "Handle", "StuckError", "make_scheduler"]
