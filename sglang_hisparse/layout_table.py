"""The memory plan as a table: in the server's log at start, and in what `sglang-hisparse plan` prints.

Called by the runtime and by planning/. It shows the figures of layout.py and computes none.
"""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from sglang_hisparse.layout import GIB, MemoryPlan


def plan_table(plan: MemoryPlan) -> Table:
    """One table: what, how much of it, where and how large."""
    shape, hot = plan.shape, plan.hot
    asked = "derived" if plan.requested_ratio is None else f"asked {plan.requested_ratio:g}"
    bound = ", bound by host memory" if plan.host_bound else ""
    table = Table(title=f"HiSparse memory per rank: ratio {plan.ratio_at_end:.4g} ({asked}{bound})")
    for name, justify in (("where", "left"), ("what", "left"), ("count", "right"), ("GiB", "right")):
        table.add_column(name, justify=justify)
    kv = f"KV, {shape.num_layers} layers x {shape.row_bytes} B"
    index = f"index-K, {shape.num_leaders} layers x {shape.index_row_bytes} B"
    state = f"hot state, {hot.num_groups} groups x {hot.buffer_rows} rows"
    indexed = plan.border[0].logical_pages * shape.page_size if plan.border else plan.logical_tokens
    rows = (
        ("GPU", kv, f"{plan.device_tokens} tokens", plan.device_kv_bytes),
        ("GPU", index, f"{indexed} tokens", plan.index_bytes),
        ("GPU", "page tables", f"{plan.logical_tokens // shape.page_size + 1} pages", plan.page_table_bytes),
        ("GPU", state, f"{hot.num_slots} slots", plan.hot_state_bytes),
        ("GPU", "hot pages table", f"{hot.num_slots} slots", plan.hot_pages_bytes),
        ("GPU", "scratch of streamed prefills", f"{plan.scratch_tokens} tokens", plan.scratch_bytes),
        ("host", "pinned KV", f"{plan.host_tokens} tokens", plan.host_bytes),
    )
    for where, what, count, num_bytes in rows:
        table.add_row(where, what, count, f"{num_bytes / GIB:.3f}")
    if plan.border:
        end = f"{plan.least_device_tokens} + {plan.logical_tokens} tokens"
        table.add_row("GPU", "KV + index-K when all logical tokens are in use", end, "the same")
    elif plan.fixed_because is not None:
        table.caption = f"elastic_border is off, since {plan.fixed_because}"
    table.add_section()
    table.add_row("GPU", "total", f"plain: {plan.plain_tokens} tokens", f"{plan.device_bytes / GIB:.3f}")
    return table


def render(plan: MemoryPlan, width: int = 100) -> str:
    """The plan's table as plain text for one log record."""
    out = StringIO()
    Console(file=out, width=width, no_color=True, legacy_windows=False).print(plan_table(plan))
    return out.getvalue().rstrip()
