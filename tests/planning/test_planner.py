"""Goal: a plan agrees with the server and with hand arithmetic. Method: sizing and admission of the server beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES
from sglang.srt.runtime_context import get_context, get_parallel
from transformers import PretrainedConfig

from sglang_hisparse import capacity, settings
from sglang_hisparse.config import GIB, Eviction, HiSparseConfig
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.layout import MAX_INDEX_SHARE, MemoryPlan
from sglang_hisparse.memory import sizing
from sglang_hisparse.memory.allocator import HiSparseAllocator
from sglang_hisparse.planning import planner
from sglang_hisparse.planning.model_shapes import BUILT_IN, CacheType, built_in
from sglang_hisparse.planning.planner import Choices, Deployment, Load, fits, make_plan, memory_plan
from sglang_hisparse.residency import ResidencyLimits

NODE = Deployment(dp=8, host_bytes=1800 * GIB, max_running_requests=480)


def as_server_plans(
    name: str,
    cache: CacheType,
    cache_bytes: int,
    *,
    ratio: float | None,
    buffer: int,
    running: int | None,
    host: int,
    **keys: Any,
) -> MemoryPlan:
    """`sizing.make_plan` with SGLang's own configurator for the same model, GPU bytes and host bytes of one rank. keys:
    further keys of --hisparse-config."""
    import torch

    config = BUILT_IN[name].config
    text = PretrainedConfig(architectures=["DeepseekV32ForCausalLM"], **config)
    configurator = KVCacheConfigurator.__new__(KVCacheConfigurator)
    configurator.model_config = SimpleNamespace(
        hf_config=text,
        hf_text_config=text,
        kv_lora_rank=text.kv_lora_rank,
        qk_rope_head_dim=text.qk_rope_head_dim,
        context_len=text.max_position_embeddings,
    )
    layers = text.num_hidden_layers
    configurator.layer_info = SimpleNamespace(start_layer=0, end_layer=layers, num_effective_layers=layers)
    configurator.kv_cache_dtype = torch.bfloat16 if cache is CacheType.BF16 else torch.float8_e4m3fn
    configurator.device = "cpu"
    configurator.mambaish_config, configurator.attn_dp_size, configurator.is_draft_worker = None, 1, False
    resolved = HiSparseConfig(device_buffer_size=buffer, host_to_device_ratio=ratio, **keys).resolve(built_in(name).facts)
    override = get_context().override_server_args(
        enable_hisparse=True, hisparse_config="{}", page_size=64, max_running_requests=running
    )
    with override, get_parallel().override(attn_dcp_rank=0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "available_host_memory_bytes", lambda **_: host)
        return sizing.make_plan(configurator, cache_bytes, resolved)


@pytest.fixture(autouse=True)
def forget_settings() -> Iterator[None]:
    yield
    settings.reset()


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("cache", CacheType)
@pytest.mark.parametrize(("ratio", "buffer", "running"), [(4, 4096, 64), (2.7, 6144, 480), (None, 4096, None)])
def test_the_plan_is_the_servers(
    name: str, cache: CacheType, ratio: float | None, buffer: int, running: int | None
) -> None:
    """Goal: what is planned is what a server will log. Method: all figures of both memory plans, for the same inputs."""
    deployment = Deployment(gpus=1, tp=1, gpus_per_host=1, host_bytes=300 * GIB, max_running_requests=running)
    choices = Choices(cache_type=cache, ratio=ratio, buffer_rows=buffer, elastic=False)
    ours = memory_plan(built_in(name), deployment, choices, 40 * GIB, ratio)
    server = as_server_plans(
        name, cache, 40 * GIB, ratio=ratio, buffer=buffer, running=running, host=deployment.host_bytes, elastic_border=False
    )
    assert ours == server
    assert ours.device_tokens > 100_000


@pytest.mark.parametrize(("ratio", "moves"), [(6, True), (1, False)])
def test_a_border_left_open_is_decided_as_in_a_server(ratio: float, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: plan and server agree where `elastic_border` is left out. Method: all figures of both, the server's driver willing."""
    monkeypatch.setattr(sizing, "border_obstacle", lambda device, wanted: None)
    deployment = Deployment(gpus=1, tp=1, gpus_per_host=1, host_bytes=300 * GIB, max_running_requests=64)
    choices = Choices(cache_type=CacheType.BF16, buffer_rows=4096)
    ours = memory_plan(built_in("GLM-5.1"), deployment, choices, 40 * GIB, ratio)
    assert ours == as_server_plans(
        "GLM-5.1", CacheType.BF16, 40 * GIB, ratio=ratio, buffer=4096, running=64, host=deployment.host_bytes
    )
    assert bool(ours.border) == moves == (ours.fixed_because is None)


@pytest.mark.parametrize("ratio", [6, None])
def test_a_moving_border_and_scores_are_planned_too(ratio: float | None) -> None:
    """Goal: the same with `elastic_border` and `eviction`. Method: all figures of both plans; each option changes what it should."""
    deployment = Deployment(gpus=1, tp=1, gpus_per_host=1, host_bytes=300 * GIB, max_running_requests=64)
    choices = Choices(cache_type=CacheType.BF16, buffer_rows=4096, eviction=Eviction.INDEX_SCORE, elastic=True)
    model = built_in("GLM-5.1")
    ours = memory_plan(model, deployment, choices, 40 * GIB, ratio)
    config = {"eviction": Eviction.INDEX_SCORE, "elastic_border": True}
    server = as_server_plans(
        "GLM-5.1", CacheType.BF16, 40 * GIB, ratio=ratio, buffer=4096, running=64, host=deployment.host_bytes, **config
    )
    assert ours == server
    fixed = memory_plan(model, deployment, replace(choices, elastic=False), 40 * GIB, ratio)
    assert ours.logical_tokens == fixed.logical_tokens
    assert 1.2 * fixed.device_tokens < ours.device_tokens and not fixed.border
    assert ours.least_device_tokens == pytest.approx(fixed.device_tokens, rel=0.02)
    lru = memory_plan(model, deployment, replace(choices, eviction=Eviction.LRU), 40 * GIB, ratio)
    assert lru.hot_state_bytes < ours.hot_state_bytes


def test_constants_are_those_of_sglang() -> None:
    """Goal: the host share is the server's. Method: its reserve, and shares of a large and a small machine by hand."""
    assert planner.HOST_RESERVE_BYTES == HICACHE_HOST_MEMORY_RESERVE_BYTES
    assert capacity.host_share_bytes(810 * GIB, 10 * GIB, 8) == 100 * GIB
    assert capacity.host_share_bytes(16 * GIB, 10 * GIB, 1) == 12 * GIB


@given(
    prompt=st.integers(1, 300_000),
    output=st.integers(1, 40_000),
    free=st.integers(0, 6_000),
    smallest=st.integers(4, 515),
)
def test_admission_is_the_servers(prompt: int, output: int, free: int, smallest: int) -> None:
    """Goal: the plan admits as the server does. Method: the rule that both ask, with random requests and pools."""
    rule = capacity.PrefillRule(num_device_pages=free, hot_pages=smallest - 3, smallest_pages=smallest)
    pages, total = -(-prompt // 64), -(-(prompt + output) // 64)
    resident = rule.decide(pages, total, extend_tokens=prompt)
    assert resident == capacity.Prefill(max(pages + 1, min(total, smallest)))
    streaming = replace(rule, scratch_pages=1 << 20, chunk_pages=128)
    prefill = streaming.decide(pages, total, extend_tokens=prompt)
    if resident.pages <= free or smallest > free:
        assert prefill == resident or smallest > free
    else:
        assert prefill.is_streamed and prefill.pages <= free and 1 <= prefill.chunk_pages <= 128


@given(host=st.integers(0, 400), cached=st.integers(0, 400), extend=st.integers(1, 4096), scratch=st.integers(0, 800))
def test_short_extends_of_host_only_prefixes_are_streamed(host: int, cached: int, extend: int, scratch: int) -> None:
    """Goal: most of the prefix on the host, few new tokens, room in the scratch; and never at a higher charge than resident.
    Method: random prefixes on a device of 1,000 pages."""
    host = min(host, cached)
    rule = capacity.PrefillRule(1000, 64, 67, scratch_pages=scratch, chunk_pages=16, short_extend_tokens=1024)
    prompt = cached + -(-extend // 64)
    prefill = rule.decide(prompt, prompt + 4, extend_tokens=extend, prefix_pages=cached, host_pages=host)
    resident = capacity.prefill_pages(prompt, prompt + 4, 67)
    if prefill.is_streamed:
        assert extend <= 1024 and 2 * host >= cached > 0 and prompt <= scratch and prefill.pages <= resident
    else:
        assert prefill.pages == resident
        chunk = min(-(-extend // 64), 16)
        assert extend > 1024 or 2 * host < max(cached, 1) or prompt > scratch or max(64 + chunk + 1, 67) > resident


@given(device=st.integers(1, 10_000), logical=st.integers(1, 10_000))
def test_the_longest_request_is_the_servers(device: int, logical: int) -> None:
    """Goal: a plan promises no length that a server refuses. Method: the allocator's own limit for the same pools."""
    for scratch in (0, 6400):
        allocator = SimpleNamespace(
            _size_full=logical * 64, _size_least=device * 64, page_size=64, streamed_tokens=scratch
        )
        expected = HiSparseAllocator.max_request_tokens(allocator)
        assert capacity.longest_request_tokens(device * 64, logical * 64, 64, scratch) == expected


def test_device_bytes_by_hand() -> None:
    """Goal: GPU memory is divided as SGLang does. Method: DeepSeek-V3.2, 8 ranks, with round figures."""
    deployment = Deployment(
        gpu_bytes=100 * GIB, overhead_bytes=0, mem_fraction=0.75, weight_bytes=30 * GIB, host_bytes=GIB
    )
    device = planner.device_bytes(built_in("DeepSeek-V3.2"), deployment)
    assert (device.slack, device.cache, device.weights_estimated) == (25 * GIB, 45 * GIB, False)
    with pytest.raises(ConfigError, match="30.0 GiB of weights per GPU do not fit 7.0 GiB"):
        planner.device_bytes(
            built_in("GLM-5.1"), Deployment(**{**_fields(deployment), "gpu_bytes": int(7 * GIB / 0.75)})
        )


def _fields(deployment: Deployment) -> dict[str, object]:
    return {name: getattr(deployment, name) for name in Deployment.__dataclass_fields__}


@pytest.mark.parametrize(
    ("name", "cache", "row", "kv", "index"),
    [
        ("DeepSeek-V3.2", CacheType.BF16, 1152, 61 * 1152, 61 * 132),
        ("GLM-5.2", CacheType.FP8, 656, 78 * 656, 21 * 132),
    ],
)
def test_two_models_by_hand(name: str, cache: CacheType, row: int, kv: int, index: int) -> None:
    """Goal: bytes and counts can be followed on paper. Method: 40 GiB per rank, ratio 4, buffer 4096, 32k in and 8k out."""
    shape = built_in(name).kv_shape(cache)
    assert (shape.row_bytes, shape.kv_token_bytes, shape.index_token_bytes) == (row, kv, index)
    deployment = Deployment(
        gpus=8, dp=8, host_bytes=8 * 300 * GIB + 10 * GIB, weight_bytes=0, overhead_bytes=0, mem_fraction=0.5,
        gpu_bytes=80 * GIB, max_running_requests=8 * 128,
    )  # fmt: skip
    planned = make_plan(built_in(name), deployment, Load(32768, 8192), Choices(cache, ratio=4, buffer_rows=4096, elastic=False))

    # GPU: 128 + 1 slots of hot state in each group (seven bytes a row, a header, a slot table of twice the rows), results and
    # translated pages, scratch, tables, one pad page; then tokens.
    slots, groups = 129, shape.num_leaders
    longest = built_in(name).context_tokens // 64 + 1
    state = groups * slots * (4096 * 7 + 128 + 4 * 2 * 4096) + slots * (2048 + longest) * 4 + slots * 64 * 4
    scratch = min(64 * longest, int(0.02 * 40 * GIB) // (2 * row) // 64 * 64 - 64)
    tokens = 40 * GIB - state - 2 * (scratch + 64) * row - 64 * (kv + index) - 2 * 4
    device = int(tokens / (kv + 4 * (index + 2 * 4 / 64))) // 64 * 64
    assert planned.memory.scratch_tokens == scratch
    assert planned.memory.device_tokens == device
    assert planned.memory.logical_tokens == 4 * device
    assert planned.host_bytes_per_rank == 300 * GIB
    assert planned.memory.host_bytes == (4 * device + 64) * kv

    # Requests of 640 pages; decoding at least 64 + 2 + 1 pages, prefilling 512 + 1.
    pages = device // 64
    expected = {
        "full": pages // 640,
        "mixed": min(1 + (pages - 513) // 67, 4 * pages // 640),
        "none": min(pages // 67, 4 * pages // 640),
    }
    assert {fit.mode: fit.per_cache for fit in planned.hisparse} == expected
    assert {fit.mode: fit.total for fit in planned.hisparse} == {mode: 8 * count for mode, count in expected.items()}
    plain = planned.memory.device_bytes // (kv + index) // 64 - 1
    assert planned.plain.per_cache == plain // 640 > expected["full"]

    # A step: 2,048 rows a request in every layer, 13.4 % of them over a link of 47 or 43 GB/s.
    time = next(t for t in planned.link if t.miss_rate == 0.134 and t.requests == 1)
    assert time.step_bytes == int(2048 * 0.134 * kv)
    assert time.exposed_ms == pytest.approx(2048 * 0.134 * kv / (47 if row == 1152 else 43) / 1e6, rel=1e-3)
    assert time.followers_hidden_ms == pytest.approx(time.exposed_ms * groups / shape.num_layers)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("elastic", [False, None])
def test_the_chosen_ratio_is_the_best(name: str, elastic: bool | None) -> None:
    """Goal: no ratio with half of the cache for KV runs more requests, and no smaller one as many. Method: a grid; the half counts with
    all logical tokens in use, wherever the border begins."""
    model, load = built_in(name), Load(32768, 8192)
    chosen = make_plan(model, NODE, load, Choices(elastic=elastic))
    others = {}
    for hundredths in range(100, 1200, 15):
        other = make_plan(model, NODE, load, Choices(ratio=hundredths / 100, elastic=elastic))
        index_bytes = other.memory.shape.index_bytes(other.memory.logical_tokens)
        if index_bytes <= MAX_INDEX_SHARE * (other.device.cache - other.memory.scratch_bytes):
            others[hundredths / 100] = other.mixed.total
    assert len(others) > 20
    assert chosen.mixed.total >= max(others.values())
    smaller = [count for ratio, count in others.items() if ratio < chosen.memory.requested_ratio - planner.RATIO_STEP]
    assert max(smaller) < chosen.mixed.total


def test_wanted_requests_take_the_smallest_ratio_that_holds_them() -> None:
    """Goal: GPU memory is not given to index-K that nobody needs. Method: fewer wanted, smaller ratio, still enough."""
    model, load = built_in("GLM-5.2"), Load(32768, 8192)
    most = make_plan(model, NODE, load, Choices(elastic=False))
    some = make_plan(model, NODE, Load(32768, 8192, wanted=100), Choices(elastic=False))
    assert most.mixed.total > some.mixed.total >= 100
    assert some.memory.ratio < most.memory.ratio
    less = some.memory.ratio - planner.RATIO_STEP
    assert make_plan(model, NODE, load, Choices(ratio=less, elastic=False)).mixed.total < 100


def test_the_chosen_limit_of_running_requests_binds_nothing() -> None:
    """Goal: slots are neither short nor wasted. Method: the choice against 256, 512 and 2,048 slots for each cache."""
    model, load = built_in("GLM-5.1"), Load(32768, 8192)
    open_limit = Deployment(dp=8, host_bytes=1800 * GIB)
    chosen = make_plan(model, open_limit, load, Choices())
    assert chosen.deployment.max_running_requests is not None
    assert chosen.mixed.per_cache <= chosen.deployment.max_running_requests // 8 < chosen.mixed.per_cache + 16
    for slots in (256, 512, 2048):
        wider = Deployment(dp=8, host_bytes=1800 * GIB, max_running_requests=8 * slots)
        assert make_plan(model, wider, load, Choices()).mixed.total <= chosen.mixed.total


def test_a_prompt_that_the_gpu_cannot_hold_is_not_promised() -> None:
    """Goal: no plan for what a server refuses. Method: a request one token too long, and the longest."""
    model = built_in("GLM-5.1")
    planned = make_plan(model, NODE, Load(32768, 8192), Choices(ratio=4))
    longest = planned.longest_request_tokens
    at_limit = fits(planned.memory, Load(longest - 64, 64), 8)
    beyond = fits(planned.memory, Load(longest - 63, 64), 8)
    assert min(fit.total for fit in at_limit[2:]) >= 1, "it is streamed, so never fully resident"
    assert [fit.total for fit in beyond[1:]] == [0, 0, 0]
    assert "while it is prefilled" in beyond[2].bound


def test_requests_at_the_best_place_of_a_moving_border() -> None:
    """Goal: no more is promised than fits both ledgers at one place of the border. Method: every place by itself, as a fixed one."""
    load, choices = Load(16384, 1024), Choices(ratio=12, elastic=True)
    memory = make_plan(built_in("GLM-5.1"), NODE, load, choices).memory
    _, full, mixed, none = fits(memory, load, 8)
    assert len(memory.border) > 20 and memory.device_tokens > 1.5 * memory.least_device_tokens
    alone = []
    for step in memory.border:
        there = replace(memory, border=(), device_tokens=64 * step.device_pages, logical_tokens=64 * step.logical_pages)
        alone.append([fit.per_cache for fit in fits(there, load, 8)[1:]])
    assert [max(column) for column in zip(*alone, strict=True)] == [full.per_cache, mixed.per_cache, none.per_cache]
    end = fits(replace(memory, border=memory.border[-1:]), load, 8)
    assert mixed.per_cache > end[2].per_cache and full.per_cache > end[1].per_cache


def test_mixed_is_what_admission_lets_in() -> None:
    """Goal: the count is reached and not exceeded. Method: requests admitted one by one by the server's sums."""
    memory = make_plan(built_in("GLM-5.2"), NODE, Load(16384, 1024), Choices(ratio=8, elastic=False)).memory
    mixed = fits(memory, Load(16384, 1024), 8)[2].per_cache
    limits = ResidencyLimits(
        num_logical_pages=memory.logical_tokens // 64,
        num_device_pages=memory.device_tokens // 64,
        num_slots=memory.hot.num_slots,
        max_pages_per_slot=10_000,
        hot_pages=memory.hot.lease_pages(64),
    )
    running = 0
    while running < memory.hot.num_slots - 1 and (running + 1) * 272 <= limits.num_logical_pages:
        committed = running * capacity.decoding_pages(272, limits.smallest_pages)
        if committed + capacity.prefill_pages(256, 272, limits.smallest_pages) > limits.num_device_pages:
            break
        running += 1
    assert mixed == running > 0


@pytest.mark.parametrize(
    ("deployment", "choices", "message"),
    [
        ({"tp": 3}, {}, "--tp: 3 does not divide 8"),
        ({"dp": 3}, {}, "--dp: 3 does not divide 8"),
        ({"gpus": 4, "tp": 4}, {}, "of weights per GPU do not fit"),
        ({"host_bytes": 20 * GIB}, {}, "host memory"),
        ({"host_bytes": 200 * GIB}, {"ratio": 50}, "host_to_device_ratio: 50 needs"),
        ({}, {"buffer_rows": 1024}, "device_buffer_size: 1024 is below top_k"),
    ],
)
def test_what_cannot_work_is_refused(deployment: dict, choices: dict, message: str) -> None:
    """Goal: the figure that would fit is named. Method: one impossible input at a time."""
    with pytest.raises(ConfigError, match=message):
        make_plan(built_in("GLM-5.1"), Deployment(**deployment), Load(), Choices(**choices))


def test_where_a_union_is_fetched() -> None:
    """Goal: a union where less is waited for, never beyond the key or when switched off. Method: known borders."""
    rule = capacity.PrefillRule(1000, 64, 67, union_tokens=128, top_k=2048)
    assert rule.fetches_union(1, 2458) and not rule.fetches_union(1, 2457)
    assert rule.fetches_union(128, 200_000) and not rule.fetches_union(129, 200_000)
    # 15,000 of 18,000 rows are expected at 86.9 tokens.
    assert rule.fetches_union(86, 18_000) and not rule.fetches_union(87, 18_000)
    assert not rule.fetches_union(0, 200_000) and not rule.fetches_union(1, 2048) and not rule.fetches_union(5, 64)
    # 64 tokens select 20,499 of 200,000 rows. 86,806 rows of 1,152 bytes hide behind a layer, 152,439 of 656, and the more the
    # more tokens score them: 191 and 335 rows a token. 86,806 + 191 * 128 + 1.2 * 37,483 = 156,233.
    bf16, fp8 = (replace(rule, row_bytes=row_bytes) for row_bytes in (1152, 656))
    assert bf16.hidden_rows(128, 200_000) == pytest.approx(86_806 + 191 * 128, rel=1e-3)
    assert bf16.fetches_union(128, 200_000) and bf16.fetches_union(1, 90_000) and not bf16.fetches_union(1, 89_000)
    assert fp8.fetches_union(64, 200_000) and not fp8.fetches_union(70, 200_000) and not fp8.fetches_union(1, 154_000)
    assert not capacity.PrefillRule(1000, 64, 67, top_k=2048).fetches_union(1, 200_000)
