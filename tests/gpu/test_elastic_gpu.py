"""Goal: a captured graph goes on reading right rows and index keys while memory moves under it.

Method: the resolver's calls and a read of index-K in one CUDA graph, replayed after every step of a border that goes from one end
to the other; every byte against its token. The same calls run plainly on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from captured_decode import CapturedDecode, captured
from runtime_world import PAGE, Client, Sizes, World, make_world


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A pool whose border has several places: chunks of 64 KiB under the CPU's, of 2 MiB under the GPU's."""
    sizes = Sizes() if request.param == "cpu" else Sizes(device_pages=400, ratio=3.0, context_pages=600)
    with make_world(sizes, device=request.param, elastic_border=True) as world:
        yield world


class CapturedKeys:
    """A read of one index-K page of every leader, by number: a graph on a GPU, a plain call on the CPU."""

    def __init__(self, world: World) -> None:
        self.page = torch.zeros(1, dtype=torch.int64, device=world.device)
        self.views = [keys for keys in world.pool.index_k_with_scale_buffer if len(keys)]
        self._replay = captured(world, self._run)

    def _run(self) -> None:
        self.found = [keys.index_select(0, self.page) for keys in self.views]

    def read(self, page: int) -> list[torch.Tensor]:
        self.page.fill_(page)
        self._replay()
        return [found.cpu() for found in self.found]


def judge(world: World, graph: CapturedDecode, clients: list[Client], rng: np.random.Generator) -> None:
    """Replay for `clients`; each row that comes back holds what its token says, in every layer."""
    positions = torch.full((len(clients), world.sizes.top_k), -1, dtype=torch.int32)
    for row, client in enumerate(clients):
        chosen = rng.permutation(client.length)[: world.sizes.top_k]
        positions[row, : len(chosen)] = torch.from_numpy(chosen.astype(np.int32))
    for layer, rows in enumerate(graph.step(clients, positions)):
        for row, client in enumerate(clients):
            valid = positions[row] >= 0
            found = world.rows(layer, rows[row][valid].to(world.device))
            assert (found == world.expected(client, positions[row][valid].numpy(), layer)).all(), (layer, row)


def test_replays_across_all_places_of_the_border(world: World) -> None:
    """Goal: one graph for life. Method: two requests decode while others fill the cache; every page that is new is written and
    read through the captured read of index-K."""
    graph, keys, rng = CapturedDecode(world), CapturedKeys(world), np.random.default_rng(0)
    border = world.runtime.border.border
    size = (world.pool.border[-1].device_pages // 5) * PAGE
    clients = [world.start(size, seed=seed, max_new_tokens=5000) for seed in (1, 2)]
    places = {border.ended}
    for seed in range(3, 60):
        other = world.start(size, seed=seed)
        for page in world.pages(other):
            for view in keys.views:
                view[page].fill_(page % 251)
        for page in world.pages(other)[:: max(1, size // PAGE // 4)]:
            assert all((found == page % 251).all() for found in keys.read(page))
        world.finish(other)
        world.decode(*clients)
        judge(world, graph, clients, rng)
        places.add(border.ended)
        if border.is_at_end and not border.is_moving:
            break
    assert border.is_at_end and len(places) > 1
    world.decode(*clients)
    judge(world, graph, clients, rng)
    assert all(world.wrong_rows(client) == 0 for client in clients)
    assert world.runtime.border.counters()["border_chunks_moved"] > 0
