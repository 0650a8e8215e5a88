"""Fixtures of the memory tests: a small world on the CPU, whose pools are checked when a test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from runtime_world import World, make_world


@pytest.fixture
def world() -> Iterator[World]:
    """24 device pages, 96 logical ones, hot buffers of two pages, radix cache on."""
    with make_world() as world:
        yield world
