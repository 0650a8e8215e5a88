"""Goal: one set of pages per prefix, and none lost. Method: SGLang's radix tree, both cores, over tiny CPU pools."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from runtime_world import PAGE, Client, World, make_world
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import PageState

CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


@pytest.fixture(params=["rust", "python"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """24 device pages, 96 logical ones, under the tree core that is named."""
    monkeypatch.setenv(CORE, request.param)
    with make_world() as world:
        is_rust = "rust" in type(world.tree.tree_core).__module__
        if is_rust != (request.param == "rust"):
            pytest.skip(f"SGLang falls back to {type(world.tree.tree_core).__name__} here")
        yield world
        assert world.allocator.num_slow_frees == 0


def evict_all(world: World) -> int:
    return world.tree.evict(EvictParams(num_tokens=1 << 30)).num_tokens_evicted


def cached_pages(world: World, client: Client, count: int) -> list[int]:
    """End a request; the first `count` pages of its row, which the tree keeps."""
    pages = world.pages(client)[:count]
    world.finish(client)
    return pages


def send_to_host(world: World, pages: list[int]) -> None:
    """Cached pages give up their device pages, as under pressure."""
    world.settle()
    world.residency.spill(pages)
    world.settle()


def assert_empty(world: World) -> None:
    assert (world.num_free_logical, world.num_free_device) == (96, 24)
    assert not world.book.users.any() and not world.book.holds.any()


def test_a_shared_prefix_is_one_set_of_pages(world: World) -> None:
    """Goal: two users, one copy on either side. Method: a second request whose first 320 tokens are cached."""
    first = world.start(330)
    free = world.num_free_logical
    second = world.client(world.prompt(330)[:320] + world.prompt(100, seed=5))
    world.extend(second)
    world.publish(second)
    shared = world.pages(second)[:5]
    assert second.req.prefix_len == 420 and shared == world.pages(first)[:5]
    assert world.num_free_logical == free - 2 and (world.book.users[shared] == 2).all()
    assert world.row_of(second)[:320] == world.row_of(first)[:320]
    assert world.wrong_rows(first) == world.wrong_rows(second) == 0
    world.finish(first)
    assert (world.book.users[shared] == 1).all() and world.wrong_rows(second) == 0


def test_eviction_frees_host_rows_and_device_pages(world: World) -> None:
    """Goal: an evicted page leaves both tiers. Method: half of a cached prompt is host-only when the tree is emptied."""
    pages = cached_pages(world, world.start(640), 10)
    send_to_host(world, pages[:5])
    assert (world.num_free_logical, world.num_free_device) == (86, 19)
    assert evict_all(world) == 640
    assert_empty(world)
    other = world.start(640, seed=1)  # takes the same ids, whose host rows still hold the first prompt
    assert set(world.pages(other)) <= set(pages)
    world.settle()
    assert world.wrong_rows(other) == 0


def test_pages_in_use_are_not_evicted(world: World) -> None:
    """Goal: only what nobody uses leaves the tree. Method: evict everything while one request runs."""
    running = world.start(330)
    world.finish(world.start(256, seed=2))
    assert evict_all(world) == 256
    assert world.tree.evictable_size() == 0
    world.decode(running)
    assert world.wrong_rows(running) == 0


def test_equal_prompts_in_flight_are_deduplicated(world: World) -> None:
    """Goal: exactly the duplicates are freed. Method: two equal prompts in one batch, published one after the other."""
    first, second = (world.client(world.prompt(330)) for _ in range(2))
    world.extend(first, second)
    mine = world.pages(second)
    world.publish(first)
    free = (world.num_free_logical, world.num_free_device)
    world.publish(second)
    assert world.pages(second) == [*world.pages(first)[:5], mine[5]]
    assert (world.book.state[mine[:5]] == PageState.FREE).all() and world.book.state[mine[5]] != PageState.FREE
    assert (world.num_free_logical, world.num_free_device) == (free[0] + 5, free[1] + 5)
    assert [number // PAGE for number in world.row_of(second)[::PAGE]] == world.pages(second)
    world.settle()
    world.decode(first, second)
    assert world.wrong_rows(first) == world.wrong_rows(second) == 0


def test_a_resident_duplicate_moves_to_the_trees_page(world: World) -> None:
    """Goal: R22, no row becomes host-only by de-duplication. Method: the tree's pages went to the host meanwhile."""
    first, second = (world.client(world.prompt(330)) for _ in range(2))
    world.extend(first, second)
    world.publish(first)
    pages = cached_pages(world, first, 5)
    send_to_host(world, pages)
    device_pages = world.book.device_page[world.pages(second)[:5]].tolist()
    world.publish(second)
    assert world.pages(second)[:5] == pages and world.residency.counters.pages_rehomed == 5
    assert world.book.device_page[pages].tolist() == device_pages
    assert (world.book.state[pages] == PageState.CLEAN).all(), "their host rows are complete already"
    assert not world.book.leased.any()
    world.settle()
    world.decode(second)
    assert world.wrong_rows(second) == 0


def test_rehoming_between_the_chunks_of_a_prefill(world: World) -> None:
    """Goal: the next chunk finds its whole prefix on the device. Method: a chunked prompt meets host-only tree pages."""
    prompt = world.prompt(600)
    first, second = world.client(prompt), world.client(prompt)
    world.extend(first, second, tokens=256)
    world.publish(first)
    world.finish(first)
    pages = world.tree.prefix_pages(matched(world, prompt))
    assert len(pages) == 4
    send_to_host(world, pages)
    world.publish(second)
    assert world.pages(second) == pages and not any(map(world.book.is_host_only, pages))
    world.extend(second)
    world.publish(second)
    world.settle()
    assert world.wrong_rows(second) == 0


def matched(world: World, prompt: list[int]) -> object:
    """A request that has looked its prefix up and holds nothing."""
    client = world.client(prompt)
    client.req.init_next_round_input(world.tree)
    return client.req


def test_a_host_only_prefix_is_promoted_before_its_extend(world: World) -> None:
    """Goal: a prefill reads device rows alone. Method: a cached prefix of ten host-only pages is asked for again."""
    pages = cached_pages(world, world.start(640), 10)
    send_to_host(world, pages)
    again = world.client(world.prompt(640) + world.prompt(70, seed=3))
    world.extend(again)
    assert world.pages(again)[:10] == pages and world.residency.counters.pages_promoted == 10
    assert world.host_only_positions(again) == [] and world.wrong_rows(again) == 0


def test_no_prefix_of_a_batch_makes_room_for_the_batch(world: World) -> None:
    """Goal: R21, all prefixes are held before anything is spilled. Method: the oldest cached prefix is in the batch."""
    wanted = cached_pages(world, world.start(512), 8)
    cached_pages(world, world.start(640, seed=1), 10)
    world.settle()
    assert world.num_free_device == 6
    with_prefix = world.client(world.prompt(512) + world.prompt(10, seed=2))
    fresh = world.client(world.prompt(380, seed=3))
    world.extend(fresh, with_prefix)
    assert with_prefix.req.prefix_len == 512 and world.pages(with_prefix)[:8] == wanted
    assert world.residency.counters.pages_spilled == 1
    assert world.wrong_rows(fresh) == world.wrong_rows(with_prefix) == 0


def test_split_nodes_keep_their_pages(world: World) -> None:
    """Goal: a split moves no id. Method: a prompt that leaves a cached one in its middle, then each end is evicted."""
    first = world.start(512)
    pages = world.pages(first)
    second = world.client(world.prompt(512)[:192] + world.prompt(200, seed=4))
    world.extend(second)
    world.publish(second)
    assert world.pages(second)[:3] == pages[:3]
    world.finish(first)
    assert evict_all(world) == 512 - 192, "the part behind the split has no user"
    world.settle()
    world.decode(second)
    assert world.wrong_rows(second) == 0
    world.finish(second)
    evict_all(world)
    assert_empty(world)


def test_the_partial_page_stays_private(world: World) -> None:
    """Goal: no tree page is written again. Method: decode over a page border after the prompt was published."""
    first = world.start(100)
    second = world.client(world.prompt(100))
    world.extend(second)
    world.publish(second)
    assert world.pages(first)[0] == world.pages(second)[0] and world.pages(first)[1] != world.pages(second)[1]
    for _ in range(60):
        world.decode(first, second)
    world.settle()
    assert world.wrong_rows(first) == world.wrong_rows(second) == 0


def test_retraction_keeps_full_pages(world: World) -> None:
    """Goal: R13, a retracted request recomputes one page at most. Method: retract after 200 tokens, spill, go on."""
    client = world.start(330, max_new_tokens=300)
    for _ in range(200):
        world.decode(client)
    pages = world.pages(client)
    world.retract(client)
    assert world.num_free_logical == 96 - 8 and not world.book.users.any()
    assert world.runtime.make_room(24), "kept pages can leave the device at once"
    client.req.reset_for_retract()
    world.extend(client)
    assert world.pages(client)[:8] == pages[:8] and client.length == 531
    world.publish(client)
    world.settle()
    world.decode(client)
    assert world.wrong_rows(client) == 0


def test_a_disabled_tree_keeps_nothing() -> None:
    """Goal: without a radix cache every page ends with its request. Method: finish and retract with the tree off."""
    with make_world(radix=False) as world:
        finished, retracted = world.start(330), world.start(330)
        assert not set(world.pages(finished)) & set(world.pages(retracted))
        world.decode(finished, retracted)
        world.finish(finished)
        world.retract(retracted)
        assert_empty(world)


def test_ids_of_unknown_pages_never_enter_the_tree(world: World) -> None:
    """Goal: R1, the tree holds CPU ids only. Method: insert ids of another device outside a checkpoint."""
    with pytest.raises(InvariantError, match="outside a checkpoint"):
        world.tree.insert(InsertParams(value=torch.empty(PAGE, dtype=torch.int64, device="meta")))


def test_a_tree_that_frees_other_pages_is_caught(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a duplicate cannot leak in silence. Method: one of the tree's frees is lost on its way."""
    first, second = (world.client(world.prompt(200)) for _ in range(2))
    world.extend(first, second)
    world.publish(first)
    free = world.allocator.free_pages_list
    monkeypatch.setattr(world.allocator, "free_pages_list", lambda pages: free(list(pages)[1:]))
    world.is_broken = True
    with pytest.raises(InvariantError, match="the tree freed pages"):
        world.publish(second)


@pytest.mark.parametrize("seed", range(3))
def test_random_lives(world: World, seed: int) -> None:
    """Goal: no order of events loses a page or a row. Method: seeded starts, decodes, ends, retractions, spills, evictions."""
    rng, live = np.random.default_rng(seed), []
    for _ in range(70):
        event = rng.random()
        if event < 0.3 and len(live) < 4:
            shared = world.prompt(int(rng.integers(0, 400)), seed=int(rng.integers(2)))
            prompt = shared + world.prompt(int(rng.integers(1, 200)), seed=int(rng.integers(1 << 30)))
            budget = world.allocator.create_prefill_budget(world.tree)
            asked = {"extend_input_len": len(prompt), "max_new_tokens": 64, "chunk_limit": None}
            needed = len(prompt) + 64 + PAGE
            if budget.check_prefill(total_tokens=needed, input_tokens=len(prompt), swa_host_hit_length=0, **asked)[0]:
                client = world.client(prompt)
                world.extend(client)
                world.publish(client)
                live.append(client)
        elif event < 0.4 and live:
            client = live.pop(int(rng.integers(len(live))))
            (world.finish if rng.random() < 0.6 else world.retract)(client)
        elif event < 0.5:
            world.runtime.make_room(int(rng.integers(1, 12)))
        elif event < 0.55:
            world.tree.evict(EvictParams(num_tokens=int(rng.integers(1, 600))))
        elif live and world.allocator.check_decode_capacity(num_tokens=len(live) * PAGE, tree_cache=world.tree):
            world.decode(*live)
        assert world.runtime.self_check() == []
        if rng.random() < 0.2:
            world.settle()
            assert [world.wrong_rows(client) for client in live] == [0] * len(live)
    for client in live:
        world.finish(client)
    assert world.tree.evictable_size() == (96 - world.num_free_logical) * PAGE
    evict_all(world)
    assert_empty(world)
