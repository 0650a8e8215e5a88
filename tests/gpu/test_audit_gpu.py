"""Goal: the audit works inside a captured graph, waits for nothing, and its poison keeps its order. Method: plant and replay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from captured_decode import captured
from runtime_world import PAGE, Client, Sizes, World, make_world

from sglang_hisparse.audit import AUDIT_VARIABLE
from sglang_hisparse.page_audit import POISON_BYTE


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv(AUDIT_VARIABLE, "1")
    with make_world(Sizes(), device=request.param, radix=False) as world:
        if request.param == "cuda":
            world.runtime.set_decode_producer_stream(torch.cuda.current_stream())
        yield world


def tally(world: World) -> tuple[int, int]:
    """(rows audited, mismatches), when the device has done everything."""
    for _ in range(3):
        if world.device != "cpu":
            torch.cuda.synchronize()
        counters = world.runtime.counters()
    return counters["audited_rows"], counters["mismatches"]


def first_page_of(world: World, client: Client) -> tuple[int, int]:
    page = world.pages(client)[0]
    return page, int(world.book.device_page[page])


def test_damage_is_found_in_a_graph(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: all three checks are captured. Method: replay sound; then a changed resident row, a stale table entry."""
    client, victim = world.start(700, seed=1), world.start(300, seed=2)
    world.settle()
    positions = torch.arange(world.sizes.top_k, dtype=torch.int32).view(1, -1)
    slots, lengths, top_k = world.top_k_inputs([client], positions)
    replay = captured(
        world,
        lambda: [world.runtime.swap_in_selected_pages(slots, lengths, top_k, layer) for layer in range(4)] and None,
    )
    for _ in range(4):
        replay()
    seen, wrong = tally(world)
    assert seen >= 2 * world.sizes.layers * 32 and wrong == 0
    page, at = first_page_of(world, client)
    world.pool.layer_rows(1)[at * PAGE + 5, 40] ^= 1
    for _ in range(2):
        replay()
    assert tally(world)[1] > 0 and f"layer 1, position 5, logical page {page}" in caplog.text
    world.pool.layer_rows(1)[at * PAGE + 5, 40] ^= 1
    stale = first_page_of(world, victim)[1]
    world.finish(victim, checkpoint=False)
    world.decode(client)
    before = tally(world)[1]
    world.allocator.page_table[page] = stale
    replay()
    assert tally(world)[1] >= before + world.sizes.top_k and "memory of a request that has ended" in caplog.text
    world.is_broken = True


def test_the_audit_waits_for_nothing(world: World) -> None:
    """Goal: a server under audit keeps its pace. Method: whole lives under the guard, once to load kernels, once for good."""

    def life(seed: int) -> None:
        client, other = world.start(700, seed=seed), world.start(300, seed=seed + 1)
        for _ in range(20):
            world.decode(client, other)
        world.finish(client, checkpoint=False)
        world.decode(other)
        world.finish(other, checkpoint=False)
        world.runtime.counters()
        world.runtime.has_ongoing_staging()

    life(0)
    if world.device != "cpu":
        torch.cuda.set_sync_debug_mode("error")
    try:
        life(10)
    finally:
        if world.device != "cpu":
            torch.cuda.set_sync_debug_mode("default")
    assert tally(world)[1] == 0


def test_poison_keeps_its_order(world: World) -> None:
    """Goal: freed pages are poisoned behind copies under way, and never under a new owner. Method: fast turnover of pages."""
    for seed in range(6):
        client = world.start(11 * PAGE, seed=seed)
        pages = world.pages(client)
        world.decode(client)
        assert world.wrong_rows(client) == 0
        world.finish(client, checkpoint=False)
    other = world.start(PAGE - 10, seed=9)
    world.settle()
    if world.device != "cpu":
        torch.cuda.synchronize()
    kept = [page for page in pages if page not in world.pages(other)]
    host = world.runtime.mem_pool_host
    for layer in range(world.sizes.layers):
        for page in kept:
            assert (host.layer_rows(layer)[page * PAGE : (page + 1) * PAGE] == POISON_BYTE).all()
    assert world.wrong_rows(other) == 0
