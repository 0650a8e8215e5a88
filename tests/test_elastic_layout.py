"""Goal: a plan with a moving border spends what there is and says so. Method: arithmetic by hand, and the table as text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sglang_hisparse.elastic_layout import (
    CHUNK_BYTES,
    ElasticShape,
    decide_border,
    elastic_plan,
    pool_obstacle,
    with_border,
)
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


# ---- whether it moves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [None, True])
def test_it_moves_where_that_gains_tokens(wanted: bool | None) -> None:
    """Goal: what is left open becomes what `true` is. Method: a ratio whose index-K takes KV's room."""
    plan = decide_border(fixed(4.0), wanted)
    assert plan == elastic_plan(fixed(4.0)) and plan.border and plan.fixed_because is None
    assert plan.device_tokens > 1.1 * fixed(4.0).device_tokens


@pytest.mark.parametrize(
    ("ratio", "gib", "cap", "why"),
    [
        (1.0, 2.0, None, r"\d+ tokens fit on the GPU beside index-K of all \d+"),
        (4.0, 2.0, 32_000, "32000 tokens fit on the GPU beside index-K of all 128000"),
        (16.0, 0.12, None, r"0.\d\d GiB of the GPU in pieces of 2 MiB leave \d+ device tokens, and one request needs 4288"),
    ],
)
def test_left_open_it_stays_where_nothing_is_gained_or_no_request_fits(ratio: float, gib: float, cap: int | None, why: str) -> None:
    """Goal: no server is worse for the default, or refuses to start for it. Method: ratio 1; a cap under which everything fits, where a
    border that moves would end below; memory that the pieces leave too little of. The fixed plan is given, with the reason."""
    before = fixed(ratio, gib, **({} if cap is None else {"max_device_tokens": cap}))
    plan = decide_border(before, None, max_device_tokens=cap)
    assert replace(plan, fixed_because=None) == before
    assert re.fullmatch(why, plan.fixed_because or ""), plan.fixed_because
    assert f"elastic_border is off, since {plan.fixed_because}" in " ".join(render(plan).split())


def test_a_cap_that_binds_less_than_memory_is_no_reason_to_stay() -> None:
    """Goal: the rule is what is gained, not whether there is a cap. Method: a cap between the tokens of both borders."""
    before = fixed(4.0)
    cap = (before.device_tokens + elastic_plan(before).device_tokens) // 2
    plan = decide_border(fixed(4.0, max_device_tokens=cap), None, max_device_tokens=cap)
    assert plan.border and before.device_tokens < plan.device_tokens <= cap


def test_an_obstacle_ends_the_start_only_where_true_was_asked_for() -> None:
    """Goal: three settings, three answers. Method: the memory saver, and no obstacle for one that is false."""
    why = pool_obstacle(saves_memory=True, has_custom_pool=False)
    assert why == pool_obstacle(saves_memory=False, has_custom_pool=True) and pool_obstacle(saves_memory=False, has_custom_pool=False) is None
    with pytest.raises(ConfigError, match="elastic_border: true cannot be combined with --enable-memory-saver or a custom memory pool; allowed"):
        decide_border(fixed(4.0), True, obstacle=why)
    assert decide_border(fixed(4.0), None, obstacle=why) == replace(fixed(4.0), fixed_because=f"it {why}")
    assert decide_border(fixed(4.0), False, obstacle=why) == fixed(4.0)


def test_true_is_taken_at_its_word() -> None:
    """Goal: `true` is what it was. Method: it moves though nothing is gained, and is refused where no request fits."""
    before = fixed(4.0, max_device_tokens=32_000)
    assert decide_border(before, True, max_device_tokens=32_000) == elastic_plan(before, 32_000)
    with pytest.raises(ConfigError, match="elastic_border: .* one request needs 4288"):
        decide_border(fixed(16.0, 0.12), True)
