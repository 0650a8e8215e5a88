"""Goal: the resolver answers as its contract says, on every backend. Method: worlds of requests, each step against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from resolver_world import Shape, World
from sglang_hisparse.kernels.resolver import CopyMethod

SHAPES = [
    Shape(),
    Shape(k=1, buffer_size=4, page_size=4, rows=2),
    Shape(k=7, buffer_size=8, page_size=8, row_bytes=16, layers=1),
    Shape(k=33, buffer_size=64, page_size=1, max_pages=90, rows=3, num_slots=3),
    Shape(k=64, buffer_size=64, page_size=16, max_pages=9, layers=3, row_bytes=80, host_row_bytes=112),
]
FETCHES = [(1, CopyMethod.LOADS), (2, CopyMethod.LOADS), (4, CopyMethod.BULK), (8, CopyMethod.LOADS)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"k{shape.k}-B{shape.buffer_size}-P{shape.page_size}")
def test_random_lives(backend: str, shape: Shape) -> None:
    """Goal: no mixture of requests, holes, repeats and absurd positions breaks a clause. Method: random worlds, seeded."""
    for seed in range(2):
        world = World(shape, backend, seed)
        for _ in range(12):
            world.random_step()


@pytest.mark.parametrize(("blocks", "method"), FETCHES, ids=lambda value: getattr(value, "name", str(value)))
def test_every_way_to_fetch(backend: str, blocks: int, method: CopyMethod) -> None:
    """Goal: how rows travel changes no answer. Method: the same world over cluster sizes and copy methods."""
    world = World(Shape(k=40, buffer_size=64, page_size=8, rows=2, num_slots=2, cluster_blocks=blocks, copy_method=method), backend, 5)
    for _ in range(3):
        world.random_step()
