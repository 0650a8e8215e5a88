"""Goal: a pool whose border moves holds every row and every index key, and never hands out what has no memory.

Method: real pools, allocator, radix tree and runtime; on the CPU the twin's virtual memory makes any touch of a place without
memory a segmentation fault, on a GPU it is an illegal address.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runtime_world import PAGE, Client, Sizes, World, make_world

from sglang_hisparse.elastic_layout import CHUNK_BYTES
from sglang_hisparse.memory import elastic, pool
from sglang_hisparse.memory.virtual_memory import HostTwin
from sglang_hisparse.residency import Owner
from sglang_hisparse.residency.border import MAX_DEFERRALS
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.stats import FetchedBytes, gather

# Chunks are larger on a GPU. The border of these stands at (400, 495), (397, 991), (368, 1200).
GPU_SIZES = Sizes(device_pages=400, ratio=3.0, context_pages=600)


@pytest.fixture(params=["cpu", "cpu-large", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """24 device pages at start, 96 logical pages at the end; on a GPU larger, for its chunks are. cpu-large: the twin with
    the chunks and sizes of a GPU, and a stream that has never passed a plan when it is asked for the first time."""
    sizes, device = Sizes() if request.param == "cpu" else GPU_SIZES, request.param.partition("-")[0]
    if request.param == "cpu-large":
        monkeypatch.setattr(pool, "memory_of", lambda device: HostTwin(CHUNK_BYTES))
    with make_world(sizes, device=device, elastic_border=True) as world:
        if request.param == "cpu-large":
            world.pool.elastic.has_vacated = lagging(world.pool.elastic.has_vacated)
        yield world
        if device == "cuda":
            torch.cuda.synchronize()


def lagging(has_vacated: Callable[[], bool]) -> Callable[[], bool]:
    """No to every other question."""
    asked = itertools.count()
    return lambda: bool(next(asked) % 2) and has_vacated()


def border(world: World) -> elastic.ElasticBorder:
    assert world.runtime.border is not None
    return world.runtime.border


def mark_keys(world: World, client: Client) -> None:
    """Index-K of the request's pages, as the indexer would write it: each page full of its own number."""
    pages = torch.tensor(world.pages(client), device=world.device)
    for keys in world.pool.index_k_with_scale_buffer:
        if len(keys):
            keys[pages] = (pages % 251).to(torch.uint8)[:, None]


def wrong_keys(world: World, client: Client) -> int:
    pages = torch.tensor(world.pages(client), device=world.device)
    wanted = (pages % 251).to(torch.uint8)[:, None]
    return sum(int((keys[pages] != wanted).any()) for keys in world.pool.index_k_with_scale_buffer if len(keys))


def settle(world: World) -> None:
    """Moves under way end, as they do while a server idles."""
    for _ in range(200):
        world.settle()
        if world.device == "cuda":
            torch.cuda.synchronize()
        world.runtime.tick()
        if not border(world).border.is_moving:
            return
    raise AssertionError("the border does not come to rest")


def test_the_pools_at_start(world: World) -> None:
    """Goal: a server begins with plain SGLang's tokens. Method: sizes of both pools, and what SGLang is told."""
    steps = world.pool.border
    assert steps[0].device_pages == world.sizes.device_pages == world.num_free_device
    assert world.num_free_logical == steps[0].logical_pages >= world.sizes.device_pages
    assert world.allocator.size == int(world.sizes.device_pages * world.sizes.ratio) * PAGE
    assert world.allocator.available_size() + world.allocator.unbacked_tokens == world.allocator.size
    assert world.tree.protected_size() == world.allocator.unbacked_tokens > 0
    assert world.allocator.max_request_tokens() == (steps[-1].device_pages - 2) * PAGE
    sample = gather(world.runtime, FetchedBytes(world.runtime.hot))
    unbacked = steps[-1].logical_pages - steps[0].logical_pages
    assert (sample["pages"]["free"], sample["pages"]["unbacked"]) == (steps[0].logical_pages, unbacked)
    assert sample["border_steps"] == {"taken": 0, "left": len(steps) - 1} and sample["host_usage"] == {"": 0}
    assert world.runtime.get_token_stats().host_tokens == 0
    assert not any(keys[:1].any() for keys in world.pool.index_k_with_scale_buffer if len(keys))


def test_lives_across_the_whole_way(world: World) -> None:
    """Goal: nothing is lost while the border goes from one end to the other. Method: prompts come and stay in the cache until
    all logical pages are in use, one request decodes all the time; rows and index keys are compared after each step."""
    size = (world.pool.border[-1].device_pages // 4) * PAGE
    lasting = world.start(size, seed=1, max_new_tokens=4000)
    mark_keys(world, lasting)
    seen = set()
    for seed in range(2, 40):
        other = world.start(size, seed=seed)
        mark_keys(world, other)
        assert world.wrong_rows(other) == 0 and wrong_keys(world, other) == 0
        world.finish(other)
        for _ in range(3):
            world.decode(lasting)
        world.settle()
        seen.add(border(world).border.ended)
        mark_keys(world, lasting)
        assert world.wrong_rows(lasting) == 0 and wrong_keys(world, lasting) == 0
        check(world.residency)
        if border(world).border.is_at_end:
            break
    settle(world)
    seen.add(border(world).border.ended)
    assert border(world).border.is_at_end and len(seen) > 1
    assert world.book.num_usable == world.pool.num_logical_pages
    assert world.allocator.device_pages.num_usable == world.pool.border[-1].device_pages
    assert world.allocator.unbacked_tokens == 0 == border(world).counters()["border_steps_left"]
    sample = gather(world.runtime, FetchedBytes(world.runtime.hot))
    assert sample["pages"]["unbacked"] == 0 and sample["border_steps"] == {"taken": len(world.pool.border) - 1, "left": 0}
    assert world.wrong_rows(lasting) == 0


def test_growth_comes_before_eviction(world: World) -> None:
    """Goal: a cached prefix is not given up while memory can move. Method: admission is asked for a request that only fits
    behind the border; it is put off until the move has ended, and the cache is as it was."""
    free = world.num_free_logical
    cached = world.start((free // 2) * PAGE, seed=1)
    world.finish(cached)
    before = world.tree.evictable_size()
    wanted = (world.pool.border[-1].device_pages - 3) * PAGE
    asked = 0
    for asked in range(100):
        adder = world.allocator.create_prefill_budget(world.tree)
        fits, _ = adder.check_prefill(
            extend_input_len=wanted, total_tokens=wanted + 2 * PAGE, max_new_tokens=PAGE, input_tokens=wanted,
            swa_host_hit_length=0, chunk_limit=None,
        )  # fmt: skip
        if fits:
            break
        assert world.runtime.admission_may_have_room()
        world.settle()
        world.runtime.tick()
    assert asked and world.num_free_logical * PAGE >= wanted and world.tree.evictable_size() == before


def test_a_move_is_timed_and_told_to_the_gate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what moving chunks takes is counted, and is no part of a decode step's time. Method: a gate that counts what it is
    told, through one move and through ticks without one."""
    pauses = []
    monkeypatch.setattr(world.runtime, "gate", SimpleNamespace(note_pause=lambda: pauses.append(1), tick=lambda: None))
    world.runtime.tick()
    assert not pauses and border(world).memory.seconds_moving == 0
    border(world).border.want(world.num_free_logical + 1)
    border(world).before_plan()
    assert border(world).border.is_moving
    settle(world)
    told, moved = len(pauses), border(world).memory.seconds_moving
    assert told > 0 and moved > 0 and border(world).memory.chunks_moved > 0
    world.runtime.tick()
    assert (len(pauses), border(world).memory.seconds_moving) == (told, moved)


def test_a_decode_step_waits_rather_than_retract(world: World) -> None:
    """Goal: nobody is retracted while memory can move, and no cached prefix is kept for it. Method: all logical pages but one are
    taken while a move is under way; two requests need a page each; then with something cached, after the move, and too often."""

    def batch(num_requests: int, num_alive: int) -> SimpleNamespace:
        """A decode batch of SGLang, some requests of which have ended; each that lives needs a page."""
        alive = [SimpleNamespace()] * num_alive
        decode = SimpleNamespace(reqs=[SimpleNamespace()] * num_requests)
        decode.filter_batch = lambda: setattr(decode, "reqs", alive)
        decode.is_empty = lambda: not decode.reqs
        decode.new_tokens_required_next_decode = lambda: len(decode.reqs) * PAGE
        return decode

    settle(world)
    moving = border(world)
    moving.border.want(world.num_free_logical + 1)
    world.runtime.tick()
    assert moving.border.is_moving
    taken = world.book.allocate(world.num_free_logical - 1)
    assert moving.decode_waits(batch(2, 2)) and moving.take_news()
    assert not moving.decode_waits(batch(2, 1)) and not moving.decode_waits(batch(2, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.tree), "evictable_size", lambda tree: PAGE)
        assert not moving.decode_waits(batch(2, 2)), "one page is free, one is cached"
    while moving.decode_waits(batch(2, 2)):
        pass
    assert moving.border._deferrals == MAX_DEFERRALS
    settle(world)
    assert world.num_free_logical > 2 and not moving.decode_waits(batch(2, 2))
    world.book.give_back(taken)


def test_a_captured_address_reads_the_new_memory(world: World) -> None:
    """Goal: tensors that a captured graph has seen stay good across a move. Method: take addresses and views before it."""
    views = [keys for keys in world.pool.index_k_with_scale_buffer if len(keys)]
    addresses = [keys.data_ptr() for keys in views] + world.pool.device_bases().tolist()
    before = world.book.num_usable
    border(world).want(before + 1)
    settle(world)
    page = world.book.num_usable
    assert page > before
    for keys in views:
        keys[page].fill_(7)
    again = [keys for keys in world.pool.index_k_with_scale_buffer if len(keys)]
    assert all((keys[page] == 7).all() for keys in again)
    assert addresses == [keys.data_ptr() for keys in again] + world.pool.device_bases().tolist()


def test_relocated_rows_and_leases(world: World) -> None:
    """Goal: an open tail and a hot buffer on top of the pool move below. Method: fill the pool, free what lies below, move."""
    settle(world)  # a step gives more logical pages than this pool has on a GPU: the first one comes before any request
    low = world.client(world.prompt((world.allocator.device_pages.num_usable - 8) * PAGE, seed=1))
    world.extend(low)
    high = world.client(world.prompt(4 * PAGE + 5, seed=2), max_new_tokens=200)
    world.extend(high)
    world.publish(high)
    assert world.residency.acquire_lease(high.slot)
    world.runtime.before_forward()
    tops = world.book.device_page[world.pages(high)].tolist() + world.residency.hot_lease[high.slot]
    world.finish(low, checkpoint=False)
    steps = world.pool.border
    target = next(i for i, step in enumerate(steps) if step.device_pages < min(tops)) if min(tops) > steps[-1].device_pages else len(steps) - 1
    while border(world).border.ended < target:
        border(world).want(world.num_free_logical + 1)
        world.runtime.tick()
        world.runtime.tick()
        if not border(world).border.is_moving and border(world).border.is_at_end:
            break
        world.decode(high)
    limit = world.allocator.device_pages.num_usable
    now = world.book.device_page[world.pages(high)].tolist() + world.residency.hot_lease[high.slot]
    assert max(tops) > limit >= max(now)
    assert world.residency.counters.pages_relocated > 0
    hot = world.runtime.hot.hot_pages[high.slot].cpu().tolist()
    assert hot == world.residency.hot_lease[high.slot]
    assert world.wrong_rows(high) == 0 and world.allocator.device_pages.count(Owner.WITHHELD) > 0
    assert np.array_equal(world.allocator.page_table.cpu().numpy()[world.pages(high)], world.book.device_page[world.pages(high)])


def test_a_flush_in_the_middle_of_a_move(world: World) -> None:
    """Goal: flushing and moving do not disturb each other. Method: begin a move, flush, end it, fill the cache again."""
    settle(world)
    client, before = world.start(4 * PAGE, seed=1), border(world).border.ended
    border(world).want(world.num_free_logical + 1)
    world.runtime.tick()
    assert not border(world).border.is_moving, "a forward may come, and brings its plan"
    world.runtime.tick()
    assert border(world).border.is_moving
    world.finish(client)
    world.tree.reset()
    world.allocator.clear()
    settle(world)
    assert world.num_free_logical == world.book.num_usable > world.pool.border[before].logical_pages
    check(world.residency)
    again = world.start(6 * PAGE, seed=2)
    assert world.wrong_rows(again) == 0


def test_a_flushed_server_is_at_home(world: World) -> None:
    """Goal: the border goes back while nothing is cached, and the whole way again. Method: fill the cache, flush, rest; sizes as at
    home, then rows and keys of a request as large as the device was, and the way again."""
    settle(world)
    moving, steps = border(world).border, world.pool.border
    home = steps[0]
    moving.calm_looks = 5
    for turn in range(2):
        for seed in range(40):
            world.finish(world.start((steps[-1].device_pages // 2) * PAGE, seed=100 * turn + seed))
            settle(world)
            if moving.is_at_end:
                break
        assert moving.is_at_end and moving.ended == len(steps) - 1
        world.runtime.tick()
        assert not moving.is_moving, "prefixes are cached"
        for rare in (True, False):
            moving.returns.are_rare = rare
            assert gather(world.runtime, FetchedBytes(world.runtime.hot))["prefixes_return_rarely"] == {"": rare}
        world.tree.reset()
        world.allocator.clear()
        for _ in range(4 * moving.calm_looks):
            world.runtime.tick()
            if world.device == "cuda":
                torch.cuda.synchronize()
        assert moving.ended == moving.begun == 0 == border(world).counters()["border_steps"]
        assert world.num_free_device == home.device_pages and world.num_free_logical == home.logical_pages
        assert world.tree.protected_size() == world.allocator.unbacked_tokens == (steps[-1].logical_pages - home.logical_pages) * PAGE
        check(world.residency)
        large = world.start((home.device_pages - 2) * PAGE, seed=500 + turn)
        mark_keys(world, large)
        assert world.wrong_rows(large) == 0 and wrong_keys(world, large) == 0
        world.finish(large)


def test_storage_is_waited_for(world: World) -> None:
    """Goal: no index-K leaves while it is being copied to storage. Method: a storage that says so, then does not."""
    assert border(world)._has_vacated()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.runtime, "storage", SimpleNamespace(reads_index_keys=True))
        assert not border(world)._has_vacated()
        world.runtime.storage.reads_index_keys = False
        assert border(world)._has_vacated()


def test_off_is_what_it_was() -> None:
    """Goal: without the key nothing of this exists. Method: a world of the defaults."""
    with make_world() as world:
        assert world.pool.elastic is None and world.runtime.border is None and world.pool.border == ()
        assert world.allocator.unbacked_tokens == 0
        assert world.allocator.max_request_tokens() == (world.sizes.device_pages - 2) * PAGE
        assert not world.runtime.defers_to_border(10_000)
