"""Goal: a plan with a moving border spends what there is and says so. Method: arithmetic by hand, and the table as text."""

from __future__ import annotations

import pytest

from sglang_hisparse.elastic_layout import CHUNK_BYTES, ElasticShape, elastic_plan, with_border
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.layout import GIB, HotShape, KVShape, MemoryPlan, plan_memory
from sglang_hisparse.layout_table import render
from sglang_hisparse.residency import BorderStep

SHAPE = KVShape(num_layers=8, num_leaders=4, row_bytes=1152)
HOT = HotShape(num_slots=5, buffer_rows=4096, num_groups=4, state_bytes=1 << 20)


def fixed(ratio: float, gib: float = 2.0, **changes: int) -> MemoryPlan:
    return plan_memory(
        SHAPE, HOT, device_bytes=int(gib * GIB), available_host_bytes=1 << 50, ratio=ratio, **changes
    )  # fmt: skip


@pytest.mark.parametrize("ratio", [1.0, 1.7, 4.0, 16.0])
def test_chunks_fit_the_budget_and_one_page_more_does_not(ratio: float) -> None:
    """Goal: no memory is given away, none invented. Method: chunks of the plan, and of a plan one page larger."""
    before = fixed(ratio)
    plan = elastic_plan(before)
    spent = plan.page_table_bytes + plan.hot_state_bytes + plan.hot_pages_bytes

    def chunks(tokens: int) -> int:
        return ElasticShape.of(SHAPE, tokens, plan.logical_tokens).num_chunks(CHUNK_BYTES) * CHUNK_BYTES + spent

    assert chunks(plan.device_tokens) <= plan.device_budget_bytes
    full = plan.device_tokens == plan.logical_tokens
    assert full or chunks(plan.device_tokens + 64) > plan.device_budget_bytes
    assert plan.logical_tokens == before.logical_tokens and plan.host_bytes == before.host_bytes
    assert plan.ratio_at_end == pytest.approx(ratio, rel=0.03)


def test_a_cap_on_tokens_caps_the_start() -> None:
    """Goal: --max-total-tokens means device tokens at start. Method: a cap of a hundred pages."""
    plan = elastic_plan(fixed(4.0, max_device_tokens=32_000), 32_000)
    assert plan.device_tokens == 32_000 and plan.logical_tokens == 128_000
    assert plan.least_device_tokens < 32_000


def test_what_cannot_hold_a_request_is_refused() -> None:
    """Goal: no server starts that could run nothing at the end. Method: hardly more memory than one request needs."""
    with pytest.raises(ConfigError, match="elastic_border: .* one request needs 4288"):
        elastic_plan(fixed(16.0, 0.12))


def test_the_table_says_where_it_ends() -> None:
    """Goal: the log shows both ends of the border. Method: rows of the rendered table."""
    plan = elastic_plan(fixed(4.0))
    text = render(plan)
    assert f"{plan.border[0].logical_pages * 64} tokens" in text
    assert f"{plan.least_device_tokens} + {plan.logical_tokens} tokens" in text
    assert "ratio 4" in text or "ratio 3.9" in text
    assert "when all logical tokens" not in render(fixed(4.0))


def test_no_border_changes_nothing() -> None:
    """Goal: the default is untouched. Method: the same object comes back."""
    plan = fixed(4.0)
    assert with_border(plan, ()) is plan and plan.least_device_tokens == plan.device_tokens
    assert with_border(plan, (BorderStep(9, 9),)).least_device_tokens == 9 * 64
