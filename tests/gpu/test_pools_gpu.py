"""Goal: rows survive every way between the tiers. Method: the real worker and resolver; every byte against its token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from captured_decode import CapturedDecode
from runtime_world import PAGE, World
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hisparse.residency import PageState


def test_mirror_spill_promote_round_trip(world: World) -> None:
    """Goal: a page that went to the host and came back is whole. Method: spill twelve pages, poison the device, promote."""
    client = world.start(12 * PAGE + 5)
    pages = world.pages(client)[:12]
    world.finish(client)
    world.settle()
    world.residency.spill(pages)
    world.settle()
    for layer in range(world.sizes.layers):
        world.pool.layer_rows(layer)[PAGE:] = 0xEE
    again = world.client(world.prompt(12 * PAGE + 5))
    world.extend(again)
    assert world.pages(again)[:12] == pages and world.residency.counters.pages_promoted == 12
    assert world.wrong_rows(again) == 0
    world.settle()
    assert (world.book.state[pages] == PageState.CLEAN).all()


def test_a_device_page_may_be_reused_at_once(world: World) -> None:
    """Goal: I1, a spilled page's next owner never reaches the host copy. Method: spill and refill in one plan, many times."""
    rounds = [world.start(9 * PAGE, seed=seed) for seed in range(2)]
    for seed in range(2, 8):
        world.finish(rounds.pop(0))
        rounds.append(world.start(9 * PAGE, seed=seed))
        world.decode(*rounds)
    assert world.residency.counters.pages_spilled > 20
    for client in rounds:
        assert world.wrong_rows(client) == 0
    for seed in range(8):
        hit = world.client(world.prompt(9 * PAGE, seed=seed))
        hit.req.init_next_round_input(world.tree)
        ids = torch.tensor(world.tree.prefix_pages(hit.req)) * PAGE
        for layer in range(world.sizes.layers):
            rows = world.pool.read_rows(ids.to(world.device)).cpu()
            found = world.host_rows(layer, ids)
            on_device = (rows >= 0).numpy()
            found[on_device] = world.rows(layer, rows.clamp(min=0).to(world.device))[on_device]
            assert (found == world.expected(hit, np.arange(len(ids)) * PAGE, layer)).all(), (seed, layer)


def test_replay_follows_the_plans(world: World) -> None:
    """Goal: one captured graph serves every residency. Method: replay while requests spill, return, end and enter."""
    graph, rng = CapturedDecode(world), np.random.default_rng(0)
    world.runtime.hot.forget_counts()
    clients = [world.start(200, seed=1), world.start(500, seed=2), world.start(450, seed=3)]
    for step in range(24):
        if step == 4:
            assert world.runtime.make_room(10)
        if step == 10:
            mixed = next(client for client in clients if world.book.leased[client.slot])
            world.residency.release_lease(mixed.slot)
            pages = [page for page in world.pages(mixed) if world.book.is_host_only(page)]
            assert pages and world.residency.promote(pages)
        if step == 15:
            world.finish(clients.pop(0))
            world.tree.evict(EvictParams(num_tokens=10_000))
            clients.append(world.start(333, seed=9))
        world.decode(*clients)
        positions = torch.full((len(clients), world.sizes.top_k), -1, dtype=torch.int32)
        for row, client in enumerate(clients):
            chosen = rng.permutation(client.length)[: world.sizes.top_k - row]
            positions[row, : len(chosen)] = torch.from_numpy(chosen.astype(np.int32))
        for layer, rows in enumerate(graph.step(clients, positions)):
            assert (rows[len(clients) :] == -1).all(), "padded rows are written too (I9)"
            for row, client in enumerate(clients):
                valid = positions[row] >= 0
                assert (rows[row][~valid] == -1).all() and (rows[row][valid] > 0).all()
                found = world.rows(layer, rows[row][valid].to(world.device))
                assert (found == world.expected(client, positions[row][valid].numpy(), layer)).all(), (step, layer, row)
    for _ in range(2):
        if world.device != "cpu":
            torch.cuda.synchronize()
        counters = world.runtime.counters()
    assert (
        counters["errors"] == 0 and min(counters["rows_fetched"], counters["rows_hot"], counters["rows_resident"]) > 0
    )


@pytest.mark.gpu
def test_the_translation_on_the_gpu_equals_the_cpus() -> None:
    """Goal: readers get -1 and writers the pad page on CUDA too (R23). Method: the same ids through both."""
    from sglang_hisparse.memory.pool import rows_for_reading, rows_for_writing

    table = torch.tensor([0, 5, 0, 2, 9], dtype=torch.int32)
    ids = torch.tensor([[-1, 0, 63, 64, 127], [128, 200, 255, 256, 319]], dtype=torch.int32)
    read = rows_for_reading(ids.cuda(), table.cuda(), PAGE).cpu()
    assert torch.equal(read, rows_for_reading(ids, table, PAGE))
    loc = ids.flatten().long()
    assert torch.equal(rows_for_writing(loc.cuda(), table.cuda(), PAGE).cpu(), rows_for_writing(loc, table, PAGE))
