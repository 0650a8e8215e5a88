"""Goal: every preset is right for the deployment it is named after. Method: our parser, the model's facts, the plan."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from make_tiny_dsa import FULL_CONFIG

from sglang_hisparse.config import GIB, parse_config
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.planning.model_shapes import CacheType, ModelShape, WeightType, built_in, shape_from_config
from sglang_hisparse.planning.planner import Choices, Deployment, Load, Planned, make_plan

FOLDER = Path(__file__).parent.parent / "configs"
PRESETS = sorted(FOLDER.glob("*.json"))


@dataclass(frozen=True, slots=True)
class Named:
    """What the name of a preset stands for. All have 141 GB GPUs; H20 are also sold with 96."""

    model: ModelShape
    deployment: Deployment
    cache_type: CacheType


LOAD = Load(prompt_tokens=32768, output_tokens=8192)
EIGHT = Deployment(gpus=8, tp=8, dp=8, host_bytes=1500 * GIB, mem_fraction=0.85, max_running_requests=480)
TINY = shape_from_config(FULL_CONFIG, name="tiny-dsa", weight_type=WeightType.BF16)


def small_pool(tokens: int) -> Deployment:
    """One GPU on which --max-total-tokens leaves a pool of `tokens` at ratio 8; the rest counts as weights here."""
    one = Deployment(gpus=1, tp=1, dp=1, gpus_per_host=1, host_bytes=64 * GIB, max_running_requests=64)
    shape = TINY.kv_shape(CacheType.BF16)
    pool = tokens * (shape.kv_token_bytes + 8 * shape.index_token_bytes)
    return replace(one, weight_bytes=int((one.gpu_bytes - one.overhead_bytes) * one.mem_fraction) - pool)


DEPLOYMENTS = {
    "glm-5.1-fp8-h200x8.json": Named(built_in("GLM-5.1"), EIGHT, CacheType.BF16),
    "glm-5.1-fp8-h20x8-decode.json": Named(built_in("GLM-5.1"), EIGHT, CacheType.BF16),
    "deepseek-v3.2-fp8-h200x8.json": Named(built_in("DeepSeek-V3.2"), EIGHT, CacheType.BF16),
    "tiny-dsa-bf16-h200x1.json": Named(TINY, small_pool(200_000), CacheType.BF16),
}


def plan_of(name: str) -> Planned:
    """The plan of a preset's deployment, with its ratio and buffer."""
    named = DEPLOYMENTS[name]
    config = parse_config((FOLDER / name).read_text(encoding="utf-8"))
    return make_plan(
        named.model,
        named.deployment,
        LOAD,
        Choices(
            named.cache_type, config.host_to_device_ratio, config.device_buffer_size, config.host_pool_gib, elastic=config.elastic_border
        ),
    )


def test_every_preset_has_a_deployment_and_every_deployment_a_preset() -> None:
    """Goal: no file escapes the tests below. Method: the folder against the table."""
    assert [path.name for path in PRESETS] == sorted(DEPLOYMENTS)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_it_resolves_for_its_model_and_says_nothing_that_has_no_effect(path: Path) -> None:
    """Goal: a preset is accepted as it is. Method: parse, resolve with the model's facts; top-k, pages, notes."""
    text = path.read_text(encoding="utf-8")
    config = parse_config(text)
    resolved = config.resolve(DEPLOYMENTS[path.name].model.facts)
    assert resolved.top_k == DEPLOYMENTS[path.name].model.facts.index_topk
    assert resolved.hot_pages == json.loads(text)["device_buffer_size"] // 64
    assert config.notes() == ()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_it_holds_more_requests_than_plain_sglang(name: str) -> None:
    """Goal: a preset is worth starting. Method: its plan: it fits both memories, and mixed requests beat plain ones."""
    plan = plan_of(name)
    ratio = parse_config((FOLDER / name).read_text(encoding="utf-8")).host_to_device_ratio
    assert not plan.memory.host_bound
    assert plan.memory.requested_ratio == ratio == pytest.approx(plan.memory.ratio_at_end, rel=0.04)
    assert plan.memory.host_bytes <= plan.host_bytes_per_rank
    assert plan.longest_request_tokens >= plan.load.total_tokens
    assert plan.mixed.total > 1.3 * plan.plain.total > 0


def test_a_card_of_96_gb_is_too_small_for_the_decode_preset() -> None:
    """Goal: the launch script's word on H20s is true. Method: the same plan with that memory is refused for weights."""
    named = DEPLOYMENTS["glm-5.1-fp8-h20x8-decode.json"]
    small = replace(named.deployment, gpu_bytes=int(95.6 * GIB))
    with pytest.raises(ConfigError, match="of weights per GPU do not fit"):
        make_plan(named.model, small, LOAD, Choices(named.cache_type, 10, 6144))


@pytest.mark.parametrize(
    ("name", "buffer", "ratio"),
    [
        ("glm-5.1-fp8-h200x8.json", 4096, 8),
        ("glm-5.1-fp8-h20x8-decode.json", 6144, 10),
    ],
)
def test_published_deployments_keep_their_published_figures(name: str, buffer: int, ratio: int) -> None:
    """Goal: results can be set beside the published ones. Method: buffer and ratio of the two known deployments."""
    config = parse_config((FOLDER / name).read_text(encoding="utf-8"))
    assert (config.device_buffer_size, config.host_to_device_ratio) == (buffer, ratio)
