"""Byte arithmetic of the cache: rows, pages, tokens, and what fits where.

Owns the one rule that turns a ratio, a GPU budget and host memory into device, logical and host tokens (`plan_memory`);
layout_table.py shows it. Called by memory/sizing.py and memory/pool.py, by validation and the
command line. It must never import torch or SGLang: a plan can be made on a machine that has neither a GPU nor a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.residency.types import BorderStep

GIB = 1 << 30

PAGE_TABLE_ENTRY_BYTES = 4
HOT_PAGE_ENTRY_BYTES = 4
RESULT_ROW_BYTES = 4
INDEX_ROW_BYTES = 132
"""One index-K row: 128 fp8 values and their fp32 scale."""

MAX_INDEX_SHARE = 0.5
"""A ratio that is derived, not given, stops where index-K would take more than this share of the GPU budget."""

SCRATCH_LAYERS = 2
"""Layers whose rows the scratch of streamed prefills holds: one is read while the next arrives."""

MAX_SCRATCH_SHARE = 0.02
"""A scratch whose size is not given takes no more than this share of the GPU budget."""

TAIL_PAGES = 2
"""The newest pages of a request, which stay on the GPU while it runs."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` rows, the last one possibly in part."""
    return -(-tokens // page_size)


def logical_tokens(device_tokens: int, ratio: float, page_size: int) -> int:
    """Logical tokens (== host rows without the pad page) behind `device_tokens`, floored to whole pages.

    The only place where a size meets the ratio. A ratio that was itself computed as logical / device gives back that
    logical count exactly: the small term absorbs the rounding of the division.
    """
    return int(device_tokens * ratio / page_size + 1e-6) * page_size


@dataclass(frozen=True, slots=True)
class KVShape:
    """Bytes of one token in one rank's pools.

    num_layers counts layers with KV rows, num_leaders those of them that own an indexer (and so index-K rows).
    """

    num_layers: int
    num_leaders: int
    row_bytes: int
    index_row_bytes: int = INDEX_ROW_BYTES
    page_size: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.num_leaders <= self.num_layers:
            raise ConfigError(f"index groups: {self.num_leaders} leaders for {self.num_layers} layers")
        if min(self.row_bytes, self.index_row_bytes, self.page_size) <= 0:
            raise ConfigError(f"cache shape: every size must be positive, got {self}")

    @property
    def page_bytes(self) -> int:
        """One page of one layer."""
        return self.page_size * self.row_bytes

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token over all layers; the same on the GPU and on the host."""
        return self.num_layers * self.row_bytes

    @property
    def index_token_bytes(self) -> int:
        """Index-K of one logical token over the leader layers."""
        return self.num_leaders * self.index_row_bytes

    @property
    def mean_group_row_bytes(self) -> float:
        """Bytes that one miss moves, averaged over the index groups."""
        return self.kv_token_bytes / self.num_leaders

    def device_kv_bytes(self, device_tokens: int) -> int:
        """KV buffers of all layers, pad page included."""
        return (device_tokens + self.page_size) * self.kv_token_bytes

    def index_bytes(self, num_logical: int) -> int:
        """Index-K buffers of the leader layers, pad page included."""
        return (num_logical + self.page_size) * self.index_token_bytes

    def host_bytes(self, num_logical: int) -> int:
        """Pinned host rows of all layers, pad page included."""
        return (num_logical + self.page_size) * self.kv_token_bytes

    def page_table_bytes(self, num_logical: int) -> int:
        """Logical page -> device page, entry 0 included."""
        return (num_logical // self.page_size + 1) * PAGE_TABLE_ENTRY_BYTES

    def scratch_bytes(self, scratch_tokens: int) -> int:
        """Rows of two layers for streamed prefills of up to that many tokens, pad page included; 0 tokens: no scratch."""
        return SCRATCH_LAYERS * (scratch_tokens + self.page_size) * self.row_bytes if scratch_tokens else 0

    def scratch_tokens(self, num_bytes: int) -> int:
        """Tokens, in whole pages, whose scratch fits `num_bytes`."""
        tokens = num_bytes // (SCRATCH_LAYERS * self.row_bytes) // self.page_size * self.page_size - self.page_size
        return max(tokens, 0)


@dataclass(frozen=True, slots=True)
class HotShape:
    """Hot buffers of one rank: slots are request slots (the padding slot included), rows are per slot and group.

    state_bytes is the tensor memory of one group's tags, ages and header for all slots; it comes from the kernels'
    HotGroupState, whose layout this module does not know. result_rows: entries per slot of the resolver's
    output (top_k) and of its translated page table (pages of the longest request).
    """

    num_slots: int
    buffer_rows: int
    num_groups: int
    state_bytes: int
    result_rows: int = 0

    def lease_pages(self, page_size: int) -> int:
        """Device pages of one lease."""
        return pages_for(self.buffer_rows, page_size)

    def hot_pages_bytes(self, page_size: int) -> int:
        """The table request slot -> leased pages."""
        return self.num_slots * self.lease_pages(page_size) * HOT_PAGE_ENTRY_BYTES

    @property
    def all_state_bytes(self) -> int:
        """State of all groups, and what they share: the resolver's output and its translated page table."""
        return self.num_groups * self.state_bytes + self.num_slots * self.result_rows * RESULT_ROW_BYTES

    def fixed_bytes(self, page_size: int) -> int:
        """GPU memory that does not grow with tokens."""
        return self.all_state_bytes + self.hot_pages_bytes(page_size)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What goes where on one rank. Token counts are whole pages without the pad page; *_bytes include it."""

    shape: KVShape
    hot: HotShape
    device_tokens: int
    logical_tokens: int
    ratio: float
    requested_ratio: float | None
    device_kv_bytes: int
    index_bytes: int
    page_table_bytes: int
    hot_state_bytes: int
    hot_pages_bytes: int
    host_bytes: int
    device_budget_bytes: int
    host_budget_bytes: int
    scratch_tokens: int = 0  #: longest prefill that can be streamed; 0: none is
    border: tuple[BorderStep, ...] = ()  #: where it may stand, in pages; at start as described here; empty: it does not move
    fixed_because: str | None = None  #: why it does not, where the settings leave it open (elastic_layout.decide_border)

    @property
    def least_device_tokens(self) -> int:
        """Device tokens that remain wherever the border goes."""
        return self.border[-1].device_pages * self.shape.page_size if self.border else self.device_tokens

    @property
    def ratio_at_end(self) -> float:
        """Logical tokens per device token wherever the border stops: what host_to_device_ratio asks for."""
        return self.logical_tokens / self.least_device_tokens if self.border else self.ratio

    @property
    def scratch_bytes(self) -> int:
        """GPU memory of the scratch of streamed prefills."""
        return self.shape.scratch_bytes(self.scratch_tokens)

    @property
    def host_tokens(self) -> int:
        """Host rows that can hold tokens: host row number == logical id."""
        return self.logical_tokens

    @property
    def device_bytes(self) -> int:
        """GPU memory of everything planned here."""
        return (
            self.device_kv_bytes
            + self.index_bytes
            + self.page_table_bytes
            + self.hot_state_bytes
            + self.hot_pages_bytes
            + self.scratch_bytes
        )

    @property
    def plain_tokens(self) -> int:
        """Tokens a server without a host tier would hold in the same GPU memory (index-K of leaders only)."""
        per_token = self.shape.kv_token_bytes + self.shape.index_token_bytes
        tokens = self.device_bytes // per_token - self.shape.page_size
        return max(tokens, 0) // self.shape.page_size * self.shape.page_size

    @property
    def host_bound(self) -> bool:
        """Whether host memory made the ratio smaller than the one asked for."""
        # Chunks make the end of a moving border a little other than the fixed border that it was planned by.
        slack = 0.01 * self.ratio_at_end if self.border else 1e-6
        return self.requested_ratio is not None and self.ratio_at_end < self.requested_ratio - slack


def describe_plan(
    shape: KVShape,
    hot: HotShape,
    *,
    device_tokens: int,
    ratio: float,
    requested_ratio: float | None = None,
    device_budget_bytes: int = 0,
    host_budget_bytes: int = 0,
    scratch_tokens: int = 0,
) -> MemoryPlan:
    """The plan of a pool whose size is already decided; checks nothing."""
    num_logical = logical_tokens(device_tokens, ratio, shape.page_size)
    return MemoryPlan(
        shape=shape,
        hot=hot,
        device_tokens=device_tokens,
        logical_tokens=num_logical,
        ratio=ratio,
        requested_ratio=requested_ratio,
        device_kv_bytes=shape.device_kv_bytes(device_tokens),
        index_bytes=shape.index_bytes(num_logical),
        page_table_bytes=shape.page_table_bytes(num_logical) * _num_tables(scratch_tokens),
        hot_state_bytes=hot.all_state_bytes,
        hot_pages_bytes=hot.hot_pages_bytes(shape.page_size),
        host_bytes=shape.host_bytes(num_logical),
        device_budget_bytes=device_budget_bytes,
        host_budget_bytes=host_budget_bytes,
        scratch_tokens=scratch_tokens,
    )


def _num_tables(scratch_tokens: int) -> int:
    """Page tables over all logical pages: streamed prefills have one of their own."""
    return 2 if scratch_tokens else 1


def plan_memory(
    shape: KVShape,
    hot: HotShape,
    *,
    device_bytes: int,
    available_host_bytes: int,
    ratio: float | None = None,
    host_pool_bytes: int | None = None,
    max_device_tokens: int | None = None,
    scratch_tokens: int = 0,
) -> MemoryPlan:
    """Divide one rank's memory.

    device_bytes: GPU memory for KV, index-K, page tables, hot state and the scratch of `scratch_tokens` together. available_host_bytes: host memory this
    rank may pin; host_pool_bytes: the user's cap on it. max_device_tokens: the user's cap on the device pool.
    ratio None takes the largest ratio that host memory holds, but none whose index-K exceeds MAX_INDEX_SHARE of the
    budget; a given ratio shrinks to what the host holds (`host_bound`), never below 1.

    Raises ConfigError, naming the figure that would fit, when hot state, one request or ratio 1 does not fit.
    """
    page = shape.page_size
    if ratio is not None and ratio < 1:
        raise ConfigError(f"host_to_device_ratio: {ratio} is below 1; allowed: a number >= 1, or null to derive it")
    host_budget = available_host_bytes if host_pool_bytes is None else min(available_host_bytes, host_pool_bytes)
    tables = _num_tables(scratch_tokens)
    budget = _token_budget(shape, hot, device_bytes, scratch_tokens)
    device_at = _device_tokens_solver(shape, budget, max_device_tokens, tables)

    most_logical = max(host_budget // shape.kv_token_bytes // page * page - page, 0)
    if ratio is None:
        index_cap = int(MAX_INDEX_SHARE * budget) // shape.index_token_bytes // page * page
        most_logical = min(most_logical, index_cap)
        num_logical = most_logical
        tokens = device_at(num_logical)
    else:
        tokens = _tokens_at_ratio(shape, budget, ratio, max_device_tokens, tables)
        num_logical = logical_tokens(tokens, ratio, page)
        if num_logical > most_logical:
            num_logical = most_logical
            tokens = device_at(num_logical)

    _check_one_request(shape, hot, budget, tokens, ratio, tables)
    if num_logical < tokens:
        raise ConfigError(_host_too_small(shape, tokens, num_logical, host_budget, host_pool_bytes))
    if ratio is None or num_logical < logical_tokens(tokens, ratio, page):
        actual = num_logical / tokens
    else:
        actual = ratio
    return describe_plan(
        shape,
        hot,
        device_tokens=tokens,
        ratio=actual,
        requested_ratio=ratio,
        device_budget_bytes=device_bytes,
        host_budget_bytes=host_budget,
        scratch_tokens=scratch_tokens,
    )


def _token_budget(shape: KVShape, hot: HotShape, device_bytes: int, scratch_tokens: int) -> int:
    """GPU bytes left for tokens once hot state, scratch and the pad pages are paid."""
    scratch = shape.scratch_bytes(scratch_tokens)
    pads = shape.page_size * (shape.kv_token_bytes + shape.index_token_bytes) + 2 * PAGE_TABLE_ENTRY_BYTES
    if scratch and (left := device_bytes - pads - hot.fixed_bytes(shape.page_size)) <= scratch:
        raise ConfigError(
            f"prefill_scratch_tokens: {scratch_tokens} tokens need {scratch / GIB:.2f} GiB of the {left / GIB:.2f} GiB left for "
            f"the cache; allowed: less than {shape.scratch_tokens(max(left, 0))}, or 0 for none"
        )
    device_bytes -= scratch
    fixed = hot.fixed_bytes(shape.page_size)
    budget = device_bytes - fixed - pads
    if budget <= 0:
        per_slot = max(fixed // hot.num_slots, 1)
        raise ConfigError(
            f"max_running_requests: hot state of {hot.num_slots} request slots needs {fixed / GIB:.2f} GiB of the "
            f"{device_bytes / GIB:.2f} GiB left for the cache; at most {max(device_bytes - pads, 0) // per_slot} slots "
            "fit before any token does; lower max_running_requests or device_buffer_size"
        )
    return budget


def _logical_token_bytes(shape: KVShape, tables: int) -> float:
    """GPU bytes that every logical token costs, resident or not; `tables`: page tables over all of them."""
    return shape.index_token_bytes + tables * PAGE_TABLE_ENTRY_BYTES / shape.page_size


def _device_tokens_solver(shape: KVShape, budget: int, cap: int | None, tables: int) -> Callable[[int], int]:
    """Device tokens left beside a given number of logical tokens, floored to pages."""

    def solve(num_logical: int) -> int:
        left = budget - num_logical * _logical_token_bytes(shape, tables)
        tokens = int(max(left, 0) // shape.kv_token_bytes)
        return (tokens if cap is None else min(tokens, cap)) // shape.page_size * shape.page_size

    return solve


def _tokens_at_ratio(shape: KVShape, budget: int, ratio: float, cap: int | None, tables: int) -> int:
    """Device tokens D with D * kv + ratio * D * logical == budget, floored to pages."""
    tokens = int(budget // (shape.kv_token_bytes + ratio * _logical_token_bytes(shape, tables)))
    return (tokens if cap is None else min(tokens, cap)) // shape.page_size * shape.page_size


def least_device_tokens(shape: KVShape, hot: HotShape) -> int:
    """Device tokens below which not even one request with a hot lease and its tail can run."""
    return (hot.lease_pages(shape.page_size) + TAIL_PAGES + 1) * shape.page_size


def _check_one_request(
    shape: KVShape, hot: HotShape, budget: int, tokens: int, ratio: float | None, tables: int
) -> None:
    need = least_device_tokens(shape, hot)
    if tokens >= need:
        return
    room = budget - need * shape.kv_token_bytes
    fits = room / (need * _logical_token_bytes(shape, tables))
    remedy = (
        f"the largest host_to_device_ratio that leaves it is {fits:.2f}"
        if ratio is not None and 1 <= fits < ratio
        else f"lower device_buffer_size ({hot.buffer_rows}) or give the cache more GPU memory"
    )
    raise ConfigError(
        f"device pool: {tokens} tokens cannot hold one request's hot buffer and tail ({need} tokens); {remedy}"
    )


def _host_too_small(
    shape: KVShape, tokens: int, num_logical: int, host_budget: int, host_pool_bytes: int | None
) -> str:
    key = "host_pool_gib" if host_pool_bytes is not None and host_budget == host_pool_bytes else "host memory"
    return (
        f"{key}: {host_budget / GIB:.2f} GiB per rank holds {num_logical} tokens, fewer than the {tokens} of the "
        f"device pool; ratio 1 needs {shape.host_bytes(tokens) / GIB:.2f} GiB per rank, "
        f"or max_total_tokens {num_logical} fits this host memory"
    )
