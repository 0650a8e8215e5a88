"""Replacement policies over a stream of selections: the yardsticks of the resolver's own, and the resolver itself.

Called by comparison.py and by tests. Each policy is a cache of one request's rows; nothing here copies a row or knows
pages. Set semantics, as the resolver has them: a step's hits are found first, victims are never rows that the step
references, and every missed row is stored. Only `Turnover` shares code with the resolver: it is that of the CPU library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sglang_hisparse.replay.profiles import TopKStream

NEVER = np.iinfo(np.int32).max  #: next use of a position that is not used again


class Policy(Protocol):
    """One hot buffer."""

    def access(self, positions: np.ndarray, scores: np.ndarray | None = None) -> int:
        """One step: positions [n], distinct, n <= buffer; scores float [>= max position + 1], the indexer's own of this
        step. Returns how many positions were not held; they are held now."""


class SlotCache:
    """`buffer_size` slots with the position that each holds. A subclass says which slots a step's misses take over."""

    def __init__(self, buffer_size: int) -> None:
        self.buffer_size = buffer_size
        self._slot_of = np.full(0, -1, dtype=np.int32)  # by position; -1: not held
        self._position = np.full(buffer_size, -1, dtype=np.int64)
        self._filled = 0

    def access(self, positions: np.ndarray, scores: np.ndarray | None = None) -> int:
        self._make_room(int(positions.max()) + 1)
        slots = self._slot_of[positions]
        missing = np.flatnonzero(slots < 0)
        if missing.size:
            fresh = np.arange(self._filled, min(self.buffer_size, self._filled + missing.size))
            self._filled += fresh.size
            taken = fresh
            if fresh.size < missing.size:
                free = np.ones(self.buffer_size, dtype=bool)
                free[slots[slots >= 0]] = False
                free[fresh] = False
                victims = self._victims(np.flatnonzero(free), missing.size - fresh.size, scores)
                self._slot_of[self._position[victims]] = -1
                taken = np.concatenate([fresh, victims])
            self._position[taken] = positions[missing]
            self._slot_of[positions[missing]] = slots[missing] = taken
        is_new = np.zeros(positions.size, dtype=bool)
        is_new[missing] = True
        self._used(slots, is_new)
        return missing.size

    def _make_room(self, num_positions: int) -> None:
        if num_positions > self._slot_of.size:
            more = np.full(num_positions + 1024 - self._slot_of.size, -1, dtype=np.int32)
            self._slot_of = np.concatenate([self._slot_of, more])

    def _victims(self, candidates: np.ndarray, count: int, scores: np.ndarray | None) -> np.ndarray:
        """`count` of the slots `candidates`, which are ascending and none of this step."""
        raise NotImplementedError

    def _used(self, slots: np.ndarray, is_new: np.ndarray) -> None:
        """The step's slots, in the order of its positions; is_new: filled in this step."""


class _KeyedCache(SlotCache):
    """The slots with the smallest keys leave."""

    def __init__(self, buffer_size: int) -> None:
        super().__init__(buffer_size)
        self._key = np.zeros(buffer_size, dtype=np.int64)
        self._clock = 0

    def _victims(self, candidates: np.ndarray, count: int, scores: np.ndarray | None) -> np.ndarray:
        return candidates[_smallest(self._key[candidates], count)]


class LruCache(_KeyedCache):
    """Exact LRU. Rows of one step are ordered as the step gives them, the first as used last."""

    def _used(self, slots: np.ndarray, is_new: np.ndarray) -> None:
        self._clock += slots.size
        self._key[slots] = self._clock - np.arange(slots.size)


class FifoCache(_KeyedCache):
    """The row that came first leaves first, used or not."""

    def _used(self, slots: np.ndarray, is_new: np.ndarray) -> None:
        new = slots[is_new]
        self._key[new] = self._clock + np.arange(new.size)
        self._clock += new.size


class RandomCache(SlotCache):
    """Any row that the step does not reference."""

    def __init__(self, buffer_size: int, seed: int = 0) -> None:
        super().__init__(buffer_size)
        self._rng = np.random.default_rng(seed)

    def _victims(self, candidates: np.ndarray, count: int, scores: np.ndarray | None) -> np.ndarray:
        return self._rng.choice(candidates, count, replace=False, shuffle=False)


class ClockCache(SlotCache):
    """One bit a slot, set by a hit and cleared by the hand; a fetched row begins without it."""

    def __init__(self, buffer_size: int) -> None:
        super().__init__(buffer_size)
        self._bit = np.zeros(buffer_size, dtype=bool)
        self._hand = 0

    def _victims(self, candidates: np.ndarray, count: int, scores: np.ndarray | None) -> np.ndarray:
        start = int(np.searchsorted(candidates, self._hand))
        order = np.concatenate([candidates[start:], candidates[:start]])
        spared = self._bit[order]
        first_round = order[~spared]
        if first_round.size >= count:
            victims = first_round[:count]
            passed = order[: int(np.flatnonzero(order == victims[-1])[0])]
            self._bit[passed] = False
        else:
            victims = np.concatenate([first_round, order[spared][: count - first_round.size]])
            self._bit[order] = False
        self._hand = (int(victims[-1]) + 1) % self.buffer_size
        return victims

    def _used(self, slots: np.ndarray, is_new: np.ndarray) -> None:
        self._bit[slots] = ~is_new


class BeladyCache(_KeyedCache):
    """The row that is needed again last leaves: what no policy without knowledge of the future can beat.

    next_uses: for each step in turn, the step [n] at which each of its positions is selected again (NEVER: it is not).
    """

    def __init__(self, buffer_size: int, next_uses: Sequence[np.ndarray]) -> None:
        super().__init__(buffer_size)
        self._next_uses = next_uses
        self._step = 0

    def _used(self, slots: np.ndarray, is_new: np.ndarray) -> None:
        self._key[slots] = -self._next_uses[self._step].astype(np.int64)
        self._step += 1


class IndexScoreCache(SlotCache):
    """The row with the lowest score of this very step leaves: what the resolver does with scores, in a few lines of numpy."""

    def _victims(self, candidates: np.ndarray, count: int, scores: np.ndarray | None) -> np.ndarray:
        if scores is None:
            raise ValueError("index_score needs a stream that gives the indexer's scores")
        return candidates[_smallest(scores[self._position[candidates]], count)]


class NearMissCache(IndexScoreCache):
    """As IndexScoreCache; then the `ahead` best positions that the step did not select are fetched too, while the link rests.

    fetched_ahead: rows fetched so, since start. A model: the kernels do not do it (scripts/results/README.md says why).
    """

    def __init__(self, buffer_size: int, ahead: int) -> None:
        super().__init__(buffer_size)
        self._ahead = ahead
        self.fetched_ahead = 0

    def access(self, positions: np.ndarray, scores: np.ndarray | None = None) -> int:
        misses = super().access(positions, scores)
        self._make_room(scores.size)
        others = scores.copy()
        others[positions] = -np.inf
        near = np.argpartition(others, scores.size - self._ahead)[scores.size - self._ahead :]
        self.fetched_ahead += super().access(np.concatenate([positions, near]), scores)
        return misses


class Turnover:
    """The resolver's own replacement: a step is one call of it, for a request that is on the host only; nothing is copied.

    device: "cpu", or "cuda" for the GPU's kernel. by_score: as with `eviction: index_score`, so that steps need scores.
    """

    PAGE = 64

    def __init__(self, buffer_size: int, device: str = "cpu", *, by_score: bool = False) -> None:
        import torch

        from sglang_hisparse.kernels.resolver import HotGroupState

        if buffer_size % self.PAGE:
            raise ValueError(f"a hot buffer of {buffer_size} rows is no multiple of {self.PAGE}")
        self._device, self._by_score = device, by_score
        self._state = HotGroupState.allocate(1, buffer_size, device, evicts_by_score=by_score)
        self._lease = torch.arange(1, buffer_size // self.PAGE + 1, dtype=torch.int32, device=device)[None]
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._bases = torch.zeros(1, dtype=torch.int64, device=device)
        self._grow(1)

    def _grow(self, num_pages: int) -> None:
        import torch

        self._pages = torch.arange(1, num_pages + 1, dtype=torch.int32, device=self._device)[None]
        self._page_table = torch.zeros(num_pages + 1, dtype=torch.int32, device=self._device)

    def access(self, positions: np.ndarray, scores: np.ndarray | None = None) -> int:
        import torch

        from sglang_hisparse.kernels.hot_state import COUNTER_NAMES, FIRST_COUNTER
        from sglang_hisparse.kernels.resolver import CopyMethod, resolve

        if self._by_score and scores is None:
            raise ValueError("index_score needs a stream that gives the indexer's scores")
        end = int(positions.max()) + 1
        if end > self._pages.shape[1] * self.PAGE:
            self._grow(end // self.PAGE + 64)
        counters = self._state.header[0, FIRST_COUNTER : FIRST_COUNTER + len(COUNTER_NAMES)]
        before = counters.tolist()
        resolve(
            top_k=torch.from_numpy(positions[None].astype(np.int32)).to(self._device),
            page_rows=self._pages,
            seq_lens=torch.tensor([scores.size if self._by_score else end], device=self._device),
            req_slots=self._slot,
            num_real_rows=self._one,
            page_table=self._page_table,
            hot_pages=self._lease,
            group=self._state,
            host_bases=self._bases,
            device_bases=self._bases,
            row_bytes=16,
            page_size=self.PAGE,
            out=torch.empty((1, positions.size), dtype=torch.int32, device=self._device),
            copy_method=CopyMethod.NONE,
            scores=torch.from_numpy(scores[None]).to(self._device, torch.float32) if self._by_score else None,
        )
        grown = dict(
            zip(COUNTER_NAMES, (now - then for now, then in zip(counters.tolist(), before, strict=True)), strict=True)
        )
        if grown["entries_failed"] or grown["entries_resident"]:
            raise AssertionError(f"the resolver found something else than a request on the host only: {grown}")
        return grown["rows_fetched"]


def next_uses(steps: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each step's positions, the next step that selects them again, int32; NEVER where none does."""
    seen = np.full(max((int(step.max()) for step in steps), default=0) + 1, NEVER, dtype=np.int32)
    result = []
    for number in range(len(steps) - 1, -1, -1):
        result.append(seen[steps[number]])
        seen[steps[number]] = number
    return result[::-1]


def lru_miss_rate(stream: TopKStream, *, buffer_size: int, steps: int, warm_up: int) -> float:
    """Share of selected positions that exact LRU does not hold, over `steps` steps after `warm_up`."""
    cache = LruCache(buffer_size)
    missed = selected = 0
    for step in range(warm_up + steps):
        stream.append()
        positions = stream.select()
        count = cache.access(positions)
        if step >= warm_up:
            missed += count
            selected += positions.size
    return missed / selected


def _smallest(keys: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` smallest keys."""
    return np.arange(keys.size) if count >= keys.size else np.argpartition(keys, count)[:count]
