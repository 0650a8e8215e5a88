"""The replay loop: a scheduler without a model, over the real residency protocol, memory and kernels.

Run by command.py and by tests, which may also call `step` one at a time. It keeps the order of calls that the serving
runtime keeps (hold, make room, promote, attach, append; then tick, plan, launch, and the results of the step before), so
that a result is always one step late, as under overlap scheduling. It takes no residency decision of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.replay.executor import DecodeBatch, Executor
from sglang_hisparse.replay.figures import Counts, PhaseFigures, ProfileFigures, ReplayReport
from sglang_hisparse.replay.options import ReplayOptions
from sglang_hisparse.replay.prefix_cache import PrefixCache
from sglang_hisparse.replay.workload import PROFILE_NAMES, Phase, Request, Workload, standard_phases
from sglang_hisparse.residency import DevicePages, PageState, Residency, ResidencyCoordinator, SpillPolicy
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.transfer.worker import TransferWorker

CHECK_PERIOD = 16  #: steps between two checks of the coordinator's own invariants


@dataclasses.dataclass(slots=True, eq=False)
class _Launched:
    """What a forward did for one request; its result is processed one step later."""

    request: Request
    seq_len: int
    ends_prefill: bool


class Engine:
    """One replay run. `worker_class` takes the place of the transfer worker (tests plant faults there), `workload` that of
    the synthetic requests."""

    def __init__(
        self,
        options: ReplayOptions,
        worker_class: type[TransferWorker] | None = None,
        workload: Workload | None = None,
    ) -> None:
        self.options = options
        limits = options.limits
        self.executor = Executor(options, len(PROFILE_NAMES), worker_class)
        self.coordinator = ResidencyCoordinator(
            limits, options.policy, DevicePages(limits.num_device_pages), self.executor.worker.mirror
        )
        self.policy = SpillPolicy(self.coordinator)
        self.cache = PrefixCache(self.coordinator)
        self.workload = workload or Workload(options)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.counts = Counts()
        self.problems: list[str] = []
        self._free_slots = list(range(options.max_requests, 0, -1))  # slot 0 is the padding row's
        self._launched: list[_Launched] = []
        self._rng = np.random.default_rng([options.seed, 3])

    # -- a run ------------------------------------------------------------------------------------------------------

    def run(self, phases: list[Phase] | None = None, on_step: Callable[[Phase, int], None] | None = None) -> ReplayReport:
        """All phases, then the final audit. Wrong bytes are counted; a broken protocol raises InvariantError."""
        figures = []
        try:
            for phase in standard_phases(self.options) if phases is None else phases:
                before = self.snapshot()
                self._run_phase(phase, on_step)
                if phase.steps is None:
                    self.audit()
                figures.append(PhaseFigures(phase.name, phase.goal, self.snapshot().minus(before)))
            return self._report(figures)
        finally:
            self.executor.close()

    def _run_phase(self, phase: Phase, on_step: Callable[[Phase, int], None] | None) -> None:
        # What outlasts every request's longest life, one after another, will never end.
        limit = phase.steps if phase.steps is not None else (8 + self.workload.num_left) * self.options.max_tokens
        for number in range(limit):
            if phase.steps is None and not (self.running or self.waiting or self.workload.has_arrivals(phase)):
                return
            self.step(phase)
            if on_step is not None:
                on_step(phase, number + 1)
        if phase.steps is None:
            self.problems.append(f"{len(self.running)} running and {len(self.waiting)} waiting requests do not end")

    def step(self, phase: Phase) -> None:
        """One scheduler iteration: arrive, admit, allocate, launch, and process the results of the launch before."""
        started = time.perf_counter()
        if len(self.running) + len(self.waiting) < phase.max_requests and self.workload.has_arrivals(phase):
            busy = {request.conversation for request in (*self.running, *self.waiting)}
            self.waiting.append(self.workload.arrival(phase, self.cache, busy))
            self.counts.arrived += 1
        may_admit = self.waiting and self._free_slots and not any(request.is_prefilling for request in self.running)
        if may_admit and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        chunk = self._extend()
        decoding = self._grow()
        previous, self._launched = self._launched, self._launch(chunk, decoding)
        for launched in previous:
            self._process(launched)
        self.executor.after_forward()
        self.counts.steps += 1
        if self.counts.steps % CHECK_PERIOD == 0:
            check(self.coordinator)
        self.counts.seconds += time.perf_counter() - started

    # -- admission --------------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> bool:
        """Find its prefix, make room, and give it a slot. False: it waits."""
        page = self.options.page_size
        prefix = self.cache.match(request.key)
        on_host = request.starts_on_host and bool(prefix) and len(prefix) * page == request.prompt_tokens
        if not on_host:
            if not prefix and request.family is not None and request.finds_family:
                prefix = self.cache.match(("family", request.family))
            prefix = prefix[: (request.prompt_tokens - 1) // page]  # at least one token is left to compute
        with self.cache.protect(prefix):
            return self._admit_with(request, prefix, on_host)

    def _admit_with(self, request: Request, prefix: tuple[int, ...], on_host: bool) -> bool:
        coordinator, book, page = self.coordinator, self.coordinator.book, self.options.page_size
        prompt_pages, final_pages = -(-request.prompt_tokens // page), -(-(request.goal_tokens + 1) // page)
        smallest = min(final_pages, coordinator.limits.smallest_pages)
        needed = smallest if on_host else max(prompt_pages + 1, smallest)
        if book.committed_pages() + needed > coordinator.limits.num_device_pages:
            return False
        if not self.cache.make_logical_room(final_pages - len(prefix)):
            return False
        if not self._bring_prefix(prefix, on_host, min(request.prompt_tokens, self.options.chunk_tokens) // page + 1):
            return False
        request.slot = self._free_slots.pop()
        coordinator.attach(
            request.slot, prefix, prompt_pages=prompt_pages, final_pages=final_pages, prefilling=not on_host
        )
        if on_host:
            coordinator.acquire_lease(request.slot)
            self.counts.started_on_host += 1
        else:
            book.hold(prefix, -1)
            self.counts.started_full += 1
        request.length = len(prefix) * page
        self.executor.set_home(request.slot, 0, request.seeds)
        if on_host:
            self._start_decoding(request)
        return True

    def _bring_prefix(self, prefix: tuple[int, ...], on_host: bool, new_pages: int) -> bool:
        """Device pages for the start of a request. The prefix is held on success, unless it may stay on the host."""
        coordinator, book = self.coordinator, self.coordinator.book
        if on_host:
            return self.policy.make_room(self.options.hot_pages + 1)
        book.hold(prefix, +1)
        missing = [page for page in prefix if book.is_host_only(page)]
        if self.policy.make_room(len(missing) + new_pages) and coordinator.promote(missing):
            return True
        book.hold(prefix, -1)
        return False

    def _start_decoding(self, request: Request) -> None:
        request.profiles = self.workload.profile_names(request)
        request.streams = self.workload.streams(request)

    # -- allocation -------------------------------------------------------------------------------------------------

    def _extend(self) -> tuple[Request, int] | None:
        """The next chunk of the request that is being prefilled, with pages for it; None: no such request, or no room."""
        for request in self.running:
            if request.is_prefilling:
                end = min(request.prompt_tokens, request.length + self.options.chunk_tokens)
                return (request, end) if self._append({request: end}) else None
        return None

    def _grow(self) -> list[Request]:
        """Give every decoding request a place for its next token; the youngest ones are retracted if there is none."""
        while True:
            decoding = [request for request in self.running if not request.is_prefilling]
            if self._append({request: request.length + 1 for request in decoding}):
                return decoding
            able = [request for request in decoding if request.length < request.goal_tokens]
            if len(decoding) < 2 or not able:
                raise InvariantError(f"I8: {len(decoding)} decoding requests cannot get a page for one token")
            self._retract(max(able, key=lambda request: request.number))

    def _append(self, ends: dict[Request, int]) -> bool:
        """Logical and device pages up to token `end` of each request, all or nothing."""
        book, page = self.coordinator.book, self.options.page_size
        missing = {request: -(-end // page) - int(book.num_pages[request.slot]) for request, end in ends.items()}
        total = sum(missing.values())
        if not total:
            return True
        if not self.cache.make_logical_room(total) or not self.policy.make_room(total):
            return False
        for request, count in missing.items():
            if count and not self.coordinator.append(request.slot, book.allocate(count) or []):
                raise InvariantError(f"room was made for {total} pages, but {count} could not be appended")
        return True

    # -- the forward ------------------------------------------------------------------------------------------------

    def _launch(self, chunk: tuple[Request, int] | None, decoding: list[Request]) -> list[_Launched]:
        """Tick, plan and forward, in the runtime's order. Returns what was launched."""
        coordinator, executor = self.coordinator, self.executor
        coordinator.on_completed(executor.worker.poll())
        self.policy.tick()
        executor.worker.apply(coordinator.take_plan())
        launched = [_Launched(request, request.length + 1, False) for request in decoding]
        if chunk is not None:
            launched.append(_Launched(chunk[0], chunk[1], chunk[1] == chunk[0].prompt_tokens))
        if not launched:
            return []
        coordinator.check_step([request.slot for request in decoding])
        ends = [True] * len(decoding) + [item.ends_prefill for item in launched[len(decoding) :]]
        coordinator.note_launch([item.request.slot for item in launched], [item.seq_len for item in launched], ends)
        for item in launched:
            self._write(item)
        if chunk is not None and chunk[0].length:
            executor.check_resident(chunk[0].slot, self._ids(chunk[0], 0, chunk[0].length))
        if decoding:
            self._count_residency(decoding)
            executor.resolve(self._decode_batch(decoding))
        for item in launched:
            item.request.length = item.seq_len
            if item.ends_prefill:
                self._start_decoding(item.request)
        return launched

    def _ids(self, request: Request, start: int, end: int) -> np.ndarray:
        positions, page = np.arange(start, end), self.options.page_size
        return self.coordinator.book.slot_pages[request.slot, positions // page].astype(np.int64) * page + positions % page

    def _write(self, item: _Launched) -> None:
        start, end = item.request.length, item.seq_len
        slots = np.full(end - start, item.request.slot, dtype=np.int64)
        self.executor.write(slots, np.arange(start, end), self._ids(item.request, start, end))

    def _decode_batch(self, decoding: list[Request]) -> DecodeBatch:
        options = self.options
        top_k = [np.full((len(decoding), options.top_k), -1, dtype=np.int32) for _ in range(options.num_groups)]
        for row, request in enumerate(decoding):
            for group, stream in enumerate(request.streams):
                stream.append()
                selected = self._rng.permutation(stream.select())
                top_k[group][row, : selected.size] = selected
        slots = np.array([request.slot for request in decoding], dtype=np.int64)
        return DecodeBatch(
            slots=slots,
            seq_lens=np.array([request.length + 1 for request in decoding], dtype=np.int32),
            page_rows=self.coordinator.book.slot_pages[slots],
            top_k=tuple(top_k),
            profiles=np.array(
                [[PROFILE_NAMES.index(request.profiles[group]) for request in decoding] for group in range(options.num_groups)]
            ),
        )

    def _count_residency(self, decoding: list[Request]) -> None:
        for request in decoding:
            match self.coordinator.residency(request.slot):
                case Residency.FULL:
                    self.counts.request_steps_full += 1
                case Residency.MIXED:
                    self.counts.request_steps_mixed += 1
                case Residency.NONE:
                    self.counts.request_steps_none += 1

    # -- results ----------------------------------------------------------------------------------------------------

    def _process(self, item: _Launched) -> None:
        """The result of the step before the one just launched."""
        request = item.request
        if request not in self.running:
            return
        if item.ends_prefill and request.family is not None:
            self._share_family_prefix(request)
        if not request.is_prefilling and item.seq_len >= request.goal_tokens:
            self.counts.finished += 1
            self._release(request, item.seq_len)

    def _share_family_prefix(self, request: Request) -> None:
        """Name the family's pages, or take over those that are named already and free the duplicates (R22)."""
        key, count = ("family", request.family), self.workload.family_pages(request.family)
        own = self.coordinator.book.pages(request.slot)[:count].tolist()
        shared = self.cache.match(key)
        if not shared:
            self.cache.store(key, own)
        elif list(shared) != own and not any(self.cache.is_named(page) for page in own):
            self.cache.free_unused(self.coordinator.replace(request.slot, 0, shared))

    def _release(self, request: Request, tokens: int) -> None:
        """The request leaves; the full pages of its first `tokens` tokens stay in the cache."""
        coordinator, slot, full = self.coordinator, request.slot, tokens // self.options.page_size
        kept = coordinator.book.pages(slot)[:full].tolist()
        rest = coordinator.unmap(slot, full, int(coordinator.book.num_pages[slot]))
        self.cache.store(request.key, kept)
        self.cache.free_unused(rest)
        coordinator.release(slot)
        self.workload.finished(request, full * self.options.page_size)
        self.running.remove(request)
        self._free_slots.append(slot)
        request.slot = -1

    def _retract(self, request: Request) -> None:
        """Give up a running request for lack of pages; it comes back with what it has written as its prompt."""
        self.counts.retracted += 1
        length = request.length
        self._release(request, length)
        request.prompt_tokens, request.length, request.starts_on_host = length, 0, False
        self.waiting.appendleft(request)

    # -- the end ----------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """With no request left: every cached page is what it should be, then everything returns to empty."""
        coordinator, executor, book = self.coordinator, self.executor, self.coordinator.book
        executor.worker.drain()
        coordinator.on_completed(executor.worker.poll())
        executor.worker.apply(coordinator.take_plan())
        for key in self.cache.keys_by_use():
            if key[0] == "conversation":
                pages = np.asarray(self.cache.pages(key))
                seeds = self.workload.text(key[1]).reshape(pages.size, -1)
                on_host = np.isin(book.state[pages], (PageState.HOST, PageState.CLEAN))
                executor.check_host(pages[on_host].tolist(), seeds[on_host].reshape(-1))
                resident = book.state[pages] != PageState.HOST
                executor.set_home(0, 0, seeds[resident].reshape(-1))
                ids = pages[resident, None] * self.options.page_size + np.arange(self.options.page_size)
                executor.check_resident(0, ids.reshape(-1).astype(np.int64))
        for key in self.cache.keys_by_use():
            self.cache.drop(key)
        limits, free = coordinator.limits, coordinator.device_pages.num_free
        if free != limits.num_device_pages:
            self.problems.append(f"{limits.num_device_pages - free} device pages are not free at the end")
        if book.num_free != limits.num_logical_pages:
            self.problems.append(f"{limits.num_logical_pages - book.num_free} logical pages are not free at the end")
        if coordinator.has_transfers:
            self.problems.append("host copies are still awaited at the end")

    def snapshot(self) -> Counts:
        """All counts so far; waits for the device."""
        executor, worker, counters = self.executor, self.executor.worker, self.coordinator.counters
        mismatches, entries = executor.read_counts()
        resident, hot, fetched, errors = entries.sum(axis=0).tolist()
        fetched_bytes = fetched * self.options.row_bytes * self.options.layers_per_group
        fields = {name: getattr(self.counts, name) for name in Counts.__struct_fields__}
        fields.update(
            rows_resident=resident,
            rows_hot=hot,
            rows_fetched=fetched,
            resolver_errors=errors,
            pages_mirrored=counters.pages_mirrored,
            pages_spilled=counters.pages_spilled,
            pages_promoted=counters.pages_promoted,
            pages_rehomed=counters.pages_rehomed,
            leases_acquired=counters.leases_acquired,
            bytes_to_host=worker.bytes_to_host,
            bytes_to_device=worker.bytes_to_device + fetched_bytes,
            rows_checked=executor.rows_checked,
            mismatches=mismatches,
        )
        return Counts(**fields)

    def _report(self, phases: list[PhaseFigures]) -> ReplayReport:
        _, entries = self.executor.read_counts()
        profiles = [
            ProfileFigures(name, *row[:3]) for name, row in zip(PROFILE_NAMES, entries.tolist(), strict=True) if sum(row)
        ]
        return ReplayReport(dataclasses.asdict(self.options), phases, self.snapshot(), profiles, self.problems)
