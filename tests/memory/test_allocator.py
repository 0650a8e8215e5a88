"""Goal: SGLang gets right ids from us, in two ledgers. Method: its own allocation functions on tiny CPU pools."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runtime_world import PAGE, Client, Sizes, World, make_world, published
from sglang.srt.mem_cache.allocator.hisparse import HiSparseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.memory.allocator import HiSparseAllocator
from sglang_hisparse.residency import Owner, PageState


@dataclass(slots=True)
class Reference:
    """What ids must be, known from positions alone: a page keeps its place, and no page serves two private rows."""

    pages: dict[Any, list[int]] = field(default_factory=dict)

    def take(self, client: Client, start: int, ids: list[int]) -> None:
        """Check the ids of positions start, start + 1, ... of one request."""
        row = self.pages.setdefault(client, [])
        for position, number in enumerate(ids, start):
            if position // PAGE == len(row):
                assert number % PAGE == position % PAGE == 0, "a new page is begun in its middle"
                taken = {page for other in self.pages.values() for page in other}
                assert number // PAGE not in taken and number >= PAGE
                row.append(number // PAGE)
            assert number == row[position // PAGE] * PAGE + position % PAGE

    def drop(self, client: Client) -> None:
        del self.pages[client]


def snapshot(world: World) -> tuple:
    """Everything that a query could change by mistake."""
    book, pages, residency = world.book, world.allocator.device_pages, world.residency
    arrays = [
        getattr(book, name) for name in ("state", "device_page", "users", "holds", "slot_pages", "num_pages", "leased")
    ]
    return (
        [array.tobytes() for array in (*arrays, pages.owner, pages.owner_id)],
        (list(book._free), list(pages._free), dict(residency.hot_lease), list(residency._table_changes)),
        (residency.counters.pages_mirrored, residency.counters.refusals, world.tree.evictable_size()),
    )


def test_constructor_is_the_built_ins() -> None:
    """Goal: SGLang can construct ours as its own. Method: compare parameter names and order."""
    import inspect

    ours = list(inspect.signature(HiSparseAllocator.__init__).parameters)
    assert ours == list(inspect.signature(HiSparseTokenToKVPoolAllocator.__init__).parameters)
    assert issubclass(HiSparseAllocator, HiSparseTokenToKVPoolAllocator)


@pytest.mark.parametrize("seed", range(3))
def test_ids_equal_a_plain_reference(seed: int) -> None:
    """Goal: each token gets the id of its place. Method: random starts, chunks, decodes and ends against a reference."""
    rng, reference = np.random.default_rng(seed), Reference()
    with make_world(Sizes(slots=5), radix=False) as world:
        live: list[Client] = []
        for _ in range(60):
            if len(live) < 4 and rng.random() < 0.5:
                client = world.client(world.prompt(int(rng.integers(1, 260)), int(rng.integers(1 << 30))))
                while client.req.extend_end is None or client.req.prefix_len < len(client.req.origin_input_ids):
                    start = client.req.prefix_len
                    reference.take(client, start, world.extend(client, tokens=PAGE * int(rng.integers(1, 4))).tolist())
                    world.publish(client)
                live.append(client)
            elif live and rng.random() < 0.2:
                client = live.pop(int(rng.integers(len(live))))
                world.finish(client)
                reference.drop(client)
            elif live:
                for client, number in zip(live, world.decode(*live).tolist(), strict=True):
                    reference.take(client, client.length - 1, [number])
            for client in live:
                assert [number // PAGE for number in world.row_of(client)[::PAGE]] == reference.pages[client]
                assert world.pages(client) == reference.pages[client]
        assert world.allocator.num_slow_frees == 0


def test_ids_follow_from_the_calls_alone() -> None:
    """Goal: all ranks hand out equal ids (R2). Method: the same calls in two worlds whose copies complete differently."""
    rows = []
    for settles in (False, True):
        with make_world() as world:
            clients = [world.start(length, seed=length) for length in (300, 500, 70)]
            world.decode(*clients)
            world.finish(clients.pop(1))
            if settles:
                world.settle()
            world.tree.evict(EvictParams(num_tokens=4 * PAGE))
            clients.append(world.start(200, seed=9))
            rows.append([world.row_of(client) for client in clients])
    assert rows[0] == rows[1]


def test_a_partial_page_is_continued() -> None:
    """Goal: a chunk and a decode go on inside a half-filled page. Method: chunks of 100 tokens, then one token."""
    with make_world(radix=False) as world:
        client = world.client(world.prompt(230))
        first = world.extend(client, tokens=100).tolist()
        world.publish(client)
        second = world.extend(client, tokens=100).tolist()
        assert second[:28] == [first[-1] + 1 + i for i in range(28)]
        world.publish(client)
        world.extend(client)
        world.publish(client)
        free = world.num_free_logical
        assert world.decode(client).tolist() == [world.pages(client)[3] * PAGE + 230 % PAGE]
        assert world.num_free_logical == free, "a token inside a page needs no page"


@pytest.mark.parametrize("short", ["logical", "device"])
def test_exhaustion_is_all_or_nothing(short: str) -> None:
    """Goal: what does not fit takes nothing. Method: two requests of which the first alone would fit; then only it."""
    sizes = Sizes(device_pages=20, ratio=1.0) if short == "logical" else Sizes(device_pages=10)
    with make_world(sizes, radix=False) as world:
        allocator, runtime = world.allocator, world.runtime
        for slot in (1, 2):
            world.residency.attach(slot, [], prompt_pages=20, final_pages=20)
        before = snapshot(world)

        def extend(slots: list[int], lengths: list[int]) -> torch.Tensor | None:
            runtime.extends.slots = slots
            starts, ends = torch.zeros(len(slots), dtype=torch.int64), torch.tensor(lengths)
            return allocator.alloc_extend(starts, starts, ends, ends, torch.full((len(slots),), -1), sum(lengths))

        assert extend([1, 2], [8 * PAGE, 13 * PAGE]) is None
        after = snapshot(world)
        assert after[:2] == before[:2], "a refusal may be counted, and change nothing else"
        assert extend([1], [8 * PAGE]).tolist() == list(range(PAGE, 9 * PAGE))
        runtime.decode_steps.slots = np.array([1])
        assert allocator.alloc_decode(torch.tensor([8 * PAGE + 1]), torch.tensor([8 * PAGE + 1]), None).tolist() == [
            9 * PAGE
        ]


def test_decode_ids_are_those_of_the_books(world: World) -> None:
    """Goal: a token's id is its page's, whether it was looked up or follows the id before it. Method: three requests that
    fill their pages at different steps, for more than two pages; each row against the book."""
    clients = [world.start(length, seed=length) for length in (2 * PAGE - 3, PAGE + 1, 3 * PAGE)]
    for _ in range(2 * PAGE + 5):
        world.decode(*clients)
        for client in clients:
            row = world.row_of(client)
            assert row == world.allocator.row_ids(client.slot)[: len(row)].tolist()
    assert [world.wrong_rows(client) for client in clients] == [0, 0, 0]


def test_three_ways_to_free(world: World) -> None:
    """Goal: segments, row ranges and plain ids all give back ids and device pages. Method: one request cut in four."""
    client = world.client(world.prompt(6 * PAGE + 10))
    world.extend(client)
    row, pages = torch.tensor(world.row_of(client)), world.pages(client)
    residency, allocator = world.residency, world.allocator

    def freed() -> list[int]:
        return [page for page in pages if world.book.state[page] == PageState.FREE]

    assert residency.unmap(client.slot, 0, 3) == pages[:3]
    allocator.free_segment(row[: 2 * PAGE], start_pos=0)
    assert freed() == pages[:2]
    allocator.free(row[2 * PAGE : 3 * PAGE])
    assert freed() == pages[:3]
    world.tree.free_kv_row(client.req.kv, [(3 * PAGE, 4 * PAGE), (4 * PAGE, 6 * PAGE + 10)])
    assert freed() == pages
    assert (world.num_free_logical, world.num_free_device) == (96, 24) and allocator.num_slow_frees == 0
    allocator.free_segment(row[:0], start_pos=0)
    allocator.free(row[:0])
    with pytest.raises(InvariantError, match="freed twice"):
        allocator.free_segment(row[:PAGE], start_pos=0)
    world.runtime.release_slots([client.slot])


def test_a_range_that_starts_inside_a_page_is_refused(world: World) -> None:
    """Goal: a page with rows in use cannot be freed by its second half. Method: free from position 70."""
    client = world.client(world.prompt(3 * PAGE))
    world.extend(client)
    with pytest.raises(InvariantError, match="middle of a page"):
        world.tree.free_kv_row(client.req.kv, [(70, 3 * PAGE)])
    assert len(world.pages(client)) == 3


def test_deferred_frees_come_at_the_end(world: World) -> None:
    """Goal: pages freed while a row still uses them end after it has let go. Method: free inside the block, look, leave."""
    client = world.client(world.prompt(2 * PAGE))
    world.extend(client)
    pages, row = world.pages(client), torch.tensor(world.row_of(client))
    with world.allocator.deferred_frees() as freed:
        world.allocator.free_segment(row, start_pos=0)
        assert freed == pages and world.book.state[pages[0]] != PageState.FREE
        world.residency.unmap(client.slot, 0, 2)
    assert all(world.book.state[page] == PageState.FREE for page in pages)
    world.runtime.release_slots([client.slot])


def test_two_ledgers(world: World) -> None:
    """Goal: available_size is logical, device pages are counted apart (R14). Method: figures before and after a prefill."""
    allocator = world.allocator
    ledgers = (allocator.logical_attn_allocator, allocator.hisparse_attn_allocator)
    assert (allocator.size, allocator.size_full, allocator.device_tokens) == (96 * PAGE, 96 * PAGE, 24 * PAGE)
    assert [ledger.available_size() for ledger in ledgers] == [96 * PAGE, 24 * PAGE]
    client = world.start(700)
    assert allocator.available_size() == (96 - 11) * PAGE
    assert [ledger.available_size() for ledger in ledgers] == [(96 - 11) * PAGE, (24 - 11) * PAGE]
    world.go_mixed(client)
    assert allocator.available_size() == (96 - 11) * PAGE
    stats = world.runtime.get_token_stats()
    assert stats == type(stats)(
        (24 - world.num_free_device) * PAGE, (24 - world.num_free_device) / 24, 11 * PAGE, 11 / 96
    )


def test_device_shortage_spills_and_leaves_the_tree(world: World) -> None:
    """Goal: device pages are made by spilling, never by evicting (R15). Method: cached pages fill the device, then decode."""
    client = world.start(3 * PAGE, seed=1)
    for seed in (2, 3):
        world.finish(world.start(10 * PAGE, seed=seed))
    assert world.num_free_device == 1
    cached = world.tree.evictable_size()
    assert world.allocator.check_decode_capacity(num_tokens=5 * PAGE, tree_cache=world.tree)
    assert world.num_free_device >= 5 and world.tree.evictable_size() == cached
    world.settle()
    world.decode(client)
    assert world.residency.counters.pages_spilled >= 4 and world.wrong_rows(client) == 0


def test_only_logical_shortage_evicts_the_tree() -> None:
    """Goal: the tree gives up ids when ids run out. Method: a logical pool full of cached pages."""
    with make_world(Sizes(device_pages=24, ratio=1.0)) as world:
        world.finish(world.start(20 * PAGE))
        assert world.num_free_logical == 4
        assert world.allocator.check_decode_capacity(num_tokens=6 * PAGE, tree_cache=world.tree)
        assert world.num_free_logical >= 6 and world.tree.evictable_size() < 20 * PAGE


def test_decode_capacity_is_refused_only_when_nothing_can_leave() -> None:
    """Goal: False means retract, so it comes last. Method: a device full of a request that is being prefilled."""
    with make_world(Sizes(device_pages=8)) as world:
        client = world.client(world.prompt(7 * PAGE))
        world.extend(client, tokens=6 * PAGE)
        assert world.allocator.check_decode_capacity(num_tokens=2 * PAGE, tree_cache=world.tree)
        assert not world.allocator.check_decode_capacity(num_tokens=3 * PAGE, tree_cache=world.tree)
        world.publish(client)
        world.extend(client)
        world.publish(client)  # decoding now: all but its tail may leave, under a hot lease
        world.settle()
        assert world.allocator.check_decode_capacity(num_tokens=3 * PAGE, tree_cache=world.tree)
        assert world.book.leased[client.slot] and world.allocator.device_pages.count(Owner.HOT) == 2
        assert not world.allocator.check_decode_capacity(num_tokens=5 * PAGE, tree_cache=world.tree)


def test_queries_are_pure(world: World) -> None:
    """Goal: asking changes nothing (R17): a pass may be dropped. Method: every query in a world with mixed requests."""
    client = world.start(900)
    world.go_mixed(client)
    world.finish(world.start(200, seed=4))
    before, allocator = snapshot(world), world.allocator
    for _ in range(2):
        allocator.available_size()
        allocator.request_slot_reserve(has_req_pool_slot=False, prefill_tokens=900)
        allocator.max_request_tokens()
        allocator.max_new_tokens_for_memory(500, 4000, token_capacity=9999, sliding_window_size=None, chunk_size=256)
        assert allocator.verify_byte_accounting() == [] and allocator.get_all_free_pages() is None
        world.runtime.committed_device_pages()
        budget = allocator.create_prefill_budget(world.tree, num_mixed_decode_tokens=0)
        budget.has_capacity()
        for tokens in (100, 10**6):
            asked = {"extend_input_len": tokens, "max_new_tokens": 64, "chunk_limit": 256}
            budget.check_prefill(total_tokens=tokens, input_tokens=tokens, swa_host_hit_length=0, **asked)
            budget.can_allocate_prefill(paged_input=tokens, **asked)
            budget.available_chunk_tokens(256)
            budget.fit_chunk(**asked)
    assert snapshot(world) == before


def test_what_is_not_supported_says_so(world: World) -> None:
    """Goal: no path of SGLang gets ids that nobody keeps account of. Method: each call that belongs to other features."""
    for call in (
        lambda: world.allocator.alloc(PAGE),
        lambda: world.allocator.alloc_logical_only(None),
        lambda: world.allocator.resize(SimpleNamespace(max_total_num_tokens=640)),
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_before_the_runtime_exists() -> None:
    """Goal: SGLang may clear and count before it has built the coordinator (R29). Method: an allocator alone."""
    with published():
        bound: list[torch.Tensor] = []
        pool = SimpleNamespace(bind_page_table=bound.append, border=())
        allocator = HiSparseAllocator(10 * PAGE + 7, PAGE, torch.bfloat16, "cpu", pool, False, 2.5)
        allocator.clear()
        assert allocator.verify_byte_accounting() == [] and allocator.available_size() == allocator.size
        assert (allocator.size, allocator.device_tokens) == (25 * PAGE, 10 * PAGE)
        assert bound[0] is allocator.page_table and bound[0].shape == (26,) and not bound[0].any()
