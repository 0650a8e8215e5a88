"""The memory behind a pool whose border between KV and index-K moves: ranges, chunks, and when they are moved.

`ElasticMemory` owns the address ranges of one pool and moves chunks from the top of every layer's KV behind index-K, or back; it is the
`Mover` of residency/border.py, which decides. `ElasticBorder` is what the runtime, the prefill budget and the allocator see of
both. Neither waits for the device. Where the driver refuses a call the border stays for good: the device pages of that move are
lost, and nothing else happens.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hisparse.elastic_layout import ElasticShape
from sglang_hisparse.errors import HiSparseError
from sglang_hisparse.memory.virtual_memory import Driver, HostTwin, Range, VirtualMemory
from sglang_hisparse.residency import Border, Progress

if TYPE_CHECKING:
    from sglang_hisparse.runtime import HiSparseRuntime

logger = logging.getLogger(__name__)

CALLS_PER_TICK = 128
"""Chunks unmapped or mapped in one iteration of the scheduler; on an H200 either takes 30 to 60 us. Enough that a step of DeepSeek-V3.2
(61 layers, all leaders) takes one iteration, in which a chunk of 8,192 tokens uses half of what the step gives."""


def memory_of(device: Any) -> VirtualMemory:
    """The driver of this GPU, or its twin for a CPU pool."""
    device = torch.device(device)
    if device.type == "cpu":
        return HostTwin()
    torch.zeros(1, device=device)  # makes the device's context current in this thread
    return Driver(torch.cuda.current_device() if device.index is None else device.index)


class ElasticMemory:
    """Ranges of every layer's KV and every leader's index-K. All of KV and index-K of as many pages have memory at start."""

    def __init__(self, memory: VirtualMemory, shape: ElasticShape) -> None:
        self.shape, self.steps = shape, shape.steps(memory.chunk_bytes)
        self._memory, size = memory, memory.chunk_bytes
        self._kv_places = -(-(shape.device_pages + 1) * shape.page_bytes // size)
        places = -(-(shape.logical_pages + 1) * shape.index_page_bytes // size)
        self._index_at_start = min(-(-(shape.device_pages + 1) * shape.index_page_bytes // size), places)
        num_moves = len(self.steps) - 1
        self._kv: list[Range] = []
        self._index: list[Range] = []
        try:
            for _ in range(shape.num_layers):
                self._kv.append(Range(memory, self._kv_places, max(1, self._kv_places - num_moves)))
                for place in range(self._kv[-1].num_fixed, self._kv_places):
                    self._kv[-1].put(place, memory.create(size))
            for _ in range(shape.num_leaders):
                self._index.append(Range(memory, places, self._index_at_start))
        except HiSparseError:
            self.close()
            raise
        self._tensors = [held.tensor() for held in self._index]
        self._rows = [held.tensor() for held in self._kv]
        for tensor in [*self._rows, *(t[: self._index_at_start * size] for t in self._tensors)]:
            tensor.zero_()
        self._takes: deque[tuple[Range, int]] = deque()  # (range, place) of the move under way
        self._puts: deque[tuple[Range, torch.Tensor, int]] = deque()  # the same, and the range's bytes
        self._spare: list[int] = []  # handles that are mapped nowhere
        self._has_failed = False
        self.has_vacated: Callable[[], bool] = lambda: True
        self.chunks_moved = 0
        self.seconds_moving = 0.0  # of the scheduler's thread

    # -- what the pool is made of -----------------------------------------------------------------------------------

    def kv(self) -> list[torch.Tensor]:
        """uint8 of each layer's device pages, pad page first; addresses never change."""
        return [tensor[: (self.shape.device_pages + 1) * self.shape.page_bytes] for tensor in self._rows]

    def index(self) -> list[torch.Tensor]:
        """uint8 of each leader's logical pages, pad page first; only the first of them have memory."""
        return [tensor[: (self.shape.logical_pages + 1) * self.shape.index_page_bytes] for tensor in self._tensors]

    # -- moves (residency.border.Mover) -----------------------------------------------------------------------------

    def begin(self, old: int, new: int) -> None:
        low, high = min(old, new), max(old, new)
        kv = [self._kv_places - 1 - step for step in range(low, high)]
        index = range(self._index_places(low), self._index_places(high))
        if old < new:
            self._takes.extend((held, place) for place in kv for held in self._kv)
            self._puts.extend((*pair, place) for place in index for pair in zip(self._index, self._tensors, strict=True))
        else:
            self._takes.extend((held, place) for place in reversed(index) for held in self._index)
            self._puts.extend((*pair, place) for place in reversed(kv) for pair in zip(self._kv, self._rows, strict=True))

    def _index_places(self, step: int) -> int:
        """Places of each leader's range that hold memory at that step."""
        grown = self._index_at_start + step * self.shape.num_layers // self.shape.num_leaders
        return min(grown, self._index[0].num_places)

    def progress(self) -> Progress:
        if not self.has_vacated():
            return Progress.BEGUN
        return Progress.VACATED if self._takes or self._puts or self._has_failed else Progress.MOVED

    def advance(self) -> None:
        """On the forward stream, since what is mapped is zeroed there."""
        if self._has_failed:
            return
        started = time.perf_counter()
        try:
            for _ in range(CALLS_PER_TICK):
                if not self._move_one():
                    return
        except HiSparseError as error:
            self._has_failed = True
            logger.error("HiSparse: the border between KV and index-K stays where it is from now on: %s", error)
        finally:
            self.seconds_moving += time.perf_counter() - started

    def _move_one(self) -> bool:
        """Unmap one chunk, or map one. False: the move is over."""
        if self._puts and self._spare:
            (held, tensor, place), size = self._puts[0], self._memory.chunk_bytes
            held.put(place, self._spare[-1])
            self._spare.pop()
            self._puts.popleft()
            # Neither is old KV read as index-K, nor the other way round.
            tensor[place * size : (place + 1) * size].zero_()
            self.chunks_moved += 1
            return True
        if self._takes:
            held, place = self._takes[0]
            self._spare.append(held.take(place))
            self._takes.popleft()
            return True
        return False

    def close(self) -> None:
        """Give everything back; no tensor of the pool may be used any more."""
        for held in (*self._kv, *self._index):
            held.close()
        for handle in getattr(self, "_spare", ()):
            self._memory.release(handle)
        self._kv, self._index, self._tensors, self._rows = [], [], [], []
        if isinstance(self._memory, HostTwin):
            self._memory.close()


def page_keys(token_ids: Sequence[int], page_size: int, salt: tuple[Any, ...]) -> Iterator[int]:
    """A key for each whole page of these tokens, of all tokens up to its end; other keys for another salt."""
    key, row = xxhash.xxh64_intdigest(repr(salt).encode()), np.asarray(token_ids, dtype=np.int64)
    for start in range(0, len(row) - page_size + 1, page_size):
        key = xxhash.xxh64_intdigest(row[start : start + page_size].tobytes(), seed=key)
        yield key


class CachedInTree:
    """SGLang's radix tree, as residency.border.CachedPrefixes: what no request holds a lock on."""

    def __init__(self, runtime: HiSparseRuntime) -> None:
        self._runtime = runtime

    def num_unused(self) -> int:
        tree = self._runtime.tree_cache
        return 0 if tree is None else tree.evictable_size() // self._runtime.page_size

    def give_up(self, num_pages: int) -> None:
        self._runtime.tree_cache.evict(EvictParams(num_tokens=num_pages * self._runtime.page_size))


class ElasticBorder:
    """The border of one server: None of it exists where `elastic_border` is off."""

    def __init__(self, runtime: HiSparseRuntime, memory: ElasticMemory) -> None:
        self._runtime, self.memory = runtime, memory
        memory.has_vacated = self._has_vacated
        self.border = Border(runtime.residency, runtime.make_room_as_promised, memory, cached=CachedInTree(runtime))
        self._has_deferred = False
        self._is_resting = False  # no forward since the last tick

    def _has_vacated(self) -> bool:
        """Nothing launched reads what leaves: forwards, and copies of index-K on their way to storage."""
        storage = self._runtime.storage
        return self._runtime.worker.has_vacated() and not (storage is not None and storage.reads_index_keys)

    def note_arrival(self, req: Any) -> None:
        """A request enters SGLang's queue; one that was retracted returns to nothing but its own pages."""
        if not (req.retracted_stain or self._runtime.tree_cache.disable):
            self.border.returns.note(page_keys(req.origin_input_ids, self._runtime.page_size, (req.extra_key, req.cache_salt)))

    def bind_agreement(self, agree: Callable[[int], int]) -> None:
        """Several ranks schedule together: the least of a number over them."""
        self.border._agree = agree

    def want(self, num_pages: int) -> None:
        """Somebody is about to take so many logical pages."""
        self.border.want(num_pages)

    def defers(self, num_pages: int) -> bool:
        """See Border.defers."""
        deferred = self.border.defers(num_pages)
        self._has_deferred |= deferred
        return deferred

    def decode_waits(self, batch: Any) -> bool:
        """Whether no decode step runs in this iteration: the requests of SGLang's batch lack logical pages even with the whole
        cache evicted, so that one would be retracted, and memory can move instead."""
        book, page_size = self._runtime.residency.book, self._runtime.page_size
        if book.num_free >= len(batch.reqs):  # each takes a page at most
            return False
        batch.filter_batch()  # requests that have ended while the step waited need nothing
        if batch.is_empty():
            return False
        needed = -(-batch.new_tokens_required_next_decode() // page_size)
        return needed > book.num_free + self._runtime.tree_cache.evictable_size() // page_size and self.defers(needed)

    def take_news(self) -> bool:
        """Whether a request has been put off for the border since this was last asked: it asks again."""
        had, self._has_deferred = self._has_deferred, False
        return had

    def tick(self) -> None:
        """Before each batch is chosen, on all ranks alike, also while the server idles: go on with a move."""
        was_resting, self._is_resting = self._is_resting, True
        if not (was_resting or self.border.is_moving):
            return
        stream = self._runtime.worker.forward_stream
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            self._follow()
            if was_resting:
                self._look_while_idle()

    def _follow(self) -> None:
        before = self.memory.seconds_moving
        self.border.follow()
        if self._runtime.gate is not None and self.memory.seconds_moving != before:
            self._runtime.gate.note_pause()

    def _look_while_idle(self) -> None:
        """No forward may come for long, and a request may wait for the border: the plan that vacates pages is executed here."""
        runtime, before = self._runtime, self.border.begun
        # What the audit still has to write or read of pages comes before their memory leaves.
        runtime.audit.before_plan()
        self.border.rest()
        if self.border.begun != before:
            plan = runtime.residency.take_plan()
            runtime.worker.apply(plan)
            runtime.audit.after_plan(plan)

    def before_plan(self) -> None:
        """A forward comes, on whose stream this is called: begin a move with its plan."""
        self._is_resting = False
        self.border.look()

    def counters(self) -> dict[str, int]:
        """Counts since start."""
        return {
            "border_steps": self.border.ended,
            "border_steps_left": len(self.border.steps) - 1 - self.border.ended,
            "border_chunks_moved": self.memory.chunks_moved,
            "border_returns": self.border.num_returns,
            "prefixes_return_rarely": int(self.border.returns.are_rare),
        }
