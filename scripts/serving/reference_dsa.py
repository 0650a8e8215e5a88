"""A plain torch model with DeepSeek-V3.2's sparse attention, for checking the checkpoint's properties on a CPU.

Tests call it. It is written from the published architecture, shares no code with a server, and
is far too slow to serve. Values are float32 rounded to bf16 wherever a served model would store bf16; index keys and
queries are rounded to e4m3 with power-of-two scales.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from serving.retrieval_plan import inverse_frequencies, softmax_scale


@dataclass(slots=True)
class Disturbance:
    """What decode does to the rows that attention reads. Off by default.

    zero_rows: share of the selected rows of each layer and step that become zero.
    shuffle: read the selected rows in a random order. noise: relative error put on each attention output.
    """

    zero_rows: float = 0.0
    shuffle: bool = False
    noise: float = 0.0
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))


@dataclass(slots=True)
class Generation:
    """Greedy tokens, the margin of each (best minus second logit, over the best), and each step's selected rows."""

    tokens: list[int]
    margins: list[float]
    selected: list[list[set[int]]]


def _bf16(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float()


def _rms_norm(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _bf16(value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6) * weight)


def _fp8(value: torch.Tensor) -> torch.Tensor:
    scale = torch.exp2(torch.ceil(torch.log2(value.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)))
    return (value / scale).to(torch.float8_e4m3fn).float() * scale


class ReferenceModel:
    """One sequence at a time: `generate` fills the cache with a prompt, then decodes greedily.

    weights: tensors by checkpoint name, any float dtype; config: the HF config as a dict. max_tokens bounds prompt
    plus output. Raises KeyError for a missing tensor.
    """

    def __init__(self, config: dict[str, Any], weights: Mapping[str, torch.Tensor], max_tokens: int) -> None:
        self.config = config
        self._weights = {name: tensor.float() for name, tensor in weights.items()}
        self._rank, self._rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        self._nope, self._heads = config["qk_nope_head_dim"], config["num_attention_heads"]
        self._scale = softmax_scale(config)
        angles = torch.arange(max_tokens).double()[:, None] * torch.from_numpy(inverse_frequencies(config))
        self._cos, self._sin = angles.cos().float(), angles.sin().float()
        layers = config["num_hidden_layers"]
        self.rows = torch.zeros(layers, max_tokens, self._rank + self._rope)
        self._index_keys = torch.zeros(layers, max_tokens, config["index_head_dim"])
        self._rotation = self._hadamard(config["index_head_dim"])

    @staticmethod
    def _hadamard(size: int) -> torch.Tensor:
        if size & (size - 1):
            return torch.eye(size)
        matrix = torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix / math.sqrt(size)

    def _w(self, layer: int, name: str) -> torch.Tensor:
        return self._weights[f"model.layers.{layer}.{name}.weight"]

    def _rotate(self, value: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """Rotate [tokens, ..., rope] by position, pairs side by side or half a vector apart."""
        shape = (len(positions), *([1] * (value.dim() - 2)), -1)
        cos, sin = self._cos[positions].view(shape), self._sin[positions].view(shape)
        real, imag = (value[..., ::2], value[..., 1::2]) if interleaved else value.chunk(2, -1)
        turned = (real * cos - imag * sin, imag * cos + real * sin)
        return _bf16(torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1))

    # -- one layer ----------------------------------------------------------------------------------------------

    def _store(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        latent = _bf16(hidden @ self._w(layer, "self_attn.kv_a_proj_with_mqa").T)
        content = _rms_norm(latent[:, : self._rank], self._w(layer, "self_attn.kv_a_layernorm"))
        self.rows[layer, positions] = torch.cat([content, self._rotate(latent[:, self._rank :], positions, True)], -1)
        key = _bf16(hidden @ self._w(layer, "self_attn.indexer.wk").T)
        bias = self._weights[f"model.layers.{layer}.self_attn.indexer.k_norm.bias"]
        key = _bf16(F.layer_norm(key, key.shape[-1:], self._w(layer, "self_attn.indexer.k_norm"), bias, 1e-6))
        key = torch.cat([self._rotate(key[:, : self._rope], positions, False), key[:, self._rope :]], -1)
        self._index_keys[layer, positions] = _fp8(key @ self._rotation)

    def index_scores(
        self, layer: int, hidden: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Indexer scores [tokens, positions[-1] + 1] of queries with normed hidden states and query latents."""
        name = "self_attn.indexer."
        query = _bf16(latent @ self._w(layer, name + "wq_b").T).unflatten(-1, (self.config["index_n_heads"], -1))
        query = torch.cat([self._rotate(query[..., : self._rope], positions, False), query[..., self._rope :]], -1)
        query = _fp8(query @ self._rotation)
        gates = hidden @ self._w(layer, name + "weights_proj").T
        keys = self._index_keys[layer, : int(positions[-1]) + 1]
        scores = torch.zeros(len(positions), len(keys))
        for head in range(query.shape[1]):
            scores += (query[:, head] @ keys.T).relu_() * gates[:, head, None]
        return scores

    def _queries(self, layer: int, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Absorbed queries [tokens, heads, kv_lora_rank + rope]."""
        query = _bf16(latent @ self._w(layer, "self_attn.q_b_proj").T).unflatten(-1, (self._heads, -1))
        keys = self._w(layer, "self_attn.kv_b_proj").unflatten(0, (self._heads, -1))[:, : self._nope]
        absorbed = _bf16(torch.einsum("thn,hnr->thr", query[..., : self._nope], keys))
        return torch.cat([absorbed, self._rotate(query[..., self._nope :], positions, True)], -1)

    def _project(self, layer: int, mixed: torch.Tensor) -> torch.Tensor:
        values = self._w(layer, "self_attn.kv_b_proj").unflatten(0, (self._heads, -1))[:, self._nope :]
        heads = _bf16(torch.einsum("thr,hvr->thv", mixed, values))
        return _bf16(heads.flatten(1) @ self._w(layer, "self_attn.o_proj").T)

    def _attend(
        self, layer: int, query: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor | None
    ) -> torch.Tensor:
        scores = torch.einsum("thr,jr->htj", query, rows) * self._scale
        if allowed is not None:
            scores.masked_fill_(~allowed, -torch.inf)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        mixed = torch.einsum("htj,jr->thr", _bf16(weights), rows[:, : self._rank])
        return _bf16(mixed / weights.sum(-1).T[..., None])

    def _layer(self, layer: int, stream: torch.Tensor, positions: torch.Tensor, disturb: Disturbance | None,
               selected: list[set[int]] | None) -> torch.Tensor:  # fmt: skip
        hidden = _rms_norm(stream, self._w(layer, "input_layernorm"))
        latent = _bf16(hidden @ self._w(layer, "self_attn.q_a_proj").T)
        latent = _rms_norm(latent, self._w(layer, "self_attn.q_a_layernorm"))
        self._store(layer, hidden, positions)
        query, length = self._queries(layer, latent, positions), int(positions[-1]) + 1
        causal = positions[:, None] >= torch.arange(length)
        top_k = self.config["index_topk"]
        if length > top_k:
            scores = self.index_scores(layer, hidden, latent, positions).masked_fill_(~causal, -torch.inf)
            chosen = scores.topk(top_k, dim=-1).indices
            causal &= torch.zeros_like(causal).scatter_(1, chosen, True)
        if disturb is None:
            mixed = self._attend(layer, query, self.rows[layer, :length], causal)
        else:
            places = causal[0].nonzero()[:, 0]
            if selected is not None:
                selected.append(set(places.tolist()))
            mixed = self._attend_disturbed(layer, query, places, disturb)
        stream = _bf16(stream + self._project(layer, mixed))
        hidden = _rms_norm(stream, self._w(layer, "post_attention_layernorm"))
        gate, up = (_bf16(hidden @ self._w(layer, f"mlp.{name}_proj").T) for name in ("gate", "up"))
        return _bf16(stream + _bf16(_bf16(F.silu(gate) * up) @ self._w(layer, "mlp.down_proj").T))

    def _attend_disturbed(
        self, layer: int, query: torch.Tensor, places: torch.Tensor, disturb: Disturbance
    ) -> torch.Tensor:
        if disturb.shuffle:
            places = places[torch.randperm(len(places), generator=disturb.generator)]
        rows = self.rows[layer, places]
        if disturb.zero_rows:
            rows = rows * (torch.rand(len(rows), 1, generator=disturb.generator) >= disturb.zero_rows)
        mixed = self._attend(layer, query, rows, None)
        if disturb.noise:
            mixed = mixed * (1 + disturb.noise * torch.randn(mixed.shape, generator=disturb.generator))
        return _bf16(mixed)

    # -- a sequence ---------------------------------------------------------------------------------------------

    def _forward(self, tokens: torch.Tensor, first: int, disturb: Disturbance | None,
                 selected: list[set[int]] | None = None) -> torch.Tensor:  # fmt: skip
        stream = self._weights["model.embed_tokens.weight"][tokens]
        positions = first + torch.arange(len(tokens))
        for layer in range(self.config["num_hidden_layers"]):
            stream = self._layer(layer, stream, positions, disturb, selected)
        hidden = _rms_norm(stream[-1:], self._weights["model.norm.weight"])
        return _bf16(hidden @ self._weights["lm_head.weight"].T)[0]

    def prefill(self, prompt: list[int], chunk_tokens: int = 256) -> torch.Tensor:
        """Fill the cache with the prompt; return the logits [vocab] after its last token."""
        logits = torch.empty(0)
        for first in range(0, len(prompt), chunk_tokens):
            logits = self._forward(torch.tensor(prompt[first : first + chunk_tokens]), first, None)
        return logits

    def decode(
        self, logits: torch.Tensor, length: int, output_tokens: int, disturb: Disturbance | None = None
    ) -> Generation:
        """Greedy tokens after `length` cached ones, whose logits are given. Overwrites the cache behind `length`."""
        result = Generation([], [], [])
        for step in range(output_tokens):
            best = logits.topk(2).values
            result.tokens.append(int(logits.argmax()))
            result.margins.append(float((best[0] - best[1]) / best[0].abs().clamp_min(1e-6)))
            selected: list[set[int]] = []
            logits = self._forward(torch.tensor(result.tokens[-1:]), length + step, disturb or Disturbance(), selected)
            result.selected.append(selected)
        return result
