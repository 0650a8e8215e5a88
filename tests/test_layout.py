"""Goal: the division of memory is exact arithmetic. Method: hand figures for real model shapes and random budgets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.layout import (
    GIB,
    HotShape,
    KVShape,
    describe_plan,
    least_device_tokens,
    logical_tokens,
    plan_memory,
)
from sglang_hisparse.layout_table import render

V32_BF16 = KVShape(num_layers=61, num_leaders=61, row_bytes=1152)
V32_FP8 = KVShape(num_layers=61, num_leaders=61, row_bytes=656)
GLM_FP8 = KVShape(num_layers=78, num_leaders=21, row_bytes=656)
HOT = HotShape(num_slots=65, buffer_rows=4096, num_groups=21, state_bytes=65 * (4096 * 5 + 128))
NO_HOT = HotShape(num_slots=1, buffer_rows=64, num_groups=1, state_bytes=0)


def test_bytes_of_known_models() -> None:
    """Goal: bytes per token and page of V3.2 and GLM-5.x. Method: figures worked out by hand."""
    assert V32_BF16.kv_token_bytes == 70_272 and V32_BF16.page_bytes == 73_728
    assert V32_FP8.kv_token_bytes == 40_016 and V32_FP8.index_token_bytes == 8_052
    assert GLM_FP8.kv_token_bytes == 51_168 and GLM_FP8.index_token_bytes == 2_772
    assert HOT.lease_pages(64) == 64 and HOT.hot_pages_bytes(64) == 65 * 64 * 4
    plan = describe_plan(V32_FP8, NO_HOT, device_tokens=640, ratio=10)
    assert (plan.device_kv_bytes, plan.index_bytes) == (704 * 40_016, 6464 * 8_052)
    assert (plan.host_bytes, plan.page_table_bytes) == (6464 * 40_016, 101 * 4)


@pytest.mark.parametrize(
    ("shape", "ratio", "share"),
    [(V32_FP8, 10, 0.40), (V32_BF16, 10, 0.52), (GLM_FP8, 10, 0.68), (GLM_FP8, 4, 0.87), (GLM_FP8, 2, 0.95)],
)
def test_share_of_plain_pool(shape: KVShape, ratio: int, share: float) -> None:
    """Goal: the published capacity shares hold. Method: device tokens over a plain pool's in 60 GiB, host unbounded."""
    plan = plan_memory(shape, NO_HOT, device_bytes=60 * GIB, available_host_bytes=10_000 * GIB, ratio=ratio)
    assert plan.device_tokens / plan.plain_tokens == pytest.approx(share, abs=0.012)
    assert plan.ratio == ratio and not plan.host_bound


def test_logical_tokens_inverts_the_division() -> None:
    """Goal: ratio = logical / device gives logical back. Method: all page counts of awkward quotients."""
    for device in range(64, 64 * 60, 64):
        for logical in range(device, device * 3, 64 * 7):
            assert logical_tokens(device, logical / device, 64) == logical
    assert logical_tokens(640, 1.05, 64) == 640
    assert logical_tokens(640, 2.5, 64) == 1600


def test_host_memory_bounds_the_ratio() -> None:
    """Goal: a ratio the host cannot hold shrinks, freeing index-K for device tokens. Method: compare plans."""
    free = plan_memory(GLM_FP8, HOT, device_bytes=40 * GIB, available_host_bytes=10_000 * GIB, ratio=10)
    bound = plan_memory(GLM_FP8, HOT, device_bytes=40 * GIB, available_host_bytes=100 * GIB, ratio=10)
    assert bound.host_bound and bound.ratio < 10 and bound.host_bytes <= 100 * GIB
    assert bound.host_bytes > 100 * GIB - 2 * 64 * GLM_FP8.kv_token_bytes
    assert bound.device_tokens > free.device_tokens
    capped = plan_memory(
        GLM_FP8, HOT, device_bytes=40 * GIB, available_host_bytes=10_000 * GIB, ratio=10, host_pool_bytes=100 * GIB
    )
    assert (capped.device_tokens, capped.logical_tokens) == (bound.device_tokens, bound.logical_tokens)


def test_derived_ratio_uses_the_host_but_spares_the_gpu() -> None:
    """Goal: null ratio follows host memory until index-K has half the budget. Method: a small and a huge host."""
    small = plan_memory(V32_FP8, HOT, device_bytes=40 * GIB, available_host_bytes=60 * GIB)
    assert small.requested_ratio is None and not small.host_bound
    assert 60 * GIB - 2 * 64 * V32_FP8.kv_token_bytes < small.host_bytes <= 60 * GIB
    huge = plan_memory(V32_FP8, HOT, device_bytes=40 * GIB, available_host_bytes=10_000 * GIB)
    assert huge.index_bytes <= 20 * GIB + 64 * V32_FP8.index_token_bytes
    assert huge.ratio == pytest.approx(40_016 / 8_052, rel=0.01)


def test_device_cap_is_floored_and_host_follows() -> None:
    """Goal: max_total_tokens limits the device pool only. Method: a cap that is not a multiple of the page."""
    plan = plan_memory(
        GLM_FP8, HOT, device_bytes=60 * GIB, available_host_bytes=500 * GIB, ratio=8, max_device_tokens=200_001
    )
    assert plan.device_tokens == 200_000 // 64 * 64 and plan.logical_tokens == plan.device_tokens * 8


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"device_bytes": 40 * GIB, "available_host_bytes": 30 * GIB, "ratio": 4}, ["host memory", "ratio 1 needs"]),
        (
            {"device_bytes": 40 * GIB, "available_host_bytes": 900 * GIB, "host_pool_bytes": 20 * GIB},
            ["host_pool_gib", "max_total_tokens"],
        ),
        ({"device_bytes": 1 << 20, "available_host_bytes": GIB, "ratio": 2}, ["max_running_requests", "slots"]),
        (
            {"device_bytes": 256 << 20, "available_host_bytes": 900 * GIB, "ratio": 40},
            ["device pool", "largest host_to_device_ratio", "4288"],
        ),
        ({"device_bytes": 80 << 20, "available_host_bytes": 900 * GIB, "ratio": 2}, ["device_buffer_size (4096)"]),
        ({"device_bytes": GIB, "available_host_bytes": GIB, "ratio": 0.5}, ["host_to_device_ratio", "below 1"]),
    ],
)
def test_refusals_name_what_fits(kwargs: dict, words: list[str]) -> None:
    """Goal: nothing fits -> one line with the remedy. Method: one case per reason."""
    with pytest.raises(ConfigError) as caught:
        plan_memory(GLM_FP8, HOT, **kwargs)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_named_host_figure_does_fit() -> None:
    """Goal: the remedy is true. Method: plan again with exactly the tokens that the refusal names."""
    with pytest.raises(ConfigError) as caught:
        plan_memory(GLM_FP8, HOT, device_bytes=40 * GIB, available_host_bytes=30 * GIB, ratio=4)
    tokens = int(str(caught.value).split("max_total_tokens ")[1].split()[0])
    plan = plan_memory(
        GLM_FP8, HOT, device_bytes=40 * GIB, available_host_bytes=30 * GIB, ratio=4, max_device_tokens=tokens
    )
    assert plan.device_tokens == plan.logical_tokens == tokens


@settings(max_examples=200, deadline=None)
@given(
    shape=st.sampled_from([V32_BF16, V32_FP8, GLM_FP8]),
    device_mib=st.integers(64, 120_000),
    host_mib=st.integers(0, 2_000_000),
    ratio=st.none() | st.floats(1, 64),
    cap=st.none() | st.integers(1, 3_000_000),
)
def test_a_plan_never_exceeds_its_budgets(
    shape: KVShape, device_mib: int, host_mib: int, ratio: float | None, cap: int | None
) -> None:
    """Goal: every accepted plan fits GPU and host, in whole pages. Method: random budgets, checks from the bytes."""
    try:
        plan = plan_memory(
            shape,
            HOT,
            device_bytes=device_mib << 20,
            available_host_bytes=host_mib << 20,
            ratio=ratio,
            max_device_tokens=cap,
        )
    except ConfigError:
        return
    assert plan.device_bytes <= device_mib << 20
    assert plan.host_bytes <= host_mib << 20
    assert plan.device_tokens % 64 == plan.logical_tokens % 64 == 0
    assert least_device_tokens(shape, HOT) <= plan.device_tokens <= plan.logical_tokens
    assert cap is None or plan.device_tokens <= cap
    assert logical_tokens(plan.device_tokens, plan.ratio, 64) == plan.logical_tokens
    assert ratio is None or plan.ratio <= ratio + 1e-9


def test_render_says_what_went_where() -> None:
    """Goal: the log table carries every item. Method: look for the figures in the text."""
    plan = plan_memory(GLM_FP8, HOT, device_bytes=40 * GIB, available_host_bytes=100 * GIB, ratio=10)
    text = render(plan)
    for word in ("index-K", "page table", "hot state", "pinned KV", str(plan.device_tokens), str(plan.logical_tokens)):
        assert word in text
    assert "bound by host memory" in text and max(map(len, text.splitlines())) <= 100


@given(
    scratch=st.integers(0, 3000).map(lambda pages: pages * 64),
    gib=st.integers(8, 60),
    ratio=st.one_of(st.none(), st.floats(1, 12)),
)
@settings(max_examples=60, deadline=None)
def test_scratch_is_paid_before_tokens(scratch: int, gib: int, ratio: float | None) -> None:
    """Goal: the scratch of streamed prefills is inside the budget. Method: random sizes; the plan never exceeds the GPU's share,
    and a page of every layer more would."""
    plan = plan_memory(
        V32_FP8, HOT, device_bytes=gib * GIB, available_host_bytes=400 * GIB, ratio=ratio, scratch_tokens=scratch
    )
    assert plan.scratch_bytes == (2 * (scratch + 64) * 656 if scratch else 0)
    left = gib * GIB - plan.device_bytes
    page = 64 * V32_FP8.kv_token_bytes
    per_page = page + 64 * max(plan.ratio, 1) * (V32_FP8.index_token_bytes + 1)
    assert left >= 0 and (left < 2 * per_page or plan.host_bound or ratio is None)


def test_a_scratch_that_does_not_fit_is_refused_with_one_that_does() -> None:
    """Goal: the refusal helps. Method: a scratch of the whole budget, then the size that the message allows."""
    with pytest.raises(ConfigError, match="prefill_scratch_tokens: 10000000 tokens need .* allowed: less than") as refusal:
        plan_memory(V32_FP8, HOT, device_bytes=4 * GIB, available_host_bytes=100 * GIB, ratio=2, scratch_tokens=10_000_000)
    allowed = int(str(refusal.value).split("less than ")[1].split(",")[0])
    assert V32_FP8.scratch_bytes(allowed) < 4 * GIB
    plan_memory(V32_FP8, HOT, device_bytes=4 * GIB, available_host_bytes=100 * GIB, ratio=2, scratch_tokens=allowed // 2)
