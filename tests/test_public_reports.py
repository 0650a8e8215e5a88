"""Goal: public reports about HiSparse and its neighbours that no other test covers. Method: each with its own smallest case.

tests/README.md lists all reports and the test that guards each.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.checks import assert_outputs
from harness.hisparse import engine_for, finish, submit
from runtime_world import Sizes, World, make_world


@pytest.fixture
def world() -> Iterator[World]:
    with make_world() as world:
        yield world


def test_an_idle_rank_runs_a_batch_of_padding(world: World) -> None:
    """Goal: no real row, no read, no fetch, no count. Method: captured size 2, zero real rows, slots and pages of a request."""
    client = world.start(700)
    old = world.go_mixed(client)
    top_k = torch.tensor(old[:64], dtype=torch.int32).view(1, -1).repeat(2, 1)
    slots, lengths, top_k = world.top_k_inputs([client, client], top_k)
    world.runtime.num_real_reqs.fill_(0)
    before = [group.tags.clone() for group in map(world.runtime.hot.state.__getitem__, range(2))]
    counts = [world.runtime.counters() for _ in range(2)][1]
    for layer in range(world.sizes.layers):
        assert (world.runtime.swap_in_selected_pages(slots, lengths, top_k, layer) == -1).all()
    for group, tags in enumerate(before):
        assert torch.equal(world.runtime.hot.state[group].tags, tags)
    after = [world.runtime.counters() for _ in range(2)][1]
    assert {name: after[name] - counts[name] for name in ("rows_fetched", "rows_hot", "rows_resident", "errors")} == {
        "rows_fetched": 0, "rows_hot": 0, "rows_resident": 0, "errors": 0,
    }  # fmt: skip
    world.finish(client)


def test_requests_that_were_accepted_find_host_rows() -> None:
    """Goal: the 39th request does as well as the first. Method: four at a time, ratio 11, prompts of a reported load / 64."""
    rng = np.random.default_rng(39)
    lengths = rng.integers(46_000 // 64, 63_000 // 64, 45).tolist()
    with engine_for(ratio=11, device_pages=24, hot_pages=2, radix=False, max_running_requests=4) as engine:
        for number, length in enumerate(lengths):
            engine.run_until(lambda: sum(not handle.finished for handle in engine.handles.values()) < 4, max_steps=500)
            submit(engine, [length], 12, seed=number)
        engine.run_until_idle()
        handles = list(engine.handles.values())
        assert len(handles) == 45
        assert_outputs(handles)
        assert not any(handle.retractions for handle in handles)
        finish(engine)


def test_the_handshake_of_copies_does_not_grow_with_steps() -> None:
    """Goal: what a step leaves behind is bounded. Method: two thousand steps of requests that come and go; count what is kept."""
    with make_world(Sizes(device_pages=24), radix=False) as world:
        world.writes_rows = False
        kept = []
        for seed in range(30):
            clients = [world.start(300 + seed, seed=seed), world.start(500, seed=seed + 100)]
            for _ in range(66):
                world.decode(*clients)
            for client in clients:
                world.finish(client, checkpoint=False)
            worker, residency = world.runtime.worker, world.residency
            kept.append(
                [
                    len(held)
                    for held in (worker._batches, residency._transfers, residency._in_flight, residency._enqueued_at)
                ]
            )
        assert world.residency.step > 2000 and world.residency.counters.pages_mirrored > 300
        assert max(map(max, kept)) <= 2, kept


def test_term_leaves_through_the_orderly_end(world: World) -> None:
    """Goal: a server that is told to end unregisters its memory. Method: send TERM; the loop's flag; then SGLang's release."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        scheduler = SimpleNamespace(tree_cache=world.tree, enable_hisparse=True, gracefully_exit=False)
        world.runtime.bind_scheduler(scheduler)
        client = world.start(700)
        world.go_mixed(client)
        os.kill(os.getpid(), signal.SIGTERM)
        assert scheduler.gracefully_exit is True
        world.finish(client)
        world.runtime.destroy()
        assert world.runtime.mem_pool_host.kv_buffer is None and not world.runtime.worker.in_flight
    finally:
        signal.signal(signal.SIGTERM, before)
