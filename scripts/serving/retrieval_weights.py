"""Owns the matrices of the retrieval checkpoint: what `retrieval_plan` describes, as DeepSeek-V3.2 tensors in bf16.

`make_tiny_dsa` streams the tensors into safetensors files, the reference model of the tests loads them. Generation
runs on the CPU with seeded generators only, so a seed means the same bytes everywhere. Nothing here reads a file.

Besides the program, a quarter of the heads and nearly all MLP units are plain random: they write to dimensions that
no decision reads, so that the arithmetic looks like a model's.
"""

from collections.abc import Iterator

import numpy as np
import torch

from serving.retrieval_plan import (
    TIE_BREAK,
    Codebook,
    Plan,
    Span,
    inverse_frequencies,
    softmax_scale,
)

Named = tuple[str, torch.Tensor]

# Attention scores in nats. A row that matches the major class only gets exp(-12) of a full match.
_MAJOR_NATS, _MINOR_NATS = 24.0, 12.0
# Nats of the pointer per rotary pair, highest frequency first: the next-best lag loses by 22 nats up to 128k tokens.
_POINTER_NATS = np.array([24.0] * 3 + [8.0] * 11)
# The MLP limits a vote s to clip(s / _KNEE, -1, 1); the sigmoids are flat _SHARPNESS units from the knee.
_KNEE, _SHARPNESS = 1.0 / 32, 16.0
_CLIP_UNITS = 4


def _zeros(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.float32)


def _select(rows: int, columns: int, source: Span) -> torch.Tensor:
    """A matrix whose first source.size rows copy the dimensions of `source`."""
    matrix = _zeros(rows, columns)
    index = torch.arange(source.size)
    matrix[index, source.start + index] = 1
    return matrix


class RetrievalWeights:
    """The tensors of one checkpoint. Iterating over `embedding`, `layer(i)` and `head` yields (name, bf16 tensor)."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.codebook = Codebook(plan, seed)
        self._seed = seed
        self._scale = softmax_scale(plan.config)
        self._frequencies = inverse_frequencies(plan.config)

    def _generator(self, *key: int) -> torch.Generator:
        stream = np.random.SeedSequence([self._seed, *key]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(stream >> 1))

    # -- outside the layers -------------------------------------------------------------------------------------

    def embedding(self) -> Iterator[Named]:
        """The token table [vocab, hidden]: +-1 everywhere but in the dimensions that layers write."""
        plan, book = self.plan, self.codebook
        vocab, hidden = plan.config["vocab_size"], plan.config["hidden_size"]
        table = torch.randint(0, 2, (vocab, hidden), generator=self._generator(0), dtype=torch.int8).float() * 2 - 1
        codes = np.concatenate([book.codes(partition) for partition in range(4)], axis=1)
        table[:, plan.own.start : plan.own.stop] = torch.from_numpy(codes)
        table[:, plan.value.start : plan.value.stop] = torch.from_numpy(book.values())
        table[:, plan.constant.start : plan.constant.stop] = 1
        for written in (plan.previous, plan.votes, plan.bits):
            table[:, written.start : written.stop] = 0
        yield "model.embed_tokens.weight", table.bfloat16()

    def head(self) -> Iterator[Named]:
        """Final norm and output matrix [vocab, hidden]: a token's logit is the agreement of its bits."""
        plan = self.plan
        matrix = _zeros(plan.config["vocab_size"], plan.config["hidden_size"])
        matrix[:, plan.bits.start : plan.bits.stop] = torch.from_numpy(self.codebook.bits())
        yield "model.norm.weight", torch.ones(plan.config["hidden_size"]).bfloat16()
        yield "lm_head.weight", matrix.bfloat16()

    # -- one layer ----------------------------------------------------------------------------------------------

    def layer(self, layer: int) -> Iterator[Named]:
        """Every tensor of decoder layer `layer`."""
        config, prefix = self.plan.config, f"model.layers.{layer}."
        attention = prefix + "self_attn."
        tensors = {
            prefix + "input_layernorm.weight": torch.ones(config["hidden_size"]),
            prefix + "post_attention_layernorm.weight": torch.ones(config["hidden_size"]),
            attention + "q_a_layernorm.weight": torch.ones(config["q_lora_rank"]),
            attention + "kv_a_layernorm.weight": torch.ones(config["kv_lora_rank"]),
            attention + "q_a_proj.weight": self._query_latent(),
            attention + "kv_a_proj_with_mqa.weight": self._kv_latent(layer),
            attention + "q_b_proj.weight": self._queries(layer),
            attention + "kv_b_proj.weight": self._keys_and_values(layer),
            attention + "o_proj.weight": self._output(layer),
            **{attention + "indexer." + name: tensor for name, tensor in self._indexer(layer).items()},
            **{prefix + "mlp." + name: tensor for name, tensor in self._mlp(layer).items()},
        }
        for name, tensor in tensors.items():
            yield name, tensor.bfloat16().contiguous()

    def _query_latent(self) -> torch.Tensor:
        plan = self.plan
        matrix = _zeros(plan.config["q_lora_rank"], plan.config["hidden_size"])
        rows = torch.arange(plan.config["q_lora_rank"])
        features = plan.feature.start + torch.arange(plan.q_feature.size) % plan.feature.size
        columns = torch.cat(
            [torch.from_numpy(span.indices()) for span in (plan.own, plan.previous, plan.constant)] + [features]
        )
        matrix[rows, columns] = 1
        return matrix

    def _kv_latent(self, layer: int) -> torch.Tensor:
        """[kv_lora_rank + rope, hidden]: two partitions, value bits, features; then (1, 0) in every rotary pair."""
        plan = self.plan
        rank, hidden = plan.config["kv_lora_rank"], plan.config["hidden_size"]
        key = plan.key_partition(layer)
        parts = [plan.own.at(partition * plan.partition, plan.partition) for partition in (key, (key + 1) % 4)] + [
            plan.value,
            plan.feature,
        ]
        matrix = _zeros(rank + plan.config["qk_rope_head_dim"], hidden)
        columns = torch.cat([torch.from_numpy(span.indices()) for span in parts])
        matrix[torch.arange(rank), columns] = 1
        matrix[rank::2, plan.constant.start] = 1
        return matrix

    def _probe_sources(self, layer: int) -> tuple[Span, Span]:
        """Where in the query latent the codes lie that the layer's two probes ask for."""
        plan, size = self.plan, self.plan.partition
        first = plan.q_own.at((layer + 2) % 4 * size, size)
        second = plan.q_own.at(3 * size, size) if layer == 0 else plan.q_previous.at(layer % 2 * size, size)
        return first, second

    def _wanted_signs(self, layer: int, probe: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Diagonals that turn a codeword into the codeword of another class, one for each half: float32 [code]."""
        rng, code = np.random.default_rng([self._seed, 1, layer, probe]), self.plan.code
        major = self.codebook.rows[rng.integers(1, code)] * rng.choice(np.float32([-1, 1]))
        minor = self.codebook.rows[rng.integers(0, self.plan.num_minor_classes)]
        return torch.from_numpy(major), torch.from_numpy(minor)

    def _head_groups(self) -> list[range]:
        """Heads of the first probe, the second probe, the pointer, and the random rest."""
        quarter = self.plan.config["num_attention_heads"] // 4
        return [range(group * quarter, (group + 1) * quarter) for group in range(4)]

    def _queries(self, layer: int) -> torch.Tensor:
        plan, code = self.plan, self.plan.code
        heads, rope = plan.config["num_attention_heads"], plan.config["qk_rope_head_dim"]
        matrix = torch.zeros(heads, plan.partition + rope, plan.config["q_lora_rank"])
        groups, index = self._head_groups(), torch.arange(code)
        for probe, source in enumerate(self._probe_sources(layer)):
            major, minor = self._wanted_signs(layer, probe)
            for head in groups[probe]:
                matrix[head, index, source.start + index] = major * _MAJOR_NATS / (code * self._scale)
                matrix[head, code + index, source.start + code + index] = minor * _MINOR_NATS / (code * self._scale)
        pairs = np.arange(len(_POINTER_NATS))
        angle = self._frequencies[pairs] * plan.lag(layer)
        for head in groups[2]:
            even, column = plan.partition + 2 * torch.from_numpy(pairs), plan.q_constant.start
            matrix[head, even, column] = torch.from_numpy(_POINTER_NATS * np.cos(angle) / self._scale).float()
            matrix[head, even + 1, column] = torch.from_numpy(-_POINTER_NATS * np.sin(angle) / self._scale).float()
        wild, generator = groups[3], self._generator(2, layer)
        spread = 1.5 / (self._scale * plan.partition**0.5 * plan.config["q_lora_rank"] ** 0.5)
        shape = (len(wild), plan.partition, plan.config["q_lora_rank"])
        matrix[wild.start : wild.stop, : plan.partition] = torch.randn(shape, generator=generator) * spread
        return matrix.flatten(0, 1)

    def _keys_and_values(self, layer: int) -> torch.Tensor:
        """[heads, key 2c + value 2c, kv_lora_rank]; a value's first two dimensions are the layer's two bits."""
        plan, size = self.plan, self.plan.partition
        rank, groups = plan.config["kv_lora_rank"], self._head_groups()
        generator = self._generator(3, layer)
        matrix = torch.zeros(plan.config["num_attention_heads"], 2 * size, rank)
        matrix[:, :size] = _select(size, rank, plan.kv_key)
        matrix[:, size:] = torch.randn(matrix[:, size:].shape, generator=generator) / rank**0.5
        for slot, bit in enumerate(plan.vote_bits(layer)):
            matrix[:, size + slot] = 0
            matrix[:, size + slot, plan.kv_value.start + plan.source_bit(bit)] = 1
        if layer == 0:
            for head, source in self._previous_code_heads():
                matrix[head, size:] = _select(size, rank, source)
        wild = groups[3]
        keys = torch.randn((len(wild), size, rank), generator=generator) / rank**0.5
        matrix[wild.start : wild.stop, :size] = keys
        return matrix.flatten(0, 1)

    def _previous_code_heads(self) -> list[tuple[int, Span]]:
        """Layer 0: pointer heads that copy the previous token's first or second partition."""
        pointer, plan = self._head_groups()[2], self.plan
        quarter = len(pointer) // 4
        sources = [plan.kv_key] * quarter + [plan.kv_other] * quarter
        return list(zip(pointer[: 2 * quarter], sources, strict=True))

    def _output(self, layer: int) -> torch.Tensor:
        plan, size = self.plan, self.plan.partition
        heads, groups = plan.config["num_attention_heads"], self._head_groups()
        generator = self._generator(4, layer)
        matrix = torch.zeros(plan.config["hidden_size"], heads, size)
        shape = (plan.scratch.size, heads, size)
        matrix[plan.scratch.start : plan.scratch.stop] = torch.randn(shape, generator=generator) * 0.1 / heads**0.5
        pointer = list(groups[2])
        if layer == 0:
            copies = self._previous_code_heads()
            for head, source in copies:
                second = plan.partition if source == plan.kv_other else 0
                target = plan.previous.start + second + torch.arange(size)
                matrix[:, head] = 0
                matrix[target, head, torch.arange(size)] = 2.0 / len(copies)
            pointer = pointer[len(copies) :]
        for slot, bit in enumerate(plan.vote_bits(layer)):
            target = plan.votes.start + bit
            for head in groups[slot]:
                matrix[target, head, slot] = 1.0 / len(groups[slot])
            for head in pointer:
                matrix[target, head, slot] = TIE_BREAK / len(pointer)
        return matrix.flatten(1, 2)

    def _mlp(self, layer: int) -> dict[str, torch.Tensor]:
        """Random units into scratch, and four units a bit that limit the layer's votes into `bits`."""
        plan, generator = self.plan, self._generator(5, layer)
        hidden, inner = plan.config["hidden_size"], plan.config["intermediate_size"]
        gate = torch.randn((inner, hidden), generator=generator) / hidden**0.5
        up = torch.randn((inner, hidden), generator=generator) / hidden**0.5
        down = _zeros(hidden, inner)
        shape = (plan.scratch.size, inner)
        down[plan.scratch.start : plan.scratch.stop] = torch.randn(shape, generator=generator) * 0.1 / inner**0.5
        slope = _SHARPNESS / _KNEE
        for slot, bit in enumerate(plan.vote_bits(layer)):
            units = slice(slot * _CLIP_UNITS, (slot + 1) * _CLIP_UNITS)
            gate[units], up[units], down[:, units] = 0, 0, 0
            gate[units, plan.votes.start + bit] = torch.tensor([slope, slope, -slope, -slope])
            gate[units, plan.constant.start] = torch.tensor([0, -_SHARPNESS, 0, -_SHARPNESS])
            up[units, plan.constant.start] = 1
            down[plan.bits.start + bit, units] = torch.tensor([1.0, -1.0, -1.0, 1.0]) / _SHARPNESS
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}

    def _indexer(self, layer: int) -> dict[str, torch.Tensor]:
        """Key: major code of the layer's key partition with a little of the features, and (1, 0) in rotary pairs."""
        plan, code = self.plan, self.plan.code
        rope, dim = plan.config["qk_rope_head_dim"], plan.config["index_head_dim"]
        rng = np.random.default_rng([self._seed, 6, layer])
        key = _zeros(dim, plan.config["hidden_size"])
        own = plan.own.at(plan.key_partition(layer) * plan.partition, code)
        key[rope + torch.arange(code), torch.from_numpy(own.indices())] = 1
        for row in range(code):
            columns = plan.feature.start + rng.choice(plan.feature.size, 4, replace=False)
            key[rope + row, torch.from_numpy(columns)] = torch.from_numpy(rng.choice(np.float32([-0.05, 0.05]), 4))
        norm = torch.cat([torch.zeros(rope), torch.ones(code)])
        bias = torch.cat([torch.ones(rope // 2), torch.zeros(rope // 2 + code)])
        queries, weights = self._index_queries(layer, rng)
        gates = _zeros(plan.config["index_n_heads"], plan.config["hidden_size"])
        gates[:, plan.constant.start] = weights
        return {
            "wk.weight": key,
            "k_norm.weight": norm,
            "k_norm.bias": bias,
            "wq_b.weight": queries,
            "weights_proj.weight": gates,
        }

    def _index_queries(self, layer: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads in eighths: probe 0, 0, probe 1, 1, pointer, recent tokens, fixed taste, taste of the token."""
        plan, code = self.plan, self.plan.code
        num_heads, rope, rank = (
            plan.config["index_n_heads"],
            plan.config["qk_rope_head_dim"],
            plan.config["q_lora_rank"],
        )
        matrix = torch.zeros(num_heads, plan.config["index_head_dim"], rank)
        weights, eighth, index = torch.zeros(num_heads), num_heads // 8, torch.arange(code)
        for probe, source in enumerate(self._probe_sources(layer)):
            heads = slice(2 * probe * eighth, 2 * (probe + 1) * eighth)
            matrix[heads, rope + index, source.start + index] = self._wanted_signs(layer, probe)[0]
            weights[heads] = 102.4 / code / eighth
        pointer, recent, fixed, own = (slice(part * eighth, (part + 1) * eighth) for part in range(4, 8))
        column = plan.q_constant.start
        sharp, slow = np.arange(12), np.arange(12, 16)
        matrix[pointer, :rope, column] = self._rotary_query(sharp, plan.lag(layer), threshold=len(sharp) - 2.0)
        matrix[recent, :rope, column] = self._rotary_query(slow, 0, threshold=len(slow) - 1.0)
        weights[pointer], weights[recent] = 400.0 / eighth, 160.0 / eighth
        taste = rng.standard_normal((eighth, code)).astype(np.float32)
        matrix[fixed, rope:, column] = torch.from_numpy(taste)
        features = plan.q_feature.start + rng.integers(0, plan.q_feature.size, (eighth, code))
        for head in range(eighth):
            matrix[own.start + head, rope + index, torch.from_numpy(features[head])] = 1
        weights[fixed], weights[own] = 8.0 / eighth, 1.0 / eighth
        return matrix.flatten(0, 1), weights

    def _rotary_query(self, pairs: np.ndarray, lag: int, threshold: float) -> torch.Tensor:
        """A query [rope] that scores sum(cos(f * (distance - lag))) - threshold, halves as real and imaginary parts.

        The slowest pair barely turns within any context, so it serves as the constant.
        """
        half = self.plan.config["qk_rope_head_dim"] // 2
        query = np.zeros(2 * half, np.float32)
        angle = self._frequencies[pairs] * lag
        query[pairs], query[half + pairs] = np.cos(angle), -np.sin(angle)
        query[half - 1] = -threshold
        return torch.from_numpy(query)
