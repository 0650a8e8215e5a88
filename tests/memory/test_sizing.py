"""Goal: SGLang arrives at the planned tokens. Method: its real configurator and pools on the CPU, sizes by hand."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.sparsity import factory
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import PretrainedConfig

from sglang_hisparse import settings
from sglang_hisparse.errors import ConfigError, HiSparseError, InvariantError
from sglang_hisparse.kernels.hot_state import HotGroupState
from sglang_hisparse.layout import GIB
from sglang_hisparse.memory import sizing
from sglang_hisparse.memory.pool import HiSparsePool

V32 = {"num_hidden_layers": 61}
GLM = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
CONTEXT = 131_072
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def hf_config(**values: Any) -> PretrainedConfig:
    values = {"index_topk": 2048, "index_head_dim": 128, **values}
    return PretrainedConfig(architectures=["DeepseekV32ForCausalLM"], **values)


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
        context_len=CONTEXT,
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
def published(
    ratio: float | None = 4,
    *,
    host_pool_gib: float | None = None,
    device_buffer_size: int = 4096,
    elastic_border: bool | None = None,
    **server_args: Any,
) -> Iterator[None]:
    """SGLang's configuration as it stands once --hisparse-config holds these keys."""
    keys = {
        "device_buffer_size": device_buffer_size,
        "host_to_device_ratio": ratio,
        "host_pool_gib": host_pool_gib,
        "elastic_border": elastic_border,
    }
    text = json.dumps({key: value for key, value in keys.items() if value is not None})
    settings.reset()
    override = get_context().override_server_args(
        enable_hisparse=True, hisparse_config=text, page_size=64, max_running_requests=64, **server_args
    )
    with override, get_parallel().override(attn_dcp_rank=0):
        yield


def hot_state_bytes(num_slots: int, buffer_rows: int) -> int:
    slot_bits = max(8, (buffer_rows - 1).bit_length())  # the slot table: a power of two, at least twice the slots
    return num_slots * (7 * buffer_rows + 128 + (8 << slot_bits))


def test_state_bytes_are_the_kernels() -> None:
    """Goal: what is charged is what is allocated. Method: the tensors of a HotGroupState."""
    state = HotGroupState.allocate(9, 4096, "cpu")
    allocated = sum(t.untyped_storage().nbytes() for t in (state.tags, state.stamps, state.header, state.table))
    assert allocated == hot_state_bytes(9, 4096) == HotGroupState.bytes(9, 4096)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """SGLang with our functions around its own; `free` is what it measures, `host` what may be pinned."""
    state = SimpleNamespace(free=40 * GIB, host=4_000 * GIB)
    monkeypatch.setattr(sizing._Plan, "current", None)
    monkeypatch.setattr(sizing, "available_host_memory_bytes", lambda **_: state.host + 10 * GIB)
    cell = unwrap(DefaultPoolConfigurator._compute_dsa_indexer_cell_size)
    capacity = unwrap(KVCacheConfigurator.logical_token_capacity)
    elide = unwrap(kv_cache_configurator._should_elide_dsa_index_k)
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
    monkeypatch.setattr(factory, "_parse_sparse_config", settings.sparse_config)
    yield state
    settings.reset()


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
    with published(ratio):
        configurator = make_configurator(model, dtype)
        settings.resolve(configurator.model_config)
        assert DefaultPoolConfigurator(configurator)._cell_size == cell


def test_without_the_hook_followers_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the hook is needed. Method: SGLang's own cell for GLM-5.x counts index-K of all 78 layers."""
    own = unwrap(DefaultPoolConfigurator._compute_dsa_indexer_cell_size)
    monkeypatch.setattr(DefaultPoolConfigurator, "_compute_dsa_indexer_cell_size", own)
    monkeypatch.setattr(factory, "_parse_sparse_config", unwrap(factory._parse_sparse_config))
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
    hooked.host = host_gib * GIB
    # A derived ratio is bound by the host itself, a given one by the cap.
    with published(ratio, host_pool_gib=None if ratio is None else host_gib):
        configurator = make_configurator(model, dtype)
        config = configurator._resolve_memory_pool_config(80)
        plan = sizing.current_plan()
        assert plan is not None and config.max_total_num_tokens == plan.device_tokens > 100_000
        capacity = configurator.logical_token_capacity(max_total_num_tokens=config.max_total_num_tokens)
        assert capacity == plan.logical_tokens
        assert settings.ratio() == plan.ratio <= (ratio or 100)
    assert plan.device_bytes <= hooked.free and plan.host_bytes <= hooked.host
    assert config.max_running_requests == 64 and plan.hot.num_slots == 65
    shared = 65 * (2048 + CONTEXT // 64 + 1) * 4  # the resolver's output and its translated page table
    assert plan.hot_state_bytes == plan.shape.num_leaders * hot_state_bytes(65, 4096) + shared


@pytest.mark.parametrize(("model", "dtype"), [(V32, FP8), (V32, BF16), (GLM, FP8), (GLM, BF16)])
@pytest.mark.parametrize(("ratio", "host_gib"), [(1, 4_000), (2, 4_000), (8, 4_000), (8, 90), (None, 300)])
def test_an_elastic_server_begins_with_plain_sglangs_tokens(
    hooked: SimpleNamespace, model: dict[str, Any], dtype: torch.dtype, ratio: float | None, host_gib: int
) -> None:
    """Goal: within 2 % of the tokens that plain SGLang holds in the same memory, however large the ratio; logical tokens and
    host memory are those of the fixed border, whose device tokens remain at the end. Method: SGLang's real resolution, both."""
    hooked.host = host_gib * GIB
    with published(ratio, host_pool_gib=None if ratio is None else host_gib):
        fixed = sizing.make_plan(make_configurator(model, dtype), hooked.free, settings.resolve(make_configurator(model, dtype).model_config))
    with published(ratio, host_pool_gib=None if ratio is None else host_gib, elastic_border=True):
        configurator = make_configurator(model, dtype)
        config = configurator._resolve_memory_pool_config(80)
        plan = sizing.current_plan()
        assert plan is not None and config.max_total_num_tokens == plan.device_tokens
        capacity = configurator.logical_token_capacity(max_total_num_tokens=config.max_total_num_tokens)
        assert capacity == plan.logical_tokens == fixed.logical_tokens
    plain = (hooked.free - plan.scratch_bytes - plan.hot_state_bytes) // (plan.shape.kv_token_bytes + plan.shape.index_token_bytes)
    assert plan.device_tokens >= min(0.98 * plain, plan.logical_tokens)
    assert plan.border[0].device_pages * 64 == plan.device_tokens
    assert plan.border[-1].logical_pages * 64 == plan.logical_tokens
    assert 0.98 * fixed.device_tokens <= plan.least_device_tokens <= plan.device_tokens
    assert plan.device_bytes <= hooked.free and plan.host_bytes == fixed.host_bytes <= hooked.host
    assert plan.host_bound == fixed.host_bound


def test_an_elastic_border_that_leaves_no_request_is_refused(hooked: SimpleNamespace) -> None:
    """Goal: the error comes at start and names the key. Method: so little memory that chunks leave less than a hot buffer."""
    hooked.free = 1 * GIB
    with published(30, elastic_border=True, host_pool_gib=4_000), pytest.raises(ConfigError, match=r"elastic_border|device pool"):
        make_configurator(V32, FP8)._resolve_memory_pool_config(80)


def test_a_border_left_open_moves_where_a_gpu_lets_it(hooked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: pool, plan and log follow one decision. Method: SGLang's resolution with the key left out, for a driver that is willing."""
    monkeypatch.setattr(sizing, "border_obstacle", lambda device, wanted: None)
    with published(8, elastic_border=True):
        given = make_configurator(V32, FP8)._resolve_memory_pool_config(80).max_total_num_tokens
    with published(8):
        config = make_configurator(V32, FP8)._resolve_memory_pool_config(80)
        assert config.max_total_num_tokens == given and sizing.current_plan().border and settings.elastic_border()
        border = sizing.current_plan().border
    with published(1):
        make_configurator(V32, FP8)._resolve_memory_pool_config(80)
        assert not settings.elastic_border() and border != ()
    with published(8, elastic_border=False):
        assert make_configurator(V32, FP8)._resolve_memory_pool_config(80).max_total_num_tokens < given
        assert not settings.elastic_border()


def test_on_a_cpu_it_stays_unless_asked_for(hooked: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: tests without a GPU mean a fixed border, and one line says so. Method: the key left out, false, and true."""
    with published(8), caplog.at_level(logging.INFO, sizing.logger.name):
        make_configurator(V32, FP8)._resolve_memory_pool_config(80)
        built = sizing.plan_as_built(sizing.current_plan().device_tokens, 65)
        assert not settings.elastic_border() and not built.border
    lines = [record.getMessage() for record in caplog.records if "elastic_border" in record.getMessage()]
    assert lines == ["HiSparse: elastic_border is off, since it needs a GPU, and the cache is on the CPU"]
    assert built.fixed_because == "it needs a GPU, and the cache is on the CPU", "the table at start says so too"
    for wanted in (True, False):
        with published(8, elastic_border=wanted):
            make_configurator(V32, FP8)._resolve_memory_pool_config(80)
            assert settings.elastic_border() is wanted and sizing.current_plan().fixed_because is None


def test_what_is_in_the_borders_way_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: every obstacle is found before tokens are counted, and all ranks agree. Method: a driver that refuses, flags, another rank."""

    def refuses(memory: Any) -> None:
        raise HiSparseError("elastic_border: the driver refuses cuMemMap: no reason given (CUresult 801); allowed: false")

    asked: list[int] = []
    monkeypatch.setattr(sizing, "memory_of", lambda device: device)
    monkeypatch.setattr(sizing, "_min_over_ranks", lambda value: asked.append(value) or min(value, others))
    others = 1
    flag = "cannot be combined with --enable-memory-saver or a custom memory pool"
    monkeypatch.setattr(sizing, "probe", lambda memory: None)
    with published(4):
        assert sizing.border_obstacle("cuda", None) is None and sizing.border_obstacle("cuda:1", True) is None
        with envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override("NVLINK"):
            assert sizing.border_obstacle("cuda", None) == flag
        others = 0
        assert "another one has none" in sizing.border_obstacle("cuda", None)
        monkeypatch.setattr(sizing, "probe", refuses)
        said = "needs virtual memory of the CUDA driver: the driver refuses cuMemMap: no reason given (CUresult 801)"
        assert sizing.border_obstacle("cuda", None) == sizing.border_obstacle("cuda", True) == said
        assert asked == [1, 1, 0, 1, 0, 0], "each rank tells its own verdict, whatever it is"
        assert sizing.border_obstacle("cuda", False) is None and len(asked) == 6
        with monkeypatch.context() as several:
            several.setattr(sizing, "get_parallel", lambda: SimpleNamespace(launch_world_size=2))
            assert "several GPUs" in sizing.border_obstacle("cuda", None) and len(asked) == 6, "all ranks know it by themselves"
            assert sizing.border_obstacle("cuda", True) == said, "asked for, it is tried"
    with published(4, enable_memory_saver=True):
        assert sizing.border_obstacle("cuda", None) == flag


def test_users_cap_on_tokens(hooked: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: max_total_tokens caps device tokens without a false warning. Method: SGLang's resolution with 200,000."""
    with published(8, max_total_tokens=200_000):
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
    model["index_topk"] = 64
    hooked.free = 96 << 20
    with published(3.3, device_buffer_size=128), pytest.MonkeyPatch.context() as patch:
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
        built.hot_state_bytes == 4 * hot_state_bytes(9, 128) + 9 * (64 + CONTEXT // 64 + 1) * 4
        and built.device_kv_bytes == plan.device_kv_bytes
    )


def test_ratio_before_the_plan(hooked: SimpleNamespace) -> None:
    """Goal: a ratio that is still to be derived is never taken for a number. Method: ask before sizing."""
    with published(None):
        with pytest.raises(HiSparseError, match="before the pools are sized"):
            settings.resolved()
        settings.resolve(make_configurator(GLM, FP8).model_config)
        with pytest.raises(HiSparseError, match="before sizing has derived it"):
            settings.ratio()
        with pytest.raises(HiSparseError, match="before sizing has derived it"):
            make_configurator(GLM, FP8).logical_token_capacity(max_total_num_tokens=640)
    with pytest.raises(InvariantError):
        sizing.plan_as_built(640, 9)


def test_a_ratio_that_the_host_cannot_hold_is_refused(hooked: SimpleNamespace) -> None:
    """Goal: no server runs with another ratio than was asked for. Method: ratio 10 and 100 GiB; try the named figures."""
    hooked.host = 100 * GIB
    with published(10), pytest.raises(ConfigError) as caught:
        make_configurator(GLM, FP8)._resolve_memory_pool_config(80)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("host_to_device_ratio: 10.0 needs ")
    ratio, gib = re.search(r"allowed: host_pool_gib ([0-9.]+), or host_to_device_ratio ([0-9.]+)$", message).group(2, 1)
    assert sizing.current_plan() is None
    with published(float(ratio)):
        make_configurator(GLM, FP8)._resolve_memory_pool_config(80)
    assert sizing.current_plan().ratio == float(ratio) and sizing.current_plan().host_bytes <= hooked.host
    with published(float(ratio) + 0.01), pytest.raises(ConfigError, match="^host_to_device_ratio: "):
        make_configurator(GLM, FP8)._resolve_memory_pool_config(80)
    with published(10, host_pool_gib=float(gib)):
        make_configurator(GLM, FP8)._resolve_memory_pool_config(80)
    assert 1 < sizing.current_plan().ratio < 10 and sizing.current_plan().host_bytes <= float(gib) * GIB


def test_a_cap_above_the_host_does_not_save_a_ratio(hooked: SimpleNamespace) -> None:
    """Goal: host_pool_gib is a cap, not a permit. Method: ratio 10 and 100 GiB of host under a cap of 200 GiB."""
    hooked.host = 100 * GIB
    with published(10, host_pool_gib=200), pytest.raises(ConfigError, match="^host_to_device_ratio: 10.0 needs "):
        make_configurator(GLM, FP8)._resolve_memory_pool_config(80)


def test_a_ratio_that_fits_ignores_a_larger_cap(hooked: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a cap that does not bind changes nothing. Method: ratio 2 with and without one."""
    plans = []
    for cap in (None, 3_000):
        with published(2, host_pool_gib=cap):
            make_configurator(GLM, FP8)._resolve_memory_pool_config(80)
        plans.append(sizing.current_plan())
    assert plans[0].ratio == plans[1].ratio == 2 and plans[0].logical_tokens == plans[1].logical_tokens
    assert "shrinks" not in caplog.text


@pytest.mark.parametrize("ratio", [10, None])
def test_a_cap_shrinks_the_ratio(
    hooked: SimpleNamespace, caplog: pytest.LogCaptureFixture, ratio: float | None
) -> None:
    """Goal: host_pool_gib bounds a given and a derived ratio, and says so where one was asked for. Method: 100 GiB."""
    with published(ratio, host_pool_gib=100):
        make_configurator(GLM, FP8)._resolve_memory_pool_config(80)
    plan = sizing.current_plan()
    assert 99 * GIB < plan.host_bytes <= 100 * GIB and settings.ratio() == plan.ratio < 10
    assert ("host_to_device_ratio: 10 shrinks to" in caplog.text) == (ratio is not None)


def test_reserve_shrinks_on_small_machines(hooked: SimpleNamespace) -> None:
    """Goal: some host memory stays free, but a small machine keeps most of its own. Method: two sizes."""
    with published(4):
        hooked.host = 100 * GIB
        assert sizing.host_bytes_per_rank() == 100 * GIB
        hooked.host = -2 * GIB
        assert sizing.host_bytes_per_rank() == 6 * GIB
