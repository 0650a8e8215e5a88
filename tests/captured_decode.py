"""One captured decode step of a world: what a CUDA graph reads must stay right whatever the plans change between replays.

Shared by the tests of gpu/; it judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from runtime_world import PAGE, Client, World

ROWS = 4  # rows of the captured batch


def captured(world: World, run: Callable[[], None]) -> Callable[[], None]:
    """`run` as a CUDA graph on a GPU, as it is on the CPU."""
    run()
    if world.device == "cpu":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class CapturedDecode:
    """The resolver calls of one decode step over fixed tensors: a CUDA graph on a GPU, plain calls on the CPU."""

    def __init__(self, world: World) -> None:
        self.world = world
        zeros: Callable[..., torch.Tensor] = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=world.device)
        self.slots, self.lengths = zeros(ROWS).long(), zeros(ROWS).long()
        self.top_k = zeros(ROWS, world.sizes.top_k)
        world.metadata.real_page_table = zeros(ROWS, world.sizes.context_pages)
        self.outputs: list[torch.Tensor] = []
        self._replay = captured(world, self._run)

    def _run(self) -> None:
        self.outputs = [
            self.world.runtime.swap_in_selected_pages(self.slots, self.lengths, self.top_k, layer).clone()
            for layer in range(self.world.sizes.layers)
        ]

    def step(self, clients: list[Client], positions: torch.Tensor) -> list[np.ndarray]:
        """Fill the fixed tensors for `clients`, leave the other rows as padding, run; rows of every layer [ROWS, k]."""
        world, count = self.world, len(clients)
        world.runtime.num_real_reqs.fill_(count)
        self.slots.zero_()
        self.lengths.fill_(1)
        self.top_k.zero_()
        world.metadata.real_page_table.zero_()
        for row, client in enumerate(clients):
            self.slots[row], self.lengths[row] = client.slot, client.length
            pages = world.request_pool.req_to_token[client.slot, : client.length : PAGE] // PAGE
            world.metadata.real_page_table[row, : len(pages)] = pages
        self.top_k[:count] = positions.to(world.device)
        self._replay()
        return [output.cpu() for output in self.outputs]
