"""The language that the fake model speaks: what every row must hold and which token follows.

Owns the hash chain over a request's tokens, the bytes of a KV row and of an index-K entry, and the greedy continuation.
Called by the fake model (to write and to check) and by tests (to know the right output). It must never look at the
engine: everything here follows from the prompt alone, so that it can judge the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_STEP = 0xD1342543DE82EF95
_SEED = 0x243F6A8885A308D3


def mix(value: int) -> int:
    """One 64-bit avalanche (splitmix64 finaliser) of a Python int."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def row_words(prefix_hashes: np.ndarray, layer_idx: int, row_bytes: int) -> np.ndarray:
    """Rows of one layer: uint64 [n] prefix hashes -> uint64 [n, row_bytes / 8].

    Every word depends on the token, on all tokens before it (hence on the position) and on the layer, so that a row of
    another position, request, layer or age never passes for the right one.
    """
    salt = np.arange(row_bytes // 8, dtype=np.uint64) * np.uint64(_STEP & _MASK) + np.uint64(mix(layer_idx + 1))
    with np.errstate(over="ignore"):
        return _mix_array(prefix_hashes[:, None] + salt[None, :])


def index_words(prefix_hashes: np.ndarray, layer_idx: int) -> np.ndarray:
    """The eight index-K bytes that the fake model keeps per logical id: uint64 [n] -> uint64 [n]."""
    with np.errstate(over="ignore"):
        return _mix_array(prefix_hashes + np.uint64(mix(0xC0FFEE + layer_idx)))


@dataclass(slots=True)
class History:
    """A prompt with its greedy continuation, grown on demand; token i has prefix hash i."""

    prompt: tuple[int, ...]
    vocab_size: int
    tokens: list[int] = field(default_factory=list)
    _hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    _num_hashed: int = 0

    def ensure(self, num_tokens: int) -> None:
        """Extend tokens and hashes so that positions 0..num_tokens-1 exist."""
        if num_tokens <= self._num_hashed:
            return
        if num_tokens > len(self._hashes):
            grown = np.zeros(max(num_tokens, 2 * len(self._hashes), 256), dtype=np.uint64)
            grown[: self._num_hashed] = self._hashes[: self._num_hashed]
            self._hashes = grown
        state = int(self._hashes[self._num_hashed - 1]) if self._num_hashed else _SEED
        for position in range(self._num_hashed, num_tokens):
            if position < len(self.prompt):
                token = self.prompt[position]
            else:
                token = next_token(state, self.vocab_size)
            self.tokens.append(token)
            state = mix(state * _MULTIPLIER + token + 1)
            self._hashes[position] = state
        self._num_hashed = num_tokens

    def hashes(self, positions: np.ndarray) -> np.ndarray:
        """Prefix hashes, uint64 [n], of int positions [n]."""
        if positions.size:
            self.ensure(int(positions.max()) + 1)
        return self._hashes[positions]

    def token(self, position: int) -> int:
        """The token that belongs at a position of prompt + continuation."""
        self.ensure(position + 1)
        return self.tokens[position]

    def output(self, num_tokens: int) -> list[int]:
        """The first num_tokens generated tokens: what a correct engine returns."""
        self.ensure(len(self.prompt) + num_tokens)
        return self.tokens[len(self.prompt) : len(self.prompt) + num_tokens]


def next_token(prefix_hash: int, vocab_size: int) -> int:
    """The greedy token after a history; ids 0..9 are kept free for special tokens."""
    return 10 + mix(prefix_hash ^ 0x5851F42D4C957F2D) % (vocab_size - 10)


def select_positions(seed: int, position: int, top_k: int) -> np.ndarray:
    """Pretend-indexer: int32 [top_k] positions of 0..position in no order, -1 after the last valid one.

    Half of them recent, a quarter stable over eight steps (so that hot rows are hit again), the rest fresh draws (so
    that there are misses); the newest position is always among them, as a real indexer may choose it too.
    """
    length = position + 1
    selected = np.full(top_k, -1, dtype=np.int32)
    if length <= top_k:
        order = np.random.default_rng(mix(seed + position)).permutation(length)
        selected[:length] = order
        return selected
    recent = np.arange(length - top_k // 2, length)
    older = length - top_k // 2
    stable = np.random.default_rng(mix(seed + (position >> 3))).integers(0, older, top_k // 4)
    stable = np.unique(stable)
    fresh_rng = np.random.default_rng(mix(seed * 31 + position))
    rest = np.setdiff1d(np.arange(older), stable, assume_unique=True)
    fresh = fresh_rng.choice(rest, size=top_k - len(recent) - len(stable), replace=False)
    chosen = np.concatenate([recent, stable, fresh])
    selected[:] = fresh_rng.permutation(chosen)
    return selected
