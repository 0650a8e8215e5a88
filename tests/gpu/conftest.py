"""Fixtures of the GPU tests: each also runs on the CPU, which shows that the test itself is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from runtime_world import Sizes, World, make_world


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """24 device pages, 96 logical ones, hot buffers of two pages, two layers a group."""
    with make_world(Sizes(), device=request.param) as world:
        yield world
