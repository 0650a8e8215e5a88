"""Goal: KV and index-K travel between device, host and storage byte for byte and in the right order.

Method: a world with a storage tier over files; index-K is random. On the GPU the copies run behind forwards that take long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runtime_world import PAGE, Client, World

from sglang_hisparse.storage.backend import Store, StoreIdentity
from sglang_hisparse.storage.counters import StorageCounters
from sglang_hisparse.storage.tier import StorageTier

LENGTH = 6 * PAGE + 20
SLOW = 400_000_000  # cycles, a few tenths of a second


@pytest.fixture
def tier(world: World, tmp_path: Path) -> Iterator[StorageTier]:
    """The world's storage tier; the world's end closes it."""
    counters = StorageCounters()
    extra = {"file_storage_path": str(tmp_path)}
    store = Store.open("file", extra, StoreIdentity("a-model", 0, 1), world.runtime.mem_pool_host, counters)
    tier = StorageTier(
        world.runtime,
        world.tree,
        store,
        {"layers": world.sizes.layers},
        counters,
        is_writer=True,
        wait_seconds=20.0,
        agree=lambda values: values,
    )
    world.runtime.storage = world.tree.storage = tier
    yield tier


def index_buffers(world: World) -> list[torch.Tensor]:
    return [buffer for buffer in world.pool.index_key_cache.buffer if buffer.shape[0]]


def index_of(world: World, pages: list[int]) -> np.ndarray:
    """Index-K of logical pages: uint8 [leaders, pages, bytes] (waits for the device)."""
    return torch.stack([buffer[pages] for buffer in index_buffers(world)]).cpu().numpy()


def fill_index(world: World, pages: list[int], seed: int) -> None:
    """Random index-K, written on the stream of the forwards."""
    rng = np.random.default_rng(seed)
    for buffer in index_buffers(world):
        values = rng.integers(0, 256, (len(pages), buffer.shape[1]), dtype=np.uint8)
        buffer[pages] = torch.from_numpy(values).to(buffer.device)


def run_until(world: World, condition: Callable[[], bool], seconds: float = 20) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        world.runtime.before_forward()
        world.runtime.storage.tick()
        time.sleep(0.001)


def publish_one(world: World, tier: StorageTier) -> tuple[Client, list[int]]:
    """A prompt of six full pages in the tree, and in storage."""
    client = world.start(LENGTH)
    pages = world.pages(client)[: LENGTH // PAGE]
    fill_index(world, pages, seed=1)
    world.finish(client)
    world.settle()
    run_until(world, lambda: not tier.publisher.backlog)
    assert tier.counters()["storage_pages_published"] == len(pages)
    return client, pages


def test_a_page_comes_back_as_it_was(world: World, tier: StorageTier) -> None:
    """Goal: the round trip is the identity. Method: publish, flush, overwrite everything, load into other pages, compare KV on the
    host and index-K on the device with what they were."""
    client, pages = publish_one(world, tier)
    index = index_of(world, pages)
    world.tree.reset()
    world.allocator.clear()
    world.runtime.before_forward()
    fill_index(world, list(range(1, world.num_free_logical + 1)), seed=2)
    for layer in range(world.sizes.layers):
        world.runtime.mem_pool_host.layer_rows(layer).random_()
    other = world.start(3 * PAGE, seed=9)  # so that the pages are others than before
    tokens = list(client.req.origin_input_ids)
    tier.request("handle", tokens, 0, (None, None))
    run_until(world, lambda: tier.prefetches.is_over("handle"))
    assert tier.prefetches.take_loaded("handle") == (len(pages) * PAGE, 0)
    again = world.client(tokens)
    again.req.init_next_round_input(world.tree)
    loaded = world.tree.prefix_pages(again.req)
    assert len(loaded) == len(pages) and loaded != pages
    assert np.array_equal(index_of(world, loaded), index)
    ids = torch.tensor([page * PAGE + row for page in loaded for row in range(PAGE)])
    for layer in range(world.sizes.layers):
        assert np.array_equal(world.host_rows(layer, ids), world.expected(client, np.arange(len(ids)), layer)), layer
    world.finish(other)


def test_what_is_published_is_behind_the_forward_that_wrote_it(world: World, tier: StorageTier) -> None:
    """Goal: index-K is copied down after the launched forward. Method: a forward that writes it late; then the copy."""
    pages = [3, 5, 8]
    if world.device == "cuda":
        torch.cuda._sleep(SLOW)
    fill_index(world, pages, seed=7)
    moment = tier.bytes.pull_index(pages)
    assert moment.wait()
    pulled = torch.empty(len(pages), tier.unit.index_bytes, dtype=torch.uint8)
    for slot in range(len(pages)):
        tier.bytes.pulled_index(slot, pulled[slot])
    wanted = index_of(world, pages)
    assert np.array_equal(pulled.view(len(pages), len(wanted), -1).numpy(), wanted.transpose(1, 0, 2))


def test_loading_waits_for_readers_of_the_pages_last_owner(world: World, tier: StorageTier) -> None:
    """Goal: rows that a launched forward still reads are not overwritten. Method: a slow forward is launched, pages that it may read
    are freed and taken by a load; nothing is loaded before the forward is over."""
    client, pages = publish_one(world, tier)
    tokens = list(client.req.origin_input_ids)
    world.tree.reset()
    world.allocator.clear()
    world.runtime.before_forward()
    over = SimpleNamespace(query=lambda: True)
    if world.device == "cuda":
        torch.cuda._sleep(SLOW)
        over = torch.cuda.Event()
        over.record()
    tier.request("handle", tokens, 0, (None, None))
    ends = time.monotonic() + 20
    while not tier.prefetches.is_over("handle"):
        assert time.monotonic() < ends
        # Looked at first: what was written before this line was written before the forward had ended.
        written = any(p.read is not None and p.read.loaded for p in tier.prefetches._active.values())
        assert over.query() or not written
        tier.tick()
        time.sleep(0.001)
    assert tier.prefetches.take_loaded("handle")[0] == len(pages) * PAGE


def test_nothing_waits_for_the_device_on_the_schedulers_thread(
    world: World, tier: StorageTier, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Goal: ticks are asynchronous. Method: torch reports any wait while a page is published and loaded again behind a slow forward."""
    client, pages = publish_one(world, tier)
    world.tree.reset()
    world.allocator.clear()
    world.runtime.before_forward()
    monkeypatch.setenv("SGLANG_HISPARSE_SYNC_DEBUG", "error")
    from sglang_hisparse.sync_debug import no_device_sync, read_mode

    request.addfinalizer(read_mode.cache_clear)
    read_mode.cache_clear()
    if world.device == "cuda":
        torch.cuda._sleep(SLOW)
    with no_device_sync():
        began = time.monotonic()
        tier.request("handle", list(client.req.origin_input_ids), 0, (None, None))
        tier.tick()
        tier.bytes.pull_index(pages)
        took = time.monotonic() - began
    assert took < 0.1
    run_until(world, lambda: tier.prefetches.is_over("handle"))
