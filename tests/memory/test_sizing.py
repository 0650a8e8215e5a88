"""Goal: SGLang arrives at the planned tokens. Method: its real configurator and pools on the CPU, sizes by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.sparsity import factory
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import PretrainedConfig

from sglang_hisparse.errors import ConfigError, InvariantError
from sglang_hisparse.kernels.hot_state import HotGroupState
from sglang_hisparse.layout import GIB
from sglang_hisparse.memory import sizing
from sglang_hisparse.memory.pool import HiSparsePool
from sglang_hisparse.memory.sizing import SizingRequest

V32 = {"num_hidden_layers": 61}
GLM = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def hf_config(**values: Any) -> PretrainedConfig:
    return PretrainedConfig(architectures=["DeepseekV32ForCausalLM"], index_topk=2048, index_head_dim=128, **values)


def make_configurator(model: dict[str, Any], dtype: torch.dtype, *, draft: bool = False) -> KVCacheConfigurator:
    """The real class without its constructor, which needs a loaded model: only what sizing reads is set."""
    config = KVCacheConfigurator.__new__(KVCacheConfigurator)
    for field in fields(KVCacheConfigurator):
        setattr(config, field.name, None)
    layers = model["num_hidden_layers"]
    text = hf_config(**model)
    config.model_config = SimpleNamespace(
        hf_config=text,
        hf_text_config=text,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        context_len=131_072,
        linear_attn_registry_result=None,
    )
    config.layer_info = SimpleNamespace(start_layer=0, end_layer=layers, num_effective_layers=layers)
    config.device, config.gpu_id, config.page_size = "cpu", 0, 64
    config.kv_cache_dtype, config.model_dtype = dtype, BF16
    config.kv_cache_dtype_str = "auto"
    config.server_args = SimpleNamespace(enable_hisparse=True)
    config.is_draft_worker, config.is_hybrid_swa, config.use_mla_backend = draft, False, True
    config.attn_dp_size, config.pp_size, config.kv_shard_size = 1, 1, 1
    config.spec_algorithm = SpeculativeAlgorithm.NONE
    return config


@contextmanager
def published(ratio: float | None = 4, **server_args: Any) -> Iterator[None]:
    text = json.dumps({"device_buffer_size": 4096} | ({} if ratio is None else {"host_to_device_ratio": ratio}))
    override = get_context().override_server_args(
        enable_hisparse=True, hisparse_config=text, page_size=64, max_running_requests=64, **server_args
    )
    with override, get_parallel().override(attn_dcp_rank=0):
        yield


def hot_state_bytes(num_slots: int, buffer_rows: int) -> int:
    return num_slots * (5 * buffer_rows + 128)


def test_state_bytes_are_the_kernels() -> None:
    """Goal: what is charged is what is allocated. Method: the tensors of a HotGroupState."""
    state = HotGroupState.allocate(9, 4096, "cpu")
    allocated = sum(t.untyped_storage().nbytes() for t in (state.tags, state.stamps, state.header))
    assert allocated == hot_state_bytes(9, 4096) == HotGroupState.bytes(9, 4096)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """SGLang with our functions around its own; `free` is what it measures, `host` what may be pinned."""
    provider = sizing._sizing.provider
    state = SimpleNamespace(
        free=40 * GIB, host=4_000 * GIB, request=SizingRequest(4, None, 4096, 2048, hot_state_bytes)
    )
    sizing.bind(lambda: state.request)
    monkeypatch.setattr(sizing, "available_host_memory_bytes", lambda **_: state.host + 10 * GIB)
    cell = DefaultPoolConfigurator._compute_dsa_indexer_cell_size
    capacity = KVCacheConfigurator.logical_token_capacity
    elide = kv_cache_configurator._should_elide_dsa_index_k
    parse = factory._parse_sparse_config

    def parse_with_ratio() -> Any:
        config = parse()
        config.host_to_device_ratio = sizing.current_ratio()
        return config

    monkeypatch.setattr(
        DefaultPoolConfigurator,
        "_compute_dsa_indexer_cell_size",
        lambda self, **kwargs: sizing.around_dsa_indexer_cell_size(cell, self, **kwargs),
    )
    monkeypatch.setattr(
        KVCacheConfigurator,
        "logical_token_capacity",
        lambda self, **kwargs: sizing.around_logical_token_capacity(capacity, self, **kwargs),
    )
    monkeypatch.setattr(
        KVCacheConfigurator,
        "_profile_available_bytes",
        lambda self, memory: sizing.around_profile_available_bytes(lambda *_: state.free, self, memory),
    )
    monkeypatch.setattr(
        kv_cache_configurator,
        "_should_elide_dsa_index_k",
        lambda **kwargs: sizing.around_should_elide_dsa_index_k(elide, **kwargs),
    )
    monkeypatch.setattr(factory, "_parse_sparse_config", parse_with_ratio)
    yield state
    sizing.bind(provider)


@pytest.mark.parametrize(
    ("model", "dtype", "ratio", "cell"),
    [
        (V32, BF16, 2, 61 * 1152 + 61 * 132 * 2),
        (V32, FP8, 10, 61 * 656 + 61 * 132 * 10),
        (GLM, BF16, 4, 78 * 1152 + 21 * 132 * 4),
        (GLM, FP8, 10, 78 * 656 + 21 * 132 * 10),
        (GLM, FP8, 2.5, 78 * 656 + 21 * 132 * 5 // 2),
    ],
)
def test_cell_size_by_hand(
    hooked: SimpleNamespace, model: dict[str, Any], dtype: torch.dtype, ratio: float, cell: int
) -> None:
    """Goal: bytes per device token of V3.2 and GLM-5.x. Method: SGLang's configurator against hand arithmetic."""
    hooked.request = SizingRequest(ratio, None, 4096, 2048, hot_state_bytes)
    with published(ratio):
        configurator = make_configurator(model, dtype)
        assert DefaultPoolConfigurator(configurator)._cell_size == cell


def test_without_the_hook_followers_are_charged() -> None:
    """Goal: the hook is needed. Method: SGLang's own cell for GLM-5.x counts index-K of all 78 layers."""
    with published(4):
        assert DefaultPoolConfigurator(make_configurator(GLM, FP8))._cell_size == 78 * 656 + 78 * 132 * 4


@pytest.mark.parametrize("model", [V32, GLM])
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("ratio", [1, 2.7, 10, None])
@pytest.mark.parametrize("host_gib", [60, 150, 4_000])
def test_sglang_arrives_at_the_plan(
    hooked: SimpleNamespace, model: dict[str, Any], dtype: torch.dtype, ratio: float | None, host_gib: int
) -> None:
    """Goal: device and logical tokens are those planned. Method: SGLang's real resolution after our measurement."""
    hooked.request, hooked.host = SizingRequest(ratio, None, 4096, 2048, hot_state_bytes), host_gib * GIB
    with published(ratio):
        configurator = make_configurator(model, dtype)
        config = configurator._resolve_memory_pool_config(80)
        plan = sizing.current_plan()
        assert plan is not None and config.max_total_num_tokens == plan.device_tokens > 100_000
        capacity = configurator.logical_token_capacity(max_total_num_tokens=config.max_total_num_tokens)
        assert capacity == plan.logical_tokens
        assert sizing.current_ratio() == plan.ratio <= (ratio or 100)
    assert plan.device_bytes <= hooked.free and plan.host_bytes <= hooked.host
    assert config.max_running_requests == 64 and plan.hot.num_slots == 65
    assert plan.hot_state_bytes == plan.shape.num_leaders * hot_state_bytes(65, 4096) + 65 * 2048 * 4


def test_users_cap_on_tokens(hooked: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: max_total_tokens caps device tokens without a false warning. Method: SGLang's resolution with 200,000."""
    with published(8, max_total_tokens=200_000):
        hooked.request = SizingRequest(8, None, 4096, 2048, hot_state_bytes)
        config = make_configurator(V32, BF16)._resolve_memory_pool_config(80)
    plan = sizing.current_plan()
    assert plan is not None and config.max_total_num_tokens == plan.device_tokens == 200_000 // 64 * 64
    assert plan.logical_tokens == 8 * plan.device_tokens
    assert "larger than the profiled value" not in caplog.text


def test_refusal_reaches_the_start(hooked: SimpleNamespace) -> None:
    """Goal: host memory that cannot hold the device pool stops the start. Method: 5 GiB for a 40 GiB GPU pool."""
    hooked.host = 5 * GIB
    with published(4), pytest.raises(ConfigError, match="host memory"):
        make_configurator(GLM, FP8)._resolve_memory_pool_config(80)


def test_draft_workers_and_plain_servers_are_left_alone(hooked: SimpleNamespace) -> None:
    """Goal: the hooks act on HiSparse's target model only. Method: a draft configurator, then HiSparse off."""
    with published(4):
        draft = make_configurator(GLM, FP8, draft=True)
        assert draft._profile_available_bytes(80) == hooked.free and sizing.current_plan() is None
        assert not kv_cache_configurator._should_elide_dsa_index_k(is_draft_worker=True)
        assert kv_cache_configurator._should_elide_dsa_index_k(is_draft_worker=False)
        with get_parallel().override(attn_dcp_size=1):
            assert draft.logical_token_capacity(max_total_num_tokens=640) == 640
    with (
        get_context().override_server_args(enable_hisparse=False, page_size=64),
        get_parallel().override(attn_dcp_rank=0),
    ):
        plain = make_configurator(GLM, FP8)
        plain.server_args = SimpleNamespace(enable_hisparse=False)
        assert plain._profile_available_bytes(80) == hooked.free
        assert DefaultPoolConfigurator(plain)._cell_size == 78 * 656 + 21 * 132
        assert plain.logical_token_capacity(max_total_num_tokens=640) == 640


def test_the_pool_takes_what_the_plan_says(hooked: SimpleNamespace) -> None:
    """Goal: planned bytes are allocated bytes. Method: SGLang builds our pool of a small model from a small budget."""
    model = {"num_hidden_layers": 8, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    hooked.free, hooked.request = 96 << 20, SizingRequest(3.3, None, 128, 64, hot_state_bytes)
    with published(3.3), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache_configurator, "HiSparseDSATokenToKVPool", HiSparsePool)
        patch.setattr(kv_cache_configurator, "reject_out_of_tree_path", lambda *_, **__: None)
        configurator = make_configurator(model, BF16)
        config = configurator._resolve_memory_pool_config(80)
        pool = configurator._build_dsa_kv_pool(
            max_total_num_tokens=config.max_total_num_tokens, max_running_requests=64, dsa_pool_class=HiSparsePool
        )
    plan = sizing.current_plan()
    assert plan is not None and isinstance(pool, HiSparsePool)
    assert (pool.size, pool.logical_tokens) == (plan.device_tokens, plan.logical_tokens)
    assert sum(b.nbytes for b in pool.kv_buffer) == plan.device_kv_bytes
    assert sum(b.nbytes for b in pool.index_k_with_scale_buffer) == plan.index_bytes
    assert sum(b.shape[0] > 0 for b in pool.index_k_with_scale_buffer) == plan.shape.num_leaders == 4
    assert plan.device_bytes <= hooked.free
    built = sizing.plan_as_built(pool.size, num_slots=9)
    assert (
        built.hot_state_bytes == 4 * hot_state_bytes(9, 128) + 9 * 64 * 4
        and built.device_kv_bytes == plan.device_kv_bytes
    )


def test_ratio_before_the_plan(hooked: SimpleNamespace) -> None:
    """Goal: a ratio that is still to be derived is never taken for a number. Method: ask before sizing."""
    assert sizing.current_ratio() == 4
    hooked.request = SizingRequest(None, None, 4096, 2048, hot_state_bytes)
    assert sizing.current_ratio() is None
    with published(None), pytest.raises(InvariantError):
        make_configurator(GLM, FP8).logical_token_capacity(max_total_num_tokens=640)
    with pytest.raises(InvariantError):
        sizing.plan_as_built(640, 9)


def test_a_shrunken_ratio_is_said(hooked: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: the log says when the host holds less than was asked for. Method: ratio 10 and 100 GiB."""
    hooked.host, hooked.request = 100 * GIB, SizingRequest(10, None, 4096, 2048, hot_state_bytes)
    with published(10):
        make_configurator(GLM, FP8)._resolve_memory_pool_config(80)
    assert "host_to_device_ratio: 10 shrinks to" in caplog.text


def test_reserve_shrinks_on_small_machines(hooked: SimpleNamespace) -> None:
    """Goal: some host memory stays free, but a small machine keeps most of its own. Method: two sizes."""
    with published(4):
        hooked.host = 100 * GIB
        assert sizing.host_bytes_per_rank() == 100 * GIB
        hooked.host = -2 * GIB
        assert sizing.host_bytes_per_rank() == 6 * GIB
