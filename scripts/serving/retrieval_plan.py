"""Owns the plan of the retrieval checkpoint: which dimension of the model holds which discrete feature of a token.

`retrieval_weights` writes matrices from it and the tests read it; it holds no tensor of a model and knows no server.

The model is an ordinary DeepSeek-V3.2 network whose weights spell out a small program. Every token carries its
identity in bits and in the codewords of four hash classes. Each layer has two *probes*: the query asks for one class
(of the current or the previous token's codes), every cached token of that class matches with the same score, and the
probe returns the mean of one of their bits, a majority vote over rows that lie anywhere in the context. The vote
becomes one bit of the next token. So the text depends on individual KV rows of every layer, old ones included, and
every decision has a margin of one vote: rounding and the order in which attention sums its rows cannot flip it,
a wrong row can.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_PARTITIONS = 4
# Votes are means over m rows, so multiples of 1/m; a tie-break below 1/m never overrules a vote. m stays under 128
# up to about 64k tokens of context.
TIE_BREAK = 1.0 / 128
_LAGS = (1, 63, 130, 517, 1030, 1801, 2620, 3700)


@dataclass(frozen=True, slots=True)
class Span:
    """A run of dimensions, `start` to `stop` (exclusive)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of dimensions."""
        return self.stop - self.start

    def at(self, offset: int, size: int) -> "Span":
        """The part of this run of `size` dimensions that begins at `offset`."""
        if offset < 0 or offset + size > self.size:
            raise ValueError(f"offset {offset} + size {size} exceeds a span of {self.size}")
        return Span(self.start + offset, self.start + offset + size)

    def indices(self) -> np.ndarray:
        """The dimensions as an int64 array."""
        return np.arange(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Plan:
    """Dimensions of one checkpoint. `code` is the width of a codeword; a partition is a major and a minor codeword."""

    config: dict[str, Any]
    code: int
    num_bits: int
    # residual stream
    own: Span
    previous: Span
    constant: Span
    value: Span
    feature: Span
    votes: Span
    bits: Span
    scratch: Span
    # query latent and KV latent
    q_own: Span
    q_previous: Span
    q_constant: Span
    q_feature: Span
    kv_key: Span
    kv_other: Span
    kv_value: Span
    kv_feature: Span

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config["num_hidden_layers"]

    @property
    def partition(self) -> int:
        """Dimensions of one partition's two codewords."""
        return 2 * self.code

    @property
    def num_major_classes(self) -> int:
        """Major classes: a codeword or its negative."""
        return 2 * self.code

    @property
    def num_minor_classes(self) -> int:
        """Minor classes within a major one; with a full-size code a class holds one token in 1,024."""
        return self.code // 8

    def key_partition(self, layer: int) -> int:
        """The partition whose codes layer `layer` keeps as keys."""
        return layer % NUM_PARTITIONS

    def lag(self, layer: int) -> int:
        """Tokens back that the layer's pointer heads read; layer 0 must read the previous token."""
        return _LAGS[layer % len(_LAGS)]

    def vote_bits(self, layer: int) -> tuple[int, ...]:
        """The bits of the next token that the layer's two probes decide."""
        return tuple(bit for bit in (2 * layer, 2 * layer + 1) if bit < self.num_bits)

    def source_bit(self, bit: int) -> int:
        """The bit of a matched token that votes for `bit` of the next token."""
        return (bit + 5) % self.num_bits


def _spans(sizes: list[int], total: int, what: str) -> list[Span]:
    if sum(sizes) > total:
        raise ValueError(f"{what}: the features need {sum(sizes)} dimensions, the model has {total}")
    edges = np.cumsum([0, *sizes])
    return [Span(int(start), int(stop)) for start, stop in itertools.pairwise(edges)]


def _check(config: dict[str, Any]) -> tuple[int, int]:
    code = config["qk_nope_head_dim"] // 2
    num_bits = int(math.log2(config["vocab_size"]))
    rules = {
        "qk_nope_head_dim must be twice a power of four": 4 ** round(math.log(code, 4)) == code,
        "v_head_dim must equal qk_nope_head_dim": config["v_head_dim"] == config["qk_nope_head_dim"],
        "qk_rope_head_dim must be 64": config["qk_rope_head_dim"] == 64,
        "index_head_dim must be qk_rope_head_dim plus half of qk_nope_head_dim": config["index_head_dim"] == 64 + code,
        "vocab_size must be a power of two": 1 << num_bits == config["vocab_size"],
        "two bits a layer must cover the vocabulary": num_bits <= 2 * config["num_hidden_layers"],
        "num_attention_heads must be a power of two, at least 16": config["num_attention_heads"] in (16, 32, 64, 128),
        "index_n_heads must be a multiple of 8": config["index_n_heads"] % 8 == 0,
        "every layer must be dense": config["first_k_dense_replace"] >= config["num_hidden_layers"],
        "qk_nope_head_dim must be at least 32 and twice the bits of the vocabulary": code >= 16 and num_bits <= code,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError("; ".join(broken))
    return code, num_bits


def make_plan(config: dict[str, Any]) -> Plan:
    """Lay the features out in a model of this HF config. Raises ValueError, naming every rule that is broken."""
    code, num_bits = _check(config)
    partition, hidden = 2 * code, config["hidden_size"]
    num_feature = config["kv_lora_rank"] - 2 * partition - code
    fixed = [NUM_PARTITIONS * partition, 2 * partition, code, code, num_feature, num_bits, num_bits]
    own, previous, constant, value, feature, votes, bits, scratch = _spans(
        [*fixed, max(0, hidden - sum(fixed))], hidden, "hidden_size"
    )
    q_fixed = [own.size, previous.size, code]
    q_own, q_previous, q_constant, q_feature = _spans(
        [*q_fixed, max(0, config["q_lora_rank"] - sum(q_fixed))], config["q_lora_rank"], "q_lora_rank"
    )
    kv_key, kv_other, kv_value, kv_feature = _spans(
        [partition, partition, code, num_feature], config["kv_lora_rank"], "kv_lora_rank"
    )
    return Plan(
        config, code, num_bits, own, previous, constant, value, feature, votes, bits, scratch,
        q_own, q_previous, q_constant, q_feature, kv_key, kv_other, kv_value, kv_feature,
    )  # fmt: skip


class Codebook:
    """Codewords and token hashes, all +-1 float32 arrays; equal for equal (plan, seed).

    Codewords are rows of a Hadamard matrix times a bent sequence: exactly orthogonal, and each with the same mean
    up to its sign, which the indexer's LayerNorm would otherwise turn into unequal scores.
    """

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan = plan
        rng = np.random.default_rng(seed)
        vocab = plan.config["vocab_size"]
        self.rows = _hadamard(plan.code)
        self._bent = _bent_sequence(plan.code)
        self._minor_sign = rng.choice(np.float32([-1, 1]), plan.code)
        self._hashes = [rng.permutation(vocab) for _ in range(NUM_PARTITIONS)]
        self._bit_code = rng.permutation(vocab)
        self._copy_bit = np.concatenate([np.arange(plan.num_bits), rng.integers(0, plan.num_bits, plan.code)])
        self._copy_sign = rng.choice(np.float32([-1, 1]), plan.code)
        self._copy_sign[: plan.num_bits] = 1

    def classes(self, partition: int) -> tuple[np.ndarray, np.ndarray]:
        """Major and minor class of every token id: two int64 arrays [vocab]."""
        hashed, majors = self._hashes[partition], self._plan.num_major_classes
        return hashed % majors, hashed // majors % self._plan.num_minor_classes

    def codes(self, partition: int) -> np.ndarray:
        """Both codewords of every token id: [vocab, 2 * code]."""
        major, minor = self.classes(partition)
        code = self._plan.code
        sign = np.where(major < code, 1, -1).astype(np.float32)
        words = sign[:, None] * self.rows[major % code] * self._bent
        return np.concatenate([words, self.rows[minor] * self._minor_sign], axis=1)

    def bits(self) -> np.ndarray:
        """Identity of every token id: [vocab, num_bits]."""
        shifts = np.arange(self._plan.num_bits)
        return ((self._bit_code[:, None] >> shifts) & 1).astype(np.float32) * 2 - 1

    def values(self) -> np.ndarray:
        """What a KV row carries of a token's bits: [vocab, code]; the first num_bits columns are the bits."""
        return self.bits()[:, self._copy_bit[: self._plan.code]] * self._copy_sign


def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _bent_sequence(size: int) -> np.ndarray:
    half = round(math.sqrt(size))
    index = np.arange(size)
    low, high = index % half, index // half
    return np.float32([-1 if int(a & b).bit_count() % 2 else 1 for a, b in zip(low, high, strict=True)])


def inverse_frequencies(config: dict[str, Any]) -> np.ndarray:
    """Rotary frequencies under YaRN, radians per token: float64 [qk_rope_head_dim / 2], highest first."""
    scaling, dim, base = config["rope_scaling"], config["qk_rope_head_dim"], config["rope_theta"]
    pairs = np.arange(dim // 2, dtype=np.float64)
    plain = base ** (-2 * pairs / dim)

    def pair_that_turns(turns: float) -> float:
        period = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dim * math.log(period) / (2 * math.log(base))

    first = max(math.floor(pair_that_turns(scaling["beta_fast"])), 0)
    last = min(math.ceil(pair_that_turns(scaling["beta_slow"])), dim - 1)
    slowed = np.clip((pairs - first) / max(last - first, 1e-3), 0, 1)
    return plain * (1 - slowed) + plain / scaling["factor"] * slowed


def softmax_scale(config: dict[str, Any]) -> float:
    """Factor on attention scores: head size and YaRN's temperature."""
    scaling = config["rope_scaling"]
    mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
    return (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * mscale**2
