"""A border between KV and index-K that moves: whether it does, chunks, places of the border, the plan that starts from it.

Called by capacity.py for the plan of a server, by validation, and by memory/ for the pool itself. Like layout.py it imports neither
torch nor SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_hisparse.config_text import refuse
from sglang_hisparse.errors import ConfigError, HiSparseError
from sglang_hisparse.layout import GIB, KVShape, MemoryPlan, describe_plan, least_device_tokens, pages_for
from sglang_hisparse.residency import BorderStep, border_steps

CHUNK_BYTES = 2 << 20
"""The smallest piece of a GPU's memory that can change its address."""


@dataclass(frozen=True, slots=True)
class ElasticShape:
    """A pool in pages, pad pages not counted, and bytes of one page in one layer. Leaders have index-K."""

    device_pages: int
    logical_pages: int
    page_bytes: int
    index_page_bytes: int
    num_layers: int
    num_leaders: int

    @classmethod
    def of(cls, shape: KVShape, device_tokens: int, logical_tokens: int) -> ElasticShape:
        page = shape.page_size
        return cls(
            device_pages=device_tokens // page,
            logical_pages=logical_tokens // page,
            page_bytes=page * shape.row_bytes,
            index_page_bytes=page * shape.index_row_bytes,
            num_layers=shape.num_layers,
            num_leaders=shape.num_leaders,
        )

    def num_chunks(self, chunk_bytes: int) -> int:
        """Physical memory at start: whole chunks under every layer's KV, and under index-K of as many pages."""
        pages = self.device_pages + 1
        return self.num_layers * pages_for(pages * self.page_bytes, chunk_bytes) + self.num_leaders * pages_for(
            pages * self.index_page_bytes, chunk_bytes
        )

    def steps(self, chunk_bytes: int) -> tuple[BorderStep, ...]:
        """Where the border may stand. Raises ConfigError where index-K of all logical pages finds no memory."""
        steps = border_steps(
            device_pages=self.device_pages,
            logical_pages=self.logical_pages,
            page_bytes=self.page_bytes,
            index_page_bytes=self.index_page_bytes,
            num_layers=self.num_layers,
            num_leaders=self.num_leaders,
            chunk_bytes=chunk_bytes,
        )
        if steps[-1].logical_pages < self.logical_pages or steps[-1].device_pages < 1:
            raise ConfigError(
                f"elastic_border: the memory of {self.device_pages} device pages holds index-K of {steps[-1].logical_pages} "
                f"pages, not of {self.logical_pages}; allowed: false, or a smaller host_to_device_ratio"
            )
        return steps


def pool_obstacle(*, saves_memory: bool, has_custom_pool: bool) -> str | None:
    """What the border cannot do for flags alone, None: nothing is in its way. saves_memory: --enable-memory-saver."""
    if saves_memory or has_custom_pool:
        return "cannot be combined with --enable-memory-saver or a custom memory pool"
    return None


def untried_obstacle(num_ranks: int, wanted: bool | None) -> str | None:
    """Why a border that is left open does not move in a server of `num_ranks` ranks: no server has run so on several GPUs yet."""
    return "has not run on several GPUs yet; true lets it move all the same" if wanted is None and num_ranks > 1 else None


def reason_of(error: HiSparseError) -> str:
    """What a refusal of `elastic_border` says, without the key and what is allowed."""
    return str(error).removeprefix("elastic_border: ").split("; allowed:")[0]


def check_border(wanted: bool | None, obstacle: str | None) -> None:
    """Raise ConfigError where `elastic_border: true` meets an obstacle, such as `pool_obstacle` names."""
    if wanted and obstacle is not None:
        refuse("elastic_border", True, obstacle, "null, or false")


def decide_border(
    fixed: MemoryPlan, wanted: bool | None, *, obstacle: str | None = None, max_device_tokens: int | None = None
) -> MemoryPlan:
    """The plan of a server whose settings say `elastic_border: wanted`: `fixed`, or the one that ends there.

    This is the one place that decides what None becomes: the border moves where nothing is in its way, its end holds a request, and it
    begins with more device tokens than `fixed` has. It does not where these have room beside index-K of all logical tokens, as with
    ratio 1 or a low --max-total-tokens. Else `fixed_because` of the plan says why not. True is taken at its word: ConfigError where it
    cannot be. The answer follows from the arguments alone, which must be equal on all ranks (R30).
    """
    if wanted is False:
        return fixed
    check_border(wanted, obstacle)
    if obstacle is not None:
        return replace(fixed, fixed_because=f"it {obstacle}")
    try:
        plan = elastic_plan(fixed, max_device_tokens)
    except ConfigError as error:
        if wanted:
            raise
        return replace(fixed, fixed_because=reason_of(error))
    if wanted is None and plan.device_tokens <= fixed.device_tokens:
        return replace(fixed, fixed_because=f"{fixed.device_tokens} tokens fit on the GPU beside index-K of all {fixed.logical_tokens}")
    return plan


def elastic_plan(fixed: MemoryPlan, max_device_tokens: int | None = None) -> MemoryPlan:
    """The plan that ends where `fixed` stands, and begins with the device tokens of ratio 1 in the same memory.

    Logical tokens and host memory stay; `ratio` becomes logical tokens per device token at start. Raises ConfigError where
    that memory does not make a pool of whole chunks.
    """
    shape, page = fixed.shape, fixed.shape.page_size
    spent = fixed.page_table_bytes + fixed.hot_state_bytes + fixed.hot_pages_bytes + fixed.scratch_bytes
    budget = (fixed.device_budget_bytes - spent) // CHUNK_BYTES
    most = fixed.logical_tokens if max_device_tokens is None else min(fixed.logical_tokens, max_device_tokens)
    low, high = 0, most // page
    while low < high:  # the most pages whose chunks the budget holds
        middle = (low + high + 1) // 2
        if ElasticShape.of(shape, middle * page, fixed.logical_tokens).num_chunks(CHUNK_BYTES) <= budget:
            low = middle
        else:
            high = middle - 1
    least = least_device_tokens(shape, fixed.hot)
    steps = ElasticShape.of(shape, low * page, fixed.logical_tokens).steps(CHUNK_BYTES) if low * page >= least else ()
    if not steps or steps[-1].device_pages * page < least:
        remains = steps[-1].device_pages * page if steps else low * page
        raise ConfigError(
            f"elastic_border: {budget * CHUNK_BYTES / GIB:.2f} GiB of the GPU in pieces of 2 MiB leave {remains} device tokens, "
            f"and one request needs {least}; allowed: false, a smaller host_to_device_ratio or device_buffer_size"
        )
    plan = describe_plan(
        shape,
        fixed.hot,
        device_tokens=low * page,
        ratio=fixed.logical_tokens / (low * page),
        requested_ratio=fixed.requested_ratio,
        device_budget_bytes=fixed.device_budget_bytes,
        host_budget_bytes=fixed.host_budget_bytes,
        scratch_tokens=fixed.scratch_tokens,
    )
    return with_border(plan, steps)


def with_border(plan: MemoryPlan, border: tuple[BorderStep, ...]) -> MemoryPlan:
    """The plan with that border: index-K has the memory of its first place."""
    if not border:
        return plan
    at_start = border[0].logical_pages * plan.shape.page_size
    return replace(plan, border=border, index_bytes=plan.shape.index_bytes(at_start))
