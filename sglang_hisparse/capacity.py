"""The figures on which a server and a plan made beforehand must agree: host share, slots, admission, the plan itself.

Owned here so that there is one formula each. Called by memory/sizing.py and memory/budget.py in a server and by planning/
on any machine. Pure arithmetic: it must never import SGLang nor look at the machine, and torch only for the size of the
resolver's tables, which the kernels' own module tells.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hisparse.config import ResolvedConfig
from sglang_hisparse.elastic_layout import decide_border
from sglang_hisparse.layout import MAX_SCRATCH_SHARE, HotShape, KVShape, MemoryPlan, pages_for, plan_memory
from sglang_hisparse.validation import check_host_memory

UNBOUNDED_BYTES = 1 << 60
"""Host memory in the question of how much a ratio would need."""

LEAST_SLOTS, MOST_SLOTS = 2048, 4096
"""Bounds of SGLang's own choice of request slots, where --max-running-requests is not given."""

_SLOT_CONTEXTS = 512

_NEW_SHARE = 0.15
"""Share of its top-k in which a token differs from the token before it."""

_ROWS_PER_PAGE_ROW = 1.2
"""Rows copied in whole pages in the time of one row that is fetched by itself, at most: 1.2 with rows of 656 bytes, 1.05 with
1,152 (scripts/results/extend_h200.json)."""

HIDDEN_BYTES = 100_000_000
"""Host pages of a layer that arrive while the layer before is computed: 2 ms at 50 GB/s. Short eager prefills took 4 to 9 ms a
layer (scripts/results/streaming_h200.json), on a small model and beside other servers; the weights of one of V3.2's layers 0.35."""

SCORE_BYTES = 1.1
"""Bytes that arrive while the indexer scores one row for one new token: 64 heads of 128 at 750 TFLOP/s (an estimate), 50 GB/s."""


def host_share_bytes(available_bytes: int, reserve_bytes: int, ranks: int) -> int:
    """Host memory that each of `ranks` on a machine may pin; the reserve is at most a quarter of what is free."""
    return (available_bytes - min(reserve_bytes, available_bytes // 4)) // ranks


def request_slots(token_capacity: int, context_tokens: int, max_running_requests: int | None) -> int:
    """Request slots of one rank as SGLang counts them, the padding slot included.

    context_tokens: the model's longest context. max_running_requests: the server's limit divided by its attention
    data-parallel ranks, None where the flag is left out.
    """
    if max_running_requests is None:
        max_running_requests = min(max(int(token_capacity / context_tokens * _SLOT_CONTEXTS), LEAST_SLOTS), MOST_SLOTS)
    return min(max_running_requests, token_capacity // 2) + 1


def decoding_pages(total_pages: int, smallest_pages: int) -> int:
    """Device pages that a decoding request of `total_pages` needs when all that can leave has left."""
    return min(total_pages, smallest_pages)


def prefill_pages(prompt_pages: int, total_pages: int, smallest_pages: int) -> int:
    """Device pages that a request needs to be admitted: its whole prompt and one to grow into, or more to decode."""
    return max(prompt_pages + 1, decoding_pages(total_pages, smallest_pages))


def longest_request_tokens(device_tokens: int, logical_tokens: int, page_size: int, scratch_tokens: int = 0) -> int:
    """Longest request, prompt and output: what the device holds while its prefill ends, or what its scratch holds where
    prefills in chunks are streamed; with two pages to spare."""
    return min(max(device_tokens, scratch_tokens), logical_tokens) - 2 * page_size


WINDOWED_BACKENDS = frozenset({"flashmla_sparse", "flashmla_kv"})
"""Values of --dsa-prefill-backend whose kernel call can be cut into windows of requests (transfer/attention_windows.py)."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """How a request is to be prefilled. `pages`: device pages that admission charges; `chunk_pages`: longest chunk where it
    is streamed, 0 where all of it is made resident; `kept`: charged as one whose pages stay, for what others have not paid."""

    pages: int
    chunk_pages: int = 0
    kept: bool = False

    @property
    def is_streamed(self) -> bool:
        return self.chunk_pages > 0


@dataclass(frozen=True, slots=True)
class PrefillRule:
    """Whether a prefill is made resident or streamed: a function of the request, of where its prefix lies, and of what the ledger
    has left in the order of the batch, equal on all ranks. All counts are pages unless the name says otherwise.

    Resident is preferred. Streamed are prompts that the device can never hold, and short extends of a prefix that lies mostly
    on the host: bringing it back would spill others, and would only be waited for. Where the ledger cannot promise that all of its
    prefix stays resident, a short extend is streamed too, rather than wait: what still is on the device it reads there. Either needs
    the scratch to hold the request.
    """

    num_device_pages: int
    hot_pages: int
    smallest_pages: int  #: see `ResidencyLimits.smallest_pages`
    scratch_pages: int = 0  #: 0: nothing is streamed
    chunk_pages: int = 0  #: longest chunk of a prefill on this server; 0: prefills are not cut
    short_extend_tokens: int = 0
    union_tokens: int = 0  #: most new tokens of a forward that fetches only the rows it selects; 0: none does
    top_k: int = 0
    row_bytes: int = 0  #: of one token and layer; 0: whole pages are waited for as unions are
    has_windows: bool = False  #: a batch may read more pages than the scratch holds, requests by requests

    def shares_batch(self, pages: int) -> bool:
        """Whether a batch with a streamed prefill may read so many pages in all."""
        return self.has_windows or pages <= self.scratch_pages

    def fetches_union(self, new_tokens: int, host_rows: int) -> bool:
        """Whether a streamed forward of `new_tokens` fetches the rows that they select instead of all `host_rows`. Of whole pages
        only what does not arrive behind the layer before is waited for, a union always: it must be faster than that rest."""
        return 0 < new_tokens <= self.union_tokens and (
            self.hidden_rows(new_tokens, host_rows) + _ROWS_PER_PAGE_ROW * self.expected_union(new_tokens, host_rows)
            <= host_rows
        )

    def hidden_rows(self, new_tokens: int, host_rows: int) -> float:
        """Rows in whole pages that arrive while a layer is computed, its indexer's scores of them among that."""
        return (HIDDEN_BYTES + SCORE_BYTES * new_tokens * host_rows) / self.row_bytes if self.row_bytes else 0.0

    def expected_union(self, new_tokens: int, host_rows: int) -> float:
        """Rows out of `host_rows` that `new_tokens` select between them, each replacing a share of the last one's at random."""
        others = host_rows - self.top_k
        if others <= 0 or new_tokens == 0:
            return min(host_rows, new_tokens * self.top_k)
        missed = max(0.0, 1 - _NEW_SHARE * self.top_k / others)
        return host_rows - others * missed ** (new_tokens - 1)

    @property
    def longest_streamed_pages(self) -> int:
        """Longest prompt that need never be resident as a whole: prefills must be cut for that."""
        return self.scratch_pages if self.chunk_pages else 0

    def decide(
        self,
        prompt_pages: int,
        total_pages: int,
        *,
        extend_tokens: int,
        prefix_pages: int = 0,
        host_pages: int = 0,
        free_pages: int | None = None,
        kept_pages: int | None = None,
    ) -> Prefill:
        """prompt_pages, total_pages: at the end of its prefill and at its own end. extend_tokens: those to be computed.
        prefix_pages, host_pages: found in the cache, and how many of them are host-only. free_pages: of the ledger, where the
        answer may depend on it. kept_pages: what it is charged as a kept request, where it may be one: preferred if that is free."""
        resident = prefill_pages(prompt_pages, total_pages, self.smallest_pages)
        whole = Prefill(resident)
        if kept_pages is not None and (free_pages is None or kept_pages <= free_pages):
            whole = Prefill(kept_pages, kept=True)
        extend_pages = prompt_pages - prefix_pages
        room = self.num_device_pages - self.hot_pages - 1
        chunk = min(extend_pages, room, self.chunk_pages or extend_pages)
        if prompt_pages > self.scratch_pages or chunk < (1 if self.chunk_pages else extend_pages):
            return whole
        streamed = max(self.hot_pages + chunk + 1, self.smallest_pages)
        is_mostly_on_host = 2 * host_pages >= max(prefix_pages, 1)
        lacks_room = self.has_windows and free_pages is not None and whole.pages > free_pages
        is_short = extend_tokens <= self.short_extend_tokens and (is_mostly_on_host or lacks_room)
        if resident > self.num_device_pages or (is_short and streamed <= resident):
            return Prefill(streamed, chunk)
        return whole


def scratch_tokens(shape: KVShape, device_bytes: int, context_tokens: int, wanted: int | None) -> int:
    """Longest prefill that can be streamed, whole pages: what was asked for, or the longest context within its share of the GPU
    memory for the cache."""
    if wanted is not None:
        return pages_for(wanted, shape.page_size) * shape.page_size
    longest = longest_pages(context_tokens, shape) * shape.page_size
    return min(longest, shape.scratch_tokens(int(MAX_SCRATCH_SHARE * device_bytes)))


def longest_pages(context_tokens: int, shape: KVShape) -> int:
    """Pages of the longest request, for which the resolver keeps a row of translated pages per slot."""
    return pages_for(context_tokens, shape.page_size) + 1


def hot_shape(num_slots: int, num_groups: int, resolved: ResolvedConfig, max_pages: int) -> HotShape:
    """Hot buffers of all request slots; the bytes of their state are the kernels' figure.

    max_pages: pages of the longest request, for which the resolver keeps a translated page table per slot.
    """
    from sglang_hisparse.kernels.hot_state import HotGroupState

    return HotShape(
        num_slots=num_slots,
        buffer_rows=resolved.device_buffer_size,
        num_groups=num_groups,
        state_bytes=HotGroupState.bytes(
            num_slots, resolved.device_buffer_size, evicts_by_score=resolved.evicts_by_score
        ),
        result_rows=resolved.top_k + max_pages,
    )


def decide_plan(
    shape: KVShape,
    hot: HotShape,
    *,
    device_bytes: int,
    host_bytes: int,
    ranks: int,
    ratio: float | None,
    host_pool_bytes: int | None = None,
    max_device_tokens: int | None = None,
    scratch_tokens: int = 0,
    elastic: bool | None = False,
    obstacle: str | None = None,
) -> MemoryPlan:
    """The plan that a server makes at start: a given ratio is kept or refused, only host_pool_bytes may shrink it.

    device_bytes: GPU memory of one rank for the cache. host_bytes: what each of the machine's `ranks` may pin.
    host_pool_bytes: the user's cap on that. max_device_tokens: the user's cap on the device pool. scratch_tokens: see the
    function of that name; less is planned where no request can be that long. elastic, obstacle: whether the
    border between KV and index-K moves, and what is in its way (decide_border). Raises ConfigError.
    """
    scratch = scratch_tokens

    def plan(ratio: float | None, available_host_bytes: int, cap: int | None = None) -> MemoryPlan:
        return plan_memory(
            shape,
            hot,
            device_bytes=device_bytes,
            available_host_bytes=available_host_bytes,
            ratio=ratio,
            host_pool_bytes=cap,
            max_device_tokens=max_device_tokens,
            scratch_tokens=scratch,
        )

    if ratio is not None and (host_pool_bytes is None or host_pool_bytes > host_bytes):
        check_host_memory(
            plan(ratio, UNBOUNDED_BYTES).host_bytes,
            host_bytes * ranks,
            ranks,
            ratio=ratio,
            bytes_at_ratio=lambda smaller: plan(smaller, UNBOUNDED_BYTES).host_bytes,
        )
    planned = plan(ratio, host_bytes, host_pool_bytes)
    if scratch > planned.logical_tokens:
        scratch = planned.logical_tokens
        planned = plan(ratio, host_bytes, host_pool_bytes)
    return decide_border(planned, elastic, obstacle=obstacle, max_device_tokens=max_device_tokens)
