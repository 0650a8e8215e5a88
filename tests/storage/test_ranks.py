"""Goal: ranks take the same steps although their storage answers at different times and with different luck.

Method: two ranks with a tree and a coordinator each, and loaders whose answers the test draws; MIN over both as on a real group.
After every iteration both must hold the same pages, in the same order of the free list.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang_hisparse.residency import DevicePages, ResidencyCoordinator, ResidencyLimits, ResidencyPolicy
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.storage import prefetch as prefetch_module
from sglang_hisparse.storage.counters import StorageCounters
from sglang_hisparse.storage.loader import Lookup, Read
from sglang_hisparse.storage.page_bytes import Moment
from sglang_hisparse.storage.prefetch import MIN_PAGES, Prefetches

P = 4
LOGICAL = 40


class Tree:
    """Prefixes as token tuples of whole pages; SGLang's names for what prefetches ask of it."""

    page_size = P

    def __init__(self, residency: ResidencyCoordinator) -> None:
        self.residency = residency
        self.pages: dict[tuple[int, ...], int] = {}
        self.token_to_kv_pool_allocator = SimpleNamespace(evict_to_free_tokens=self.evict)

    def match_prefix(self, params: Any) -> Any:
        tokens = tuple(params.key.token_ids)
        count = 0
        while count < len(tokens) // P and tokens[: (count + 1) * P] in self.pages:
            count += 1
        return SimpleNamespace(device_prefix_len=count * P, last_device_node=tokens[: count * P])

    def insert(self, params: Any) -> None:
        tokens, ids = tuple(params.key.token_ids), params.value.tolist()
        assert len(ids) == len(tokens)
        for count in range(1, len(tokens) // P + 1):
            prefix, page = tokens[: count * P], ids[(count - 1) * P] // P
            if (count - 1) * P < params.prev_prefix_len:
                assert self.pages[prefix] == page
            assert self.pages.setdefault(prefix, page) == page

    def ids_of(self, node: tuple[int, ...]) -> torch.Tensor:
        pages = [self.pages[node[: (count + 1) * P]] for count in range(len(node) // P)]
        return torch.tensor([page * P + row for page in pages for row in range(P)], dtype=torch.int64)

    def evictable_size(self) -> int:
        return len(self.pages) * P

    def lock(self, node: Any) -> Any:
        return node

    def unlock(self, lock: Any) -> None:
        pass

    def evict(self, tree: Tree, num_tokens: int) -> None:
        """Longest prefixes first, so that no hole is made."""
        for prefix in sorted(self.pages, key=lambda prefix: (-len(prefix), prefix)):
            if self.residency.book.num_free * P >= num_tokens:
                return
            self.residency.free([self.pages.pop(prefix)])


class LateLoader:
    """Finishes what it was given when the test says so, up to a page of its own choice."""

    def __init__(self) -> None:
        self.work: list[Lookup | Read] = []

    def submit(self, work: Lookup | Read) -> None:
        self.work.append(work)

    def progress(self, rng: random.Random) -> None:
        for work in [work for work in self.work if rng.random() < 0.5]:
            self.work.remove(work)
            if isinstance(work, Lookup):
                total = len(work.key) // P
                work.hashes = [str(page) for page in range(total)]
                work.count = rng.choice([0, total - work.start, rng.randint(0, total - work.start)])
            elif not work.stopped:
                work.loaded = rng.choice([len(work.pages), rng.randint(0, len(work.pages))])
            work.finished = True


class Rank:
    """One rank: everything of its own but the agreement."""

    def __init__(self, agree: Callable[[list[int]], list[int]]) -> None:
        limits = ResidencyLimits(
            num_logical_pages=LOGICAL,
            num_device_pages=8,
            num_slots=3,
            max_pages_per_slot=LOGICAL,
            hot_pages=2,
            page_size=P,
        )
        self.residency = ResidencyCoordinator(limits, ResidencyPolicy(), DevicePages(8), lambda transfers: [])
        self.tree = Tree(self.residency)
        self.loader = LateLoader()
        self.now = 0.0
        page_bytes = SimpleNamespace(launched=lambda: Moment(None), guard=threading.Lock())
        self.prefetches = Prefetches(
            self.tree,
            self.residency,
            self.loader,
            page_bytes,
            StorageCounters(),
            wait_seconds=1.0,
            agree=agree,
            note_loaded=lambda pages, hashes: None,
            clock=lambda: self.now,
        )

    def state(self) -> tuple[Any, ...]:
        return tuple(self.residency.book._free), sorted(self.tree.pages.items()), list(self.prefetches._active)


class Group:
    """MIN over ranks that meet in one call each."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=10)
        self._values: list[list[int]] = []
        self._lock = threading.Lock()

    def agree(self, values: list[int]) -> list[int]:
        with self._lock:
            self._values.append(values)
        self._barrier.wait()
        answer = [min(column) for column in zip(*self._values, strict=True)]
        if self._barrier.wait() == 0:
            self._values.clear()
        self._barrier.wait()
        return answer


@pytest.fixture(autouse=True)
def tree_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of a path come from the test's tree."""
    stand_in = SimpleNamespace(path_device_indices=lambda tree, node: tree.ids_of(node))
    monkeypatch.setattr(prefetch_module, "UnifiedRadixCache", stand_in)


def tokens_of(rng: random.Random) -> list[int]:
    """One of a few prompts, some of which begin alike."""
    family = rng.randrange(3)
    shared = [family] * P * rng.choice([0, MIN_PAGES, MIN_PAGES + 3])
    return shared + [10 + family * rng.randrange(2)] * P * rng.randint(MIN_PAGES, 12)


def live(seed: int, num_ranks: int, iterations: int = 60) -> tuple[list[Rank], int]:
    """Random requests, aborts and waits, the same on all ranks; loaders and clocks of their own. Returns pages loaded."""
    group = Group(num_ranks)
    ranks = [Rank(group.agree) for _ in range(num_ranks)]
    rng, own = random.Random(seed), [random.Random(f"{seed}/{rank}") for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        for step in range(iterations):
            tokens, aborted, asked = (
                tokens_of(rng),
                rng.randrange(step + 1),
                [rng.randrange(step + 1) for _ in range(3)],
            )
            starts, gives_up, evicts = rng.random() < 0.4, rng.random() < 0.1, rng.random() < 0.1
            for rank, luck in zip(ranks, own, strict=True):
                prefetches = rank.prefetches
                if starts:
                    matched = rank.tree.match_prefix(
                        SimpleNamespace(key=SimpleNamespace(token_ids=tokens))
                    ).device_prefix_len
                    prefetches.request(step, tokens, matched, (None, None))
                if gives_up:
                    prefetches.cancel(aborted)
                if evicts:
                    rank.tree.evict(rank.tree, LOGICAL * P // 2)
                for handle in asked:
                    if prefetches.is_over(handle):
                        prefetches.take_loaded(handle)
                rank.now += luck.random() * 0.3
                rank.loader.progress(luck)
            for done in [pool.submit(rank.prefetches.tick) for rank in ranks]:
                done.result()
            for rank in ranks:
                assert rank.state() == ranks[0].state()
                check(rank.residency)
                held = rank.residency.book.num_free + len(rank.tree.pages) + rank.prefetches.loading_pages
                assert held == LOGICAL, "a logical page belongs to nobody"
    return ranks, ranks[0].prefetches._counters.read()["storage_pages_loaded"]


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_ranks_stay_equal(seed: int) -> None:
    """Goal: one order of pages on all ranks, no page lost. Method: random lives of two ranks."""
    live(seed, 2)


def test_something_was_loaded_by_all() -> None:
    """Goal: the test above tests loads. Method: pages loaded in a few lives, alone and on three ranks."""
    assert sum(live(seed, 1)[1] for seed in range(5)) > 50
    assert sum(live(seed, 3)[1] for seed in range(5)) > 20


def test_ranks_that_do_not_agree_part_ways() -> None:
    """Goal: the check bites. Method: two ranks that each go by their own figures."""
    with pytest.raises(AssertionError):
        for seed in range(20):
            ranks = [Rank(lambda values: values) for _ in range(2)]
            rng, own = random.Random(seed), [random.Random(f"{seed}/{rank}") for rank in range(2)]
            for step in range(40):
                tokens = tokens_of(rng)
                for rank, luck in zip(ranks, own, strict=True):
                    rank.prefetches.request(step, tokens, 0, (None, None))
                    rank.loader.progress(luck)
                    rank.prefetches.tick()
                assert ranks[0].state() == ranks[1].state()
