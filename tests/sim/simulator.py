"""One simulated schedule: SGLang's scheduler in small, over real coordinators and modelled GPUs.

Requests with shared prompts arrive, are prefilled in chunks, decode, finish, are aborted, retracted and flushed, under
overlap or not, with too few device pages and too few logical ones. The calling order is the runtime's. Everything
follows from the seed. `Simulation(seed).run()` raises Violation; there is no other verdict.
"""

from __future__ import annotations

import random
import re

from sglang_hisparse.capacity import PrefillRule
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency.invariants import check
from sim.gpu_model import ForwardItem, Violation
from sim.options import Options
from sim.radix_model import Node, RadixModel
from sim.ranks import Parts, Ranks
from sim.requests import Batch, Request

DRAIN_STEPS = 600
FAMILY = 1_000  # tokens of one prompt family; requests' own tokens begin above


class Simulation:
    """Drives one schedule; `num_launches`, `ranks` and `options` are for reports."""

    ranks_class: type[Ranks] = Ranks
    draw_options = staticmethod(Options.draw)

    def __init__(self, seed: int, parts: Parts = Parts()) -> None:  # noqa: B008 (frozen)
        self.seed = seed
        self.rng = random.Random(seed)
        self.options = self.draw_options(self.rng, random.Random(-1 - seed))
        self.page_size = self.options.limits.page_size
        self.ranks = self.ranks_class(self.options, parts, self.rng, seed)
        self.tree = RadixModel(self.page_size)
        self.ranks.evict = lambda num_pages: self.tree.evict(num_pages)
        self.free_slots = list(range(self.options.limits.num_slots - 1, 0, -1))
        limits, options = self.options.limits, self.options
        self.rule = PrefillRule(
            num_device_pages=limits.least_device_pages,
            hot_pages=limits.hot_pages,
            smallest_pages=limits.smallest_pages,
            scratch_pages=options.scratch_pages,
            chunk_pages=-(-options.chunk_tokens // self.page_size),
            short_extend_tokens=options.short_extend_tokens,
            has_windows=options.has_windows,
        )
        self.batch_pages, self.batch_streams = 0, False  # of the batch that is being put together
        self.rested = False  # no forward since the border was looked at
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.results: list[Batch] = []
        self.now = self.num_launches = self.num_requests = self.pause_until = 0

    def run(self) -> None:
        try:
            for _ in range(self.options.num_steps):
                self._arrive()
                self._trouble()
                self._iterate()
            self._drain()
        except Violation:
            raise
        except InvariantError as error:
            number = re.match(r"[IR]\d+", str(error))
            raise Violation(number.group() if number else "I7", f"{error} (seed {self.seed})") from error
        except Exception as error:
            raise Violation("I7", f"{type(error).__name__}: {error} (seed {self.seed})") from error

    # -- the outside ------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng, options, size = self.rng, self.options, self.page_size
        if self.num_requests >= options.num_requests or rng.random() >= options.p_arrive:
            return
        longest = options.longest_pages * size - 1
        prompt_len = rng.randint(1, max(1, longest - 1))
        target_len = min(longest, prompt_len + rng.randint(1, options.output_pages * size))
        shared = rng.randint(0, prompt_len) if rng.random() < 0.5 else prompt_len
        family = rng.randrange(options.num_families) * FAMILY
        for _ in range(1 + (rng.random() < options.p_twin)):
            self._enqueue(prompt_len, target_len, shared, family)

    def _enqueue(self, prompt_len: int, target_len: int, shared: int, family: int) -> None:
        self.num_requests += 1
        own, longest = (self.num_requests + 100) * FAMILY, self.options.longest_pages * self.page_size
        tokens = [family + i if i < shared else own + i for i in range(longest + 3)]
        self.waiting.append(Request(self.num_requests, tokens, prompt_len, target_len, prompt_len))

    def _trouble(self) -> None:
        rng, options = self.rng, self.options
        if rng.random() < options.p_abort:
            self._abort(rng.randrange(3))
        if self.running and rng.random() < options.p_retract:
            self._retract(rng.choice(self.running))
        if rng.random() < options.p_flush:
            self._flush()

    def _abort(self, phase: int) -> None:
        if phase == 0 and self.waiting:
            self.waiting.pop(self.rng.randrange(len(self.waiting)))
        elif phase == 1 and self.chunked is not None:
            request, self.chunked = self.chunked, None
            self._end(request, insert=self.rng.random() < 0.5)
        elif self.running:
            self.rng.choice(self.running).aborted = True

    def _flush(self) -> None:
        """Pause with retraction, then flush: every request waits again, nothing of it is cached."""
        for request in [*self.running, *([self.chunked] if self.chunked else [])]:
            self._retract(request)
        self.results.clear()
        self.ranks.clear()
        self.tree = RadixModel(self.page_size)
        for rank in self.ranks.members:
            check(rank.coordinator)

    # -- one iteration of the scheduler -----------------------------------------------------------------------------

    def _iterate(self) -> None:
        self.now += 1
        self.ranks.deliver_enqueued()
        self.ranks.deliver_completed(self.now)
        self._tick_border()
        batch = self._next_batch()
        if batch is None and self.rng.random() < 0.3:
            self._before_forward([])  # an IDLE forward: the plan is applied, nothing is written
        self._run_gpu()
        if self.options.overlap:
            if self.results:
                self._process(self.results.pop())
            if batch is not None:
                self.results.append(batch)
        elif batch is not None:
            self._process(batch)
        self._run_gpu()
        self.ranks.check_books(thoroughly=self.rng.random() < 0.1)

    def _run_gpu(self) -> None:
        for rank in self.ranks.members:
            rank.gpu.run(self.rng, self.rng.randint(0, self.options.gpu_ops), self.options.copy_share)

    def _next_batch(self) -> Batch | None:
        if self.chunked is not None:
            self._cache(self.chunked, self.chunked.seq_len)
        self.batch_pages, self.batch_streams = 0, False
        rows: list[tuple[Request, int, int]] = []
        if self.chunked is not None and (row := self._continue_chunk(self.chunked)):
            rows.append(row)
        while self.chunked is None and self._can_admit(len(rows)):
            row = self._admit(self.waiting[0])
            if row is None:
                break
            self.waiting.pop(0)
            rows.append(row)
            if row[2] < row[0].prompt_len:
                self.chunked = row[0]
        if rows:
            return self._launch(rows, is_prefill=True)
        self._grow()
        if self.running:
            return self._launch([(r, r.seq_len, r.seq_len + 1) for r in self.running], is_prefill=False)
        return None

    # -- prefill ----------------------------------------------------------------------------------------------------

    def _can_admit(self, num_admitted: int) -> bool:
        busy = len(self.running) + num_admitted
        is_paused = self.now < self.pause_until and self.running
        return bool(self.waiting and self.free_slots and busy < self.options.max_running and not is_paused)

    def _admit(self, request: Request) -> tuple[Request, int, int] | None:
        """Hold the prefix, make room, promote what is host-only, attach, let go, append (R21); None defers."""
        ranks, size = self.ranks, self.page_size
        path = self.tree.match(request.tokens, (request.prompt_len - 1) // size) if self.options.radix else []
        prefix = [node.page for node in path]
        start = len(prefix) * size
        final, prompt = -(-request.target_len // size), -(-request.prompt_len // size)
        book = ranks.first.coordinator.book
        on_host = [page for page in prefix if book.is_host_only(page)]
        found = {"prefix_pages": len(prefix), "host_pages": len(on_host), "extend_tokens": request.prompt_len - start}
        if self.options.ledger:
            prefill = ranks.each(lambda rank: rank.charge(self.rule, prefix, prompt, final, found))
        else:
            prefill = self.rule.decide(prompt, final, **found)
        if prefill is None:
            return None
        request.chunk_pages = prefill.chunk_pages
        end = self._chunk_end(request, start)
        num_new = -(-end // size) - len(prefix)
        if ranks.each(lambda rank: rank.border.defers(num_new)):
            return None
        if not self._fits_scratch(-(-end // size), prefill.is_streamed):
            return None
        RadixModel.lock(path, +1)
        if prefill.is_streamed:
            return self._admit_streamed(request, path, (start, end), num_new, final)
        ranks.each(lambda rank: rank.coordinator.book.hold(prefix, +1))
        if not self._make_room(num_new, len(on_host)):
            ranks.each(lambda rank: rank.coordinator.book.hold(prefix, -1))
            RadixModel.lock(path, -1)
            return None
        if on_host and not ranks.each(lambda rank: rank.coordinator.promote(on_host)):
            raise Violation("I7", f"room was made for {len(on_host)} host-only pages and they cannot be promoted")
        slot = self.free_slots.pop()
        facts = {"prompt_pages": prompt, "final_pages": final, "bounded": self.options.ledger, "kept": prefill.kept}
        ranks.each(lambda rank: rank.coordinator.attach(slot, prefix, **facts))
        ranks.each(lambda rank: rank.coordinator.book.hold(prefix, -1))
        request.slot, request.path, request.pages, request.seq_len = slot, path, prefix, start
        self._append(request, num_new)
        return request, start, end

    def _chunk_end(self, request: Request, start: int) -> int:
        end = min(request.prompt_len, start + self.options.chunk_tokens)
        return min(end, start + request.chunk_pages * self.page_size) if request.chunk_pages else end

    def _fits_scratch(self, num_pages: int, is_streamed: bool) -> bool:
        """Whether the batch may read `num_pages` more; they count as taken then."""
        fits = self.rule.shares_batch(self.batch_pages + num_pages)
        if not fits and (is_streamed or self.batch_streams):
            return False
        self.batch_pages += num_pages
        self.batch_streams |= is_streamed
        return True

    def _admit_streamed(
        self, request: Request, path: list[Node], span: tuple[int, int], num_new: int, final: int
    ) -> tuple[Request, int, int] | None:
        """Its prefix stays where it is; it takes a lease and pages for one chunk."""
        ranks, hot, prefix = self.ranks, self.options.limits.hot_pages, [node.page for node in path]
        if not self._make_room(num_new, hot):
            RadixModel.lock(path, -1)
            return None
        slot, needed = self.free_slots.pop(), hot + request.chunk_pages
        ranks.each(
            lambda rank: rank.coordinator.attach(slot, prefix, prompt_pages=needed, final_pages=final, streamed=True)
        )
        request.slot, request.path, request.pages, request.seq_len = slot, path, prefix, span[0]
        self._append(request, num_new)
        return request, *span

    def _continue_chunk(self, request: Request) -> tuple[Request, int, int] | None:
        start = request.seq_len
        end = self._chunk_end(request, start)
        num_new = -(-end // self.page_size) - len(request.pages)
        self.batch_pages, self.batch_streams = -(-end // self.page_size), request.chunk_pages > 0
        if not self._make_room(num_new, 0):
            return None
        self._append(request, num_new)
        if end == request.prompt_len:
            self.chunked = None
        return request, start, end

    def _make_room(self, num_new: int, num_promoted: int) -> bool:
        """Logical shortage evicts the tree, device shortage spills (R15)."""
        ranks = self.ranks
        book = ranks.first.coordinator.book
        ranks.each(lambda rank: rank.border.want(num_new))
        if num_new > book.num_free:
            ranks.free(self.tree.evict(num_new - book.num_free))
            if num_new > book.num_free:
                return False
        done = ranks.each(lambda rank: rank.policy.make_room(num_new + num_promoted))
        if not done and self.options.ledger:
            raise Violation("I7", f"{num_new + num_promoted} pages were promised and cannot be had: {self.pending()}")
        return done

    def _append(self, request: Request, count: int) -> None:
        if not count:
            return
        pages = self.ranks.allocate(count)
        if not self.ranks.each(lambda rank: rank.coordinator.append(request.slot, pages)):
            raise Violation("I7", f"room was made for {count} pages and slot {request.slot} cannot have them")
        request.pages = request.pages + pages

    # -- decode -----------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Pages for the next token of every running request; retract the newest until they fit."""
        while self.running:
            growing = [r for r in self.running if r.seq_len == len(r.pages) * self.page_size]
            if not growing:
                return
            if self._make_room(len(growing), 0):
                for request in growing:
                    self._append(request, 1)
                return
            self._retract(self.running[-1])

    def _launch(self, rows: list[tuple[Request, int, int]], *, is_prefill: bool) -> Batch:
        items = [self._item(request, start, end, is_prefill) for request, start, end in rows]
        self._before_forward([request.slot for request, _, _ in rows])
        self.num_launches += 1
        slots, ends = [item.slot for item in items], [item.end for item in items]
        is_last = [end >= request.prompt_len for request, _, end in rows]
        for rank in self.ranks.members:
            rank.gpu.launch(items, rank.coordinator.plan_stream(slots) if is_prefill else None)
            rank.coordinator.note_launch(slots, ends, is_last)
        for (request, _, end), last in zip(rows, is_last, strict=True):
            request.seq_len = end
            if is_prefill and last:
                self.running.append(request)
        return Batch(self.num_launches, is_prefill, [(request, request.epoch) for request, _, _ in rows])

    def _item(self, request: Request, start: int, end: int, is_prefill: bool) -> ForwardItem:
        rng, limits = self.rng, self.options.limits
        if is_prefill:
            reads = tuple(range(rng.randrange(self.page_size), end, self.page_size))
        else:
            favourites = (request.uid * 7 % end, request.uid * 13 % end)
            chosen = dict.fromkeys((end - 1, rng.randrange(end), *favourites, rng.randrange(end), rng.randrange(end)))
            reads = tuple(chosen)[: limits.hot_pages * limits.page_size]
        return ForwardItem(request.slot, request.tokens, tuple(request.pages), start, end, reads, is_prefill)

    def _before_forward(self, slots: list[int]) -> None:
        """Tick, take the plan, execute it; the same on every rank, save for what it waits for."""
        self.rested = False
        self.ranks.count_misses()
        for rank in self.ranks.members:
            rank.policy.tick()
            rank.border.look()
        self.ranks.take_plan()
        for rank in self.ranks.members:
            rank.coordinator.check_step(slots)

    def _tick_border(self) -> None:
        """Before a batch is chosen. After an iteration without a forward no other may come: then moves begin here."""
        self.ranks.observe_border()
        self.ranks.each(lambda rank: (rank.border.follow(), rank.border.ended))
        if self.rested:
            before = self.ranks.first.border.begun
            self.ranks.each(lambda rank: (rank.border.rest(), rank.border.begun))
            if self.ranks.first.border.begun != before:
                self.ranks.take_plan()
        self.rested = True

    # -- results ----------------------------------------------------------------------------------------------------

    def _process(self, batch: Batch) -> None:
        for rank in self.ranks.members:
            rank.gpu.run_until(batch.forward)
        for request, epoch in batch.rows:
            if request.epoch != epoch or request not in self.running:
                continue
            request.num_known += 1
            if request.aborted or request.num_known >= request.target_len or request.seq_len + 2 >= len(request.tokens):
                self.running.remove(request)
                self._end(request, insert=not request.aborted or self.rng.random() < 0.5)
            elif batch.is_prefill:
                self._cache(request, request.prompt_len)

    def _cache(self, request: Request, length: int) -> None:
        """Put the full pages of the first `length` tokens into the tree; the request uses the tree's pages from then
        on."""
        if not self.options.radix:
            return
        path = self.tree.insert(request.tokens, request.pages, length // self.page_size)
        pages = [node.page for node in path]
        old = self.ranks.each(lambda rank: rank.coordinator.replace(request.slot, 0, pages))
        if old != [mine for mine, theirs in zip(request.pages, pages, strict=False) if mine != theirs]:
            raise Violation("R22", f"replacing {request.pages} by {pages} gave up {old}")
        request.pages = pages + request.pages[len(pages) :]
        self.ranks.free(old)
        RadixModel.lock(path, +1)
        RadixModel.lock(request.path, -1)
        request.path = path

    def _end(self, request: Request, *, insert: bool) -> None:
        """Finished, aborted or retracted: cache, unmap and free the rest, release the slot (R11, R12)."""
        ranks, slot = self.ranks, request.slot
        if self.rng.random() < 0.5:
            ranks.each(lambda rank: rank.coordinator.release_lease(slot))
        if insert:
            self._cache(request, request.seq_len)
        keep = len(request.path)
        mine = ranks.each(lambda rank: rank.coordinator.unmap(slot, keep, len(request.pages)))
        if mine != request.pages[keep:]:
            raise Violation("R11", f"slot {slot} gave up {mine}, not {request.pages[keep:]}")
        ranks.free(mine)
        for _ in range(self.rng.randint(1, 2)):  # several paths of SGLang call it; it is idempotent
            ranks.each(lambda rank: rank.coordinator.release(slot))
        RadixModel.lock(request.path, -1)
        self.free_slots.append(slot)
        request.epoch += 1
        request.slot, request.pages, request.path, request.seq_len = 0, [], [], 0

    def _retract(self, request: Request) -> None:
        """Keep its full pages in the tree and queue it again, with what it has generated as prompt (R13)."""
        if request is self.chunked:
            self.chunked = None
        else:
            self.running.remove(request)
        self._end(request, insert=True)
        request.prompt_len = request.num_known
        request.num_retracted += 1
        self.pause_until = self.now + 4
        if request.num_retracted < 6 and not request.aborted:
            self.waiting.insert(0, request)

    # -- liveness ---------------------------------------------------------------------------------------------------

    def pending(self) -> list[str]:
        """Why the system is not empty, in words."""
        reasons = [f"request {r.uid} waits" for r in self.waiting] + [f"request {r.uid} runs" for r in self.running]
        if self.chunked is not None:
            reasons.append(
                f"request {self.chunked.uid} is between chunks at {self.chunked.seq_len} of {self.chunked.prompt_len}"
            )
        for rank in self.ranks.members:
            coordinator, book = rank.coordinator, rank.coordinator.book
            usable = coordinator.device_pages.num_usable
            device, logical = coordinator.device_pages.num_free, coordinator.book.num_free
            facts = {
                "copies are under way": coordinator.has_transfers,
                f"leases {coordinator.hot_lease}": coordinator.hot_lease,
                f"{device} of {usable} device pages are free": device != usable,
                f"{logical} of {book.num_usable} logical pages are free": logical != book.num_usable,
                f"{coordinator.num_dirty} pages wait for a host copy": coordinator.num_dirty,
            }
            reasons += [reason for reason, is_so in facts.items() if is_so]
        return reasons

    def _drain(self) -> None:
        """No more trouble: everything must finish, and every pool must be empty when the tree is gone."""
        self.ranks.calm = True
        for _ in range(DRAIN_STEPS):
            if not (self.waiting or self.running or self.chunked or self.results):
                break
            self._iterate()
        else:
            raise Violation("liveness", f"not drained after {DRAIN_STEPS} steps: {self.pending()} (seed {self.seed})")
        self._settle()
        while evicted := self.tree.evict(len(self.tree.nodes)):
            self.ranks.free(evicted)
        for rank in self.ranks.members:
            check(rank.coordinator)
        if reasons := self.pending():
            raise Violation("I3", f"drained, and not empty: {reasons} (seed {self.seed})")

    def _settle(self) -> None:
        """All streams run empty and all acknowledgements arrive."""
        self.ranks.deliver_enqueued()
        for rank in self.ranks.members:
            rank.gpu.drain()
        self.ranks.deliver_completed(self.now)
