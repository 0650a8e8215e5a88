"""Goal: decode graphs without the page table of single rows give attention what those with it do.

Method: SGLang's own backend twice over one world, its table of single rows left out in one of them; graphs of two sizes in turn, so
that rows of the table of pages that they share hold what the other has left; every row against its token.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decode_graph_backend import GraphsOfSizes, backend_of, patch_cuda
from runtime_world import PAGE, World

from sglang_hisparse.transfer.decode_graphs import around_init_cuda_graph_state

ROWS = 4


def graphs_of(world: World, *, hooked: bool) -> GraphsOfSizes:
    backend = backend_of(world)
    original = type(backend).init_cuda_graph_state
    original = getattr(original, "__wrapped__", original)  # where other tests of this process have applied the hooks
    if hooked:
        around_init_cuda_graph_state(original, backend, ROWS, ROWS)
    else:
        original(backend, ROWS, ROWS)
    return GraphsOfSizes(world, backend, (2, ROWS))


def test_attention_gets_the_same_rows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no reader of a decode graph misses the table. Method: replay both while requests grow, spill, end and enter."""
    patch_cuda(monkeypatch)
    plain, ours = graphs_of(world, hooked=False), graphs_of(world, hooked=True)
    assert plain.backend.decode_cuda_graph_metadata["page_table"].shape == (ROWS, world.request_pool.req_to_token.shape[1])
    assert ours.backend.decode_cuda_graph_metadata["page_table"] is None
    world.runtime.hot.forget_counts()
    clients = [world.start(size, seed=seed) for seed, size in enumerate((200, 500, 450))]
    rng = np.random.default_rng(0)
    for step in range(16):
        if step == 4:
            assert world.runtime.make_room(10)
        if step == 9:
            world.finish(clients.pop(0), checkpoint=False)
            clients.append(world.start(130, seed=9))
        world.decode(*clients)
        batch = clients[step % 2 :]  # three rows, padded to four, and two
        positions = torch.full((len(batch), world.sizes.top_k), -1, dtype=torch.int32)
        for row, client in enumerate(batch):
            chosen = rng.permutation(client.length)[: world.sizes.top_k - row]
            positions[row, : len(chosen)] = torch.from_numpy(chosen.astype(np.int32))
        both = [graphs.step(batch, positions) for graphs in (plain, ours)]
        for row, client in enumerate(batch):
            live = -(-client.length // PAGE)
            assert ours.backend.forward_metadata.real_page_table[row, :live].tolist() == world.pages(client)[:live], "what the indexer reads"
        for layer, (with_table, without) in enumerate(zip(*both, strict=True)):
            assert torch.equal(with_table, without), (step, layer)
            for row, client in enumerate(batch):
                valid = positions[row] >= 0
                found = world.rows(layer, without[row][valid].to(world.device))
                assert (found == world.expected(client, positions[row][valid].numpy(), layer)).all(), (step, layer, row)
    counters = world.runtime.counters()
    if world.device != "cpu":
        torch.cuda.synchronize()
        counters = world.runtime.counters()
    assert counters["errors"] == 0 and min(counters["rows_fetched"], counters["rows_hot"], counters["rows_resident"]) > 0


@pytest.mark.gpu
def test_the_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the table's bytes are free, and were never taken. Method: torch's own count of a server's tables: 512 rows of 163,840."""
    from types import SimpleNamespace

    from runtime_world import Sizes, make_world

    patch_cuda(monkeypatch)
    taken = []
    with make_world(Sizes(), device="cuda") as world:
        for hooked in (False, True):
            backend = backend_of(world, req_to_token=SimpleNamespace(shape=(1, 163_840)))
            original = getattr(type(backend).init_cuda_graph_state, "__wrapped__", type(backend).init_cuda_graph_state)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            if hooked:
                around_init_cuda_graph_state(original, backend, 512, 512)
            else:
                original(backend, 512, 512)
            taken.append(torch.cuda.max_memory_allocated() - before)
    table = 512 * 163_840 * 4
    assert taken[0] >= table > table // 50 > taken[1]
