"""Goal: no scheduler path waits for the device (R1). Method: every path under torch's sync-debug mode, which raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from runtime_world import Client, World
from sglang.srt.mem_cache.base_prefix_cache import EvictParams


@contextmanager
def no_sync(device: str) -> Iterator[None]:
    """Any wait of the CPU for the device raises inside; on a CPU world there is none to find."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def life(world: World) -> list[Client]:
    """Every path of a request: chunks, prefix hits, duplicates, spills, promotion, retraction, end, eviction."""
    chunked = world.client(world.prompt(500, seed=1))
    world.extend(chunked, tokens=256)
    world.publish(chunked)
    world.extend(chunked)
    world.publish(chunked)
    twins = [world.client(world.prompt(300, seed=2)) for _ in range(2)]
    world.extend(*twins)
    world.publish(*twins)
    for _ in range(70):
        world.decode(chunked, *twins)
    assert world.runtime.make_room(world.num_free_device + 3)
    world.decode(chunked, *twins)
    world.finish(twins.pop())
    world.retract(chunked)
    chunked.req.reset_for_retract()
    assert world.runtime.make_room(16), "the cached pages of the retracted request leave"
    world.extend(chunked)
    world.publish(chunked)
    hit = world.client(world.prompt(300, seed=2) + world.prompt(50, seed=3))
    world.extend(hit)
    world.publish(hit)
    world.decode(chunked, hit, *twins)
    world.finish(hit, checkpoint=False)
    world.tree.evict(EvictParams(num_tokens=200))
    world.allocator.check_decode_capacity(num_tokens=64, tree_cache=world.tree)
    world.runtime.has_ongoing_staging()
    world.runtime.counters()
    world.runtime.get_token_stats()
    return [chunked, *twins]


def test_no_path_waits_for_the_device(world: World) -> None:
    """Goal: from admission to eviction nothing synchronises. Method: run it all once to load kernels, then under the guard."""
    for client in life(world):
        world.finish(client, checkpoint=False)
    world.tree.reset()
    world.allocator.clear()
    world.request_pool.clear()
    before = world.residency.counters.pages_promoted, world.residency.counters.pages_spilled
    with no_sync(world.device):
        clients = life(world)
    assert world.allocator.num_slow_frees == 0
    after = world.residency.counters.pages_promoted, world.residency.counters.pages_spilled
    assert after[0] > before[0] and after[1] > before[1], "the run has to promote and to spill"
    world.settle()
    assert [world.wrong_rows(client) for client in clients] == [0] * len(clients)


def test_resolving_waits_for_nothing(world: World) -> None:
    """Goal: a decode step with misses launches and returns. Method: one mixed request, all layers, under the guard."""
    client = world.start(700)
    old = world.go_mixed(client)
    positions = torch.tensor(old[: world.sizes.top_k], dtype=torch.int32).unsqueeze(0)
    world.resolve([client], positions)
    with no_sync(world.device):
        for step in range(3):
            world.decode(client)
            for layer in range(world.sizes.layers):
                rows = world.resolve([client], positions + 8 * step, layer)
    found = world.rows(world.sizes.layers - 1, rows[0])
    assert (found == world.expected(client, (positions[0] + 16).numpy(), world.sizes.layers - 1)).all()


@pytest.mark.gpu
def test_the_guard_bites() -> None:
    """Goal: a wait is really found. Method: read one element of a device tensor under the guard."""
    with no_sync("cuda"), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()
