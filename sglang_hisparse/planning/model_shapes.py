"""What planning has to know of a model: rows, index groups and an estimate of its weights, from its config's own keys.

Owns the built-in configs (only the keys that planning reads) and the count of parameters. Called by planner.py and the
command. It never looks at weights: their bytes are an estimate, and --weights-gib replaces it by a measurement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from sglang_hisparse.config import DEFAULT_PAGE_SIZE, ModelFacts
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.index_groups import index_groups
from sglang_hisparse.layout import KVShape

_SCALE_BLOCK = 128


class CacheType(str, Enum):
    """Type of a KV row, as in --kv-cache-dtype."""

    BF16 = "bf16"
    FP8 = "fp8"


class WeightType(str, Enum):
    """Type of the weights of linear layers; embeddings, norms, routers and the output head stay bf16."""

    BF16 = "bf16"
    FP8 = "fp8"


_V32 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
}
_GLM = {
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "max_position_embeddings": 202752,
}
_GLM_SHARED = {**_GLM, "index_topk_freq": 4, "index_skip_topk_offset": 3, "max_position_embeddings": 1048576}


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A config that comes with this package, and what in it is not certain."""

    config: Mapping[str, Any]
    note: str = ""


BUILT_IN: dict[str, BuiltIn] = {
    "DeepSeek-V3.2": BuiltIn(_V32),
    "GLM-5.1": BuiltIn(_GLM),
    "GLM-5.2": BuiltIn(_GLM_SHARED),
    "GLM-5.3": BuiltIn(
        _GLM_SHARED, "taken to have the shape of GLM-5.2; use --config-json with the model's own config"
    ),
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts by how a server divides them; `bf16` ones are never quantised."""

    experts: int  #: routed experts: divided by all ranks of the tensor-parallel group
    attention: int  #: projections by head: divided by the ranks that share one attention
    dense: int  #: dense MLPs and shared experts: divided by the tensor-parallel group
    replicated: int  #: down projections, indexers: on every rank
    bf16_split: int  #: embedding and output head: divided as attention is
    bf16_replicated: int  #: routers, norms, index weights

    @property
    def total(self) -> int:
        return self.experts + self.attention + self.dense + self.replicated + self.bf16_split + self.bf16_replicated


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. parameters is None where its config lacks the keys to count them. context_tokens: longest context."""

    name: str
    facts: ModelFacts
    num_leaders: int
    kv_lora_rank: int
    rope_dim: int
    index_head_dim: int
    context_tokens: int
    parameters: Parameters | None
    weight_type: WeightType
    note: str = ""

    @property
    def num_layers(self) -> int:
        return self.facts.num_layers

    def row_bytes(self, cache_type: CacheType) -> int:
        """One token in one layer: latent and rope in bf16, or latent in fp8 with an fp32 scale per 128, rope in bf16."""
        if cache_type is CacheType.BF16:
            return 2 * (self.kv_lora_rank + self.rope_dim)
        return self.kv_lora_rank + self.kv_lora_rank // _SCALE_BLOCK * 4 + 2 * self.rope_dim

    def kv_shape(self, cache_type: CacheType) -> KVShape:
        """Bytes of one token in the pools of one rank; the latent is not divided, so every rank holds all of it."""
        return KVShape(
            num_layers=self.num_layers,
            num_leaders=self.num_leaders,
            row_bytes=self.row_bytes(cache_type),
            index_row_bytes=self.index_head_dim + self.index_head_dim // _SCALE_BLOCK * 4,
            page_size=self.facts.page_size,
        )

    def weight_bytes(self, *, tp: int, dp: int) -> int | None:
        """Estimated weights of one of `tp` ranks, `dp` of which have an attention of their own; None: cannot be told."""
        if self.parameters is None:
            return None
        counts, attention_ranks = self.parameters, tp // dp
        linear = (counts.experts + counts.dense) / tp + counts.attention / attention_ranks + counts.replicated
        unquantised = counts.bf16_split / attention_ranks + counts.bf16_replicated
        return int(linear * (1 if self.weight_type is WeightType.FP8 else 2) + 2 * unquantised)


def built_in(name: str) -> ModelShape:
    """A model that comes with this package. Raises ConfigError with the names that do."""
    for known, entry in BUILT_IN.items():
        if name.lower() == known.lower():
            return shape_from_config(entry.config, name=known, weight_type=WeightType.FP8, note=entry.note)
    raise ConfigError(f"--model: {name!r} is not built in; allowed: {', '.join(BUILT_IN)}, or --config-json FILE")


def shape_from_file(path: Path) -> ModelShape:
    """The model whose Hugging Face config.json this is. Raises ConfigError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config-json: {path} cannot be read ({error}); allowed: a model's config.json") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--config-json: {path} holds no JSON object; allowed: a model's config.json")
    quantised = str((config.get("quantization_config") or {}).get("quant_method", ""))
    text = config.get("text_config", config)
    name = (config.get("architectures") or [path.stem])[0]
    return shape_from_config(text, name=name, weight_type=WeightType.FP8 if quantised == "fp8" else WeightType.BF16)


def shape_from_config(config: Mapping[str, Any], *, name: str, weight_type: WeightType, note: str = "") -> ModelShape:
    """The model of a Hugging Face text config. Raises ConfigError where it is none that HiSparse serves."""
    facts = ModelFacts.from_text_config(config, page_size=DEFAULT_PAGE_SIZE)
    if int(config.get("index_kpool") or 1) > 1 or "linear_attention" in (config.get("layer_types") or ()):
        raise ConfigError(
            f"--config-json: {name} pools index keys or mixes DSA with linear attention, which HiSparse does not serve; "
            "allowed: models such as DeepSeek-V3.2 and GLM-5"
        )
    groups = index_groups(config)
    sizes = {key: _size(config, key) for key in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")}
    return ModelShape(
        name=name,
        facts=facts,
        num_leaders=len(groups),
        kv_lora_rank=sizes["kv_lora_rank"],
        rope_dim=sizes["qk_rope_head_dim"],
        index_head_dim=sizes["index_head_dim"],
        context_tokens=_size(config, "max_position_embeddings"),
        parameters=count_parameters(config, num_leaders=len(groups)),
        weight_type=weight_type,
        note=note,
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}: {value!r} in the model's config is not a positive integer; allowed: 1 or more")
    return value


def count_parameters(config: Mapping[str, Any], *, num_leaders: int) -> Parameters | None:
    """Parameters of the target model (no draft layers), None where the config lacks a key for it."""
    missing = [key for key in _V32 if key != "max_position_embeddings" and not isinstance(config.get(key), int)]
    if missing:
        return None
    c = {key: int(config[key]) for key in _V32 if key in config}
    layers, hidden, heads = c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"]
    q_rank, kv_rank, rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    dense_layers = c["first_k_dense_replace"]
    moe_layers = layers - dense_layers
    expert = 3 * hidden * c["moe_intermediate_size"]
    by_head = q_rank * (c["qk_nope_head_dim"] + rope) + kv_rank * (c["qk_nope_head_dim"] + c["v_head_dim"])
    by_head += c["v_head_dim"] * hidden
    index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
    return Parameters(
        experts=moe_layers * c["n_routed_experts"] * expert,
        attention=layers * heads * by_head,
        dense=moe_layers * c["n_shared_experts"] * expert + dense_layers * 3 * hidden * c["intermediate_size"],
        replicated=layers * hidden * (q_rank + kv_rank + rope)
        + num_leaders * (q_rank * index_heads * index_dim + hidden * index_dim),
        bf16_split=2 * c["vocab_size"] * hidden,
        bf16_replicated=moe_layers * hidden * c["n_routed_experts"]
        + num_leaders * hidden * index_heads
        + layers * (2 * hidden + q_rank + kv_rank),
    )
