"""Goal: a model's sizes are read right. Method: published parameter counts, groups by hand, configs that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_hisparse.config import GIB
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.planning.model_shapes import (
    BUILT_IN,
    CacheType,
    WeightType,
    built_in,
    count_parameters,
    shape_from_file,
)


@pytest.mark.parametrize(
    ("name", "layers", "leaders", "billions"),
    [
        ("DeepSeek-V3.2", 61, 61, 671),
        ("GLM-5.1", 78, 78, 744),
        ("GLM-5.2", 78, 21, 744),
        ("GLM-5.3", 78, 21, 744),
    ],
)
def test_published_sizes(name: str, layers: int, leaders: int, billions: int) -> None:
    """Goal: the count of parameters can be trusted. Method: within half a percent of what the makers publish."""
    shape = built_in(name.upper())
    assert (shape.name, shape.num_layers, shape.num_leaders) == (name, layers, leaders)
    assert shape.parameters is not None
    assert shape.parameters.total == pytest.approx(billions * 1e9, rel=0.005)


def test_gpu_memory_of_a_published_request() -> None:
    """Goal: bytes per token agree with a published figure. Method: GLM-5.1 at 128k in bf16 takes 13.09 GB."""
    shape = built_in("GLM-5.1").kv_shape(CacheType.BF16)
    assert 131072 * (shape.kv_token_bytes + shape.index_token_bytes) / 1e9 == pytest.approx(13.09, rel=0.005)


def test_weights_of_a_rank_by_hand() -> None:
    """Goal: what is split is split, what is not is not. Method: the parts of V3.2 by hand, for tp 8 with dp 1 and 8."""
    shape = built_in("DeepSeek-V3.2")
    experts = 58 * 256 * 3 * 7168 * 2048
    dense = 58 * 3 * 7168 * 2048 + 3 * 3 * 7168 * 18432
    attention = 61 * 128 * (1536 * 192 + 512 * 256 + 128 * 7168)
    replicated = 61 * (7168 * (1536 + 576) + 1536 * 64 * 128 + 7168 * 128)
    split, bf16 = 2 * 129280 * 7168, 58 * 7168 * 256 + 61 * (7168 * 64 + 2 * 7168 + 1536 + 512)
    for dp in (1, 8):
        by_hand = (experts + dense) / 8 + attention * dp / 8 + replicated + 2 * (split * dp / 8 + bf16)
        assert shape.weight_bytes(tp=8, dp=dp) == int(by_hand)
    assert 75 * GIB < shape.weight_bytes(tp=8, dp=1) < 90 * GIB


def test_a_config_file(tmp_path: Path) -> None:
    """Goal: any DSA model can be planned for. Method: nested text config, quantised or not, with keys missing."""
    path = tmp_path / "config.json"
    config = {**BUILT_IN["GLM-5.2"].config}
    nested = {"architectures": ["GlmMoeDsaForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps({**nested, "text_config": config}))
    read, known = shape_from_file(path), built_in("GLM-5.2")
    assert (read.name, read.weight_type) == ("GlmMoeDsaForCausalLM", WeightType.FP8)
    assert (read.parameters, read.kv_shape(CacheType.FP8)) == (known.parameters, known.kv_shape(CacheType.FP8))
    path.write_text(json.dumps(config))
    assert shape_from_file(path).weight_type is WeightType.BF16
    assert shape_from_file(path).weight_bytes(tp=8, dp=1) > 1.9 * read.weight_bytes(tp=8, dp=1)
    del config["q_lora_rank"]
    assert count_parameters(config, num_leaders=21) is None
    path.write_text(json.dumps(config))
    assert shape_from_file(path).weight_bytes(tp=8, dp=1) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"num_hidden_layers": 4}', "no DSA indexer"),
        (json.dumps({**BUILT_IN["GLM-5.1"].config, "index_kpool": 4}), "pools index keys"),
        (json.dumps({**BUILT_IN["GLM-5.1"].config, "layer_types": ["linear_attention"]}), "linear attention"),
        (json.dumps({**BUILT_IN["GLM-5.1"].config, "kv_lora_rank": "512"}), "kv_lora_rank: '512'"),
        (json.dumps({**BUILT_IN["GLM-5.1"].config, "max_position_embeddings": 0}), "max_position_embeddings: 0"),
    ],
)
def test_configs_that_cannot_be_planned_for(tmp_path: Path, text: str, message: str) -> None:
    """Goal: one line says what is wrong. Method: broken and foreign configs."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        shape_from_file(path)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    """Goal: the built-in models can be found. Method: a wrong name."""
    with pytest.raises(ConfigError, match="DeepSeek-V3.2, GLM-5.1, GLM-5.2, GLM-5.3"):
        built_in("GLM-4")
