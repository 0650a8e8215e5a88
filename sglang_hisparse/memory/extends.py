"""Extend batches between admission and forward: which prefixes come back to the device, and which are streamed.

Owned by the runtime, which calls it around SGLang's `alloc_for_extend` and around the forward; the prefill budget asks it for
`decide`, so that admission charges what allocation will do. It allocates no logical page and copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_hisparse.capacity import Prefill, PrefillRule
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import PageState, ResidencyCoordinator, ResidencyMode
from sglang_hisparse.residency.sharing import Candidate, SharingPass
from sglang_hisparse.residency.types import StreamPlan, StreamWindow
from sglang_hisparse.transfer.prefix_stream import PrefixStream

# SGLang clips the output length that it plans for to this many tokens, which an environment variable of its own may change: the ledger
# has to clip as admission does, or a request that is kept would grow past what it was charged (I7).
MAX_PLANNED_OUTPUT = CLIP_MAX_NEW_TOKENS

_HOST = int(PageState.HOST)


def is_bounded(req: Any) -> bool:
    """Whether the output length planned for `req` is not clipped, so that it never needs more pages than are planned for it."""
    return req.sampling_params.max_new_tokens - len(req.output_ids) <= MAX_PLANNED_OUTPUT


@dataclass(slots=True)
class _Request:
    """One request of the extend batch that is being allocated."""

    prefix_pages: list[int]
    is_new: bool
    is_streamed: bool
    seq_len: int
    new_tokens: int
    prefill_ends: bool
    prompt_pages: int
    final_pages: int
    chunk_pages: int
    charged_pages: int  #: by the ledger; 0 for a request that has been charged before
    is_bounded: bool  #: it never has more than `final_pages`
    is_kept: bool  #: all its pages stay on the device, as the ledger has charged them


@dataclass(frozen=True, slots=True)
class Launch:
    """The slots of the batch that was allocated last, the lengths that its forward brings them to, whether they decode then
    (lists, or arrays [n]); new_tokens: those of an extend, request by request; changes_pages: False for a decode step in which
    no request begins or fills a page, whose lengths are left out."""

    slots: Sequence[int] | np.ndarray
    seq_lens: Sequence[int] | np.ndarray
    prefill_ends: Sequence[bool] | np.ndarray
    is_extend: bool
    new_tokens: Sequence[int] = ()
    changes_pages: bool = True


class Extends:
    """`slots`: request slots of the extend batch that is being allocated, in batch order.

    make_room(n): make n device pages free, False when they cannot be had. stream: None where prefills are never streamed.
    """

    def __init__(
        self,
        residency: ResidencyCoordinator,
        make_room: Callable[[int], bool],
        rule: PrefillRule,
        stream: PrefixStream | None,
    ) -> None:
        self.residency, self.rule, self.stream = residency, rule, stream
        self.page_size = residency.limits.page_size
        self.slots: list[int] = []
        self._was_refused = False
        self._make_room = make_room
        self._requests: list[_Request] = []
        self._promised: dict[str, tuple[Prefill, Candidate]] = {}  # by request id: what the last admission pass has charged
        self.sharing = self._new_pass()

    @property
    def is_allocating(self) -> bool:
        """Whether a batch has begun and not ended."""
        return bool(self._requests)

    # -- admission and allocation -----------------------------------------------------------------------------------

    def decide(
        self,
        prefix_pages: Sequence[int],
        prompt_tokens: int,
        total_tokens: int,
        free_pages: int,
        *,
        num_prefix_pages: int | None = None,
        kept_pages: int | None = None,
    ) -> Prefill:
        """How a request is prefilled that finds `prefix_pages` in the cache; changes nothing. free_pages: of the ledger, without
        those of requests ahead of it in the batch. num_prefix_pages: how many they are, where which ones does not matter (nothing
        is streamed). kept_pages: its charge as a kept request, where it may be one."""
        page, book = self.page_size, self.residency.book
        count = len(prefix_pages) if num_prefix_pages is None else num_prefix_pages
        host_pages = np.count_nonzero(book.state[np.asarray(prefix_pages, dtype=np.int64)] == _HOST)
        return self.rule.decide(
            -(-prompt_tokens // page),
            -(-total_tokens // page),
            extend_tokens=prompt_tokens - count * page,
            prefix_pages=count,
            host_pages=int(host_pages),
            free_pages=free_pages,
            kept_pages=kept_pages,
        )

    def _new_pass(self) -> SharingPass:
        return SharingPass(self.residency.book, self.residency.policy.mode != ResidencyMode.ALWAYS_HOST)

    def begin_pass(self) -> SharingPass:
        """A new admission pass: what another one has promised does not count."""
        self._promised.clear()
        self.sharing = self._new_pass()
        return self.sharing

    def promise(self, req: Any, prefill: Prefill, candidate: Candidate) -> None:
        """Admission has charged `req` for this; allocation keeps to it, whatever has been freed in between. Whether it is kept may
        change until the pass is over."""
        self._promised[req.rid] = prefill, candidate

    def begin(self, batch: Any) -> None:
        """Hold the prefixes that are to be resident, spill, promote; SGLang allocates next (R21)."""
        book, self._requests = self.residency.book, []
        requests, free_pages = self._requests, self.residency.device_pages.num_usable - book.committed_pages()
        for index in range(len(batch.reqs)):
            requests.append(self._request(batch, index, free_pages))
            free_pages -= requests[-1].charged_pages
        prefixes = [page for request in requests if not request.is_streamed for page in request.prefix_pages]
        book.hold(prefixes, +1)
        on_host = [page for page in dict.fromkeys(prefixes) if book.is_host_only(page)]
        needed = len(on_host) + sum(-(-request.seq_len // self.page_size) - len(request.prefix_pages) for request in requests)
        needed += self.rule.hot_pages * sum(request.is_new and request.is_streamed for request in requests)
        # The admission ledger has promised these pages. Going on without them would read rows that are not there.
        if not self._make_room(needed):
            raise InvariantError(f"I7: {needed} device pages were promised to an extend and cannot be freed")
        if on_host:
            self.residency.promote(on_host)

    def _request(self, batch: Any, index: int, free_pages: int) -> _Request:
        req, prefix_len = batch.reqs[index], batch.prefix_lens[index]
        seq_len, total = prefix_len + batch.extend_lens[index], len(req.full_untruncated_fill_ids)
        left = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), MAX_PLANNED_OUTPUT)
        is_kept = False
        prompt_pages, final_pages = -(-total // self.page_size), -(-(total + left) // self.page_size)
        if is_new := not req.kv.holds_kv:
            pages = batch.tree_cache.prefix_pages(req) if prefix_len else []
            promised = self._promised.get(req.rid)
            if promised is None:
                prefill = self.decide(pages, total, total + left, free_pages)
            else:
                prefill, is_kept = promised[0], promised[1].kept
            is_streamed = prefill.is_streamed
        else:
            slot, prefill = req.kv.req_pool_idx, Prefill(0)
            pages, is_streamed = self.residency.book.pages(slot).tolist(), self.residency.book.streams(slot)
        ends, new_tokens = seq_len >= total, batch.extend_lens[index]
        return _Request(
            pages, is_new, is_streamed, seq_len, new_tokens, ends, prompt_pages, final_pages, prefill.chunk_pages, prefill.pages,
            self.sharing.can_keep and is_bounded(req), is_kept,
        )  # fmt: skip

    def attach(self, slots: Sequence[int]) -> None:
        """SGLang has given the batch its request slots, in batch order; it allocates tokens next."""
        self.slots = list(slots)
        for slot, request in zip(self.slots, self._requests, strict=True):
            if request.is_new:
                streamed_pages = self.rule.hot_pages + request.chunk_pages
                self.residency.attach(
                    slot,
                    request.prefix_pages,
                    prompt_pages=streamed_pages if request.is_streamed else request.prompt_pages,
                    final_pages=request.final_pages,
                    streamed=request.is_streamed,
                    bounded=request.is_bounded,
                    kept=request.is_kept,
                )
            if not request.is_streamed:
                self.residency.book.hold(request.prefix_pages, -1)

    def end(self) -> Launch:
        requests, self._requests = self._requests, []
        return Launch(
            self.slots,
            [r.seq_len for r in requests],
            [r.prefill_ends for r in requests],
            is_extend=True,
            new_tokens=[r.new_tokens for r in requests],
        )

    def continued_chunk(self) -> tuple[int, int] | None:
        """(pages that the request has which is between two chunks of its prefill, its longest chunk in pages, 0 unless it is
        streamed); None: there is none."""
        book = self.residency.book
        slots = np.flatnonzero(book.prefilling & book.live)
        if not slots.size:
            return None
        slot = int(slots[0])
        return int(book.num_pages[slot]), int(book.prompt_pages[slot]) - self.rule.hot_pages if book.streams(slot) else 0

    def note_refusal(self) -> None:
        """A request waits for a batch with more room in the scratch."""
        self._was_refused = True

    def take_refusal(self) -> bool:
        """Whether one has been refused for that since this was last asked."""
        was_refused, self._was_refused = self._was_refused, False
        return was_refused

    # -- around the forward -----------------------------------------------------------------------------------------

    def before_forward(self, launch: Launch | None) -> None:
        """After the step's plan was applied: attention reads the scratch where the extend has host-only pages."""
        if self.stream is None:
            return
        self.stream.end()
        if launch is None or not launch.is_extend or (plan := self.residency.plan_stream(launch.slots)) is None:
            return
        if self.rule.has_windows and plan.num_pages > self.stream.num_pages:
            windows = self.residency.plan_windows(launch.slots, launch.new_tokens, self.stream.num_pages)
            self.stream.begin_windows([self._with_union(window) for window in windows])
        else:
            self.stream.begin(self._plan_with_union(plan, sum(launch.new_tokens)))

    def _plan_with_union(self, plan: StreamPlan, new_tokens: int) -> StreamPlan:
        return replace(plan, union=self.rule.fetches_union(new_tokens, len(plan.host_pages) * self.page_size))

    def _with_union(self, window: StreamWindow) -> StreamWindow:
        if window.plan is None:
            return window
        return replace(window, plan=self._plan_with_union(window.plan, window.last - window.first))

    def after_forward(self) -> None:
        if self.stream is not None:
            self.stream.finish()

    def counters(self) -> dict[str, int]:
        """What streaming has cost; empty where nothing is streamed."""
        return {} if self.stream is None else self.stream.counters()
