"""Goal: the copy engine brings every page to its host rows, and asks the driver for as little as it can. Method: the driver's call
replaced by memmove between two blocks of the CPU's memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_world import PAGE as PAGE_TOKENS
from runtime_world import Sizes, make_world

from sglang_hisparse.transfer import copy_engine
from sglang_hisparse.transfer.copy_engine import CopyEngine, runs_of

PAGE, PAGES, LAYERS = 48, 40, 3


def test_runs() -> None:
    """Goal: pages side by side on both sides are one copy, in whatever order they come. Method: by hand."""
    assert runs_of([], []) == [] and runs_of([5], [9]) == [(5, 9, 1)]
    assert runs_of([7, 5, 6], [3, 1, 2]) == [(5, 1, 3)]
    assert runs_of([5, 6, 7, 8], [1, 2, 9, 10]) == [(5, 1, 2), (7, 9, 2)]
    assert runs_of([5, 6, 8, 9], [1, 2, 3, 4]) == [(5, 1, 2), (8, 3, 2)]
    assert runs_of([5, 6], [2, 1]) == [(5, 2, 1), (6, 1, 1)], "descending on one side alone is no run"


@given(
    st.permutations(range(PAGES)).map(lambda pages: pages[:12]),
    st.permutations(range(PAGES)).map(lambda pages: pages[:12]),
    st.sets(st.integers(0, LAYERS * PAGES - 1), max_size=6),
    st.booleans(),
)
def test_every_page_reaches_its_home(host: list[int], device: list[int], borders: set[int], sort: bool) -> None:
    """Goal: all layers of the pages given and no other byte; no copy goes across a border. Method: random pages and borders."""
    if sort:
        host, device = sorted(host), sorted(device)
    homes, rows = np.zeros((LAYERS, PAGES, PAGE), np.uint8), np.random.default_rng(0).integers(1, 256, (LAYERS, PAGES, PAGE), np.uint8)
    starts = [homes[layer].ctypes.data for layer in range(LAYERS)], [rows[layer].ctypes.data for layer in range(LAYERS)]
    offsets = sorted({0, *(PAGE * border for border in borders)})
    calls = []

    def copy(target: int, source: int, num_bytes: int, stream: int) -> int:
        calls.append((target - starts[0][0], num_bytes, stream))
        ctypes.memmove(target, source, num_bytes)
        return 0

    assert CopyEngine(*starts, PAGE, offsets, copy).to_host(host, device, 77)
    expected = np.zeros_like(homes)
    expected[:, host] = rows[:, device]
    assert (homes == expected).all()
    assert not [one for one in calls for border in offsets if one[0] < border < one[0] + one[1]]
    assert {one[2] for one in calls} == {77} and sum(one[1] for one in calls) == LAYERS * 12 * PAGE
    assert len(calls) <= LAYERS * len(runs_of(host, device)) + len(offsets)


def test_scattered_and_refused_pages_are_left_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: the scheduler's thread makes no thousand calls, and a driver that refuses a copy is not asked again, while every page
    still gets home. Method: a driver that counts, and refuses the second call."""
    calls = []
    engine = CopyEngine([0], [0], PAGE, [0], lambda *given: calls.append(given) or 700 * (len(calls) == 2))
    monkeypatch.setattr(copy_engine, "MOST_CALLS", 2)
    assert not engine.to_host([1, 3, 5], [1, 3, 5], 0) and not calls
    assert not engine.to_host([1, 3], [1, 3], 0) and len(calls) == 2
    assert "CUresult 700" in caplog.text and not engine.to_host([1], [1], 0) and len(calls) == 2


def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: nothing changes unless it is asked for; then it has the tier's addresses and borders. Method: a pool on a GPU by name."""
    monkeypatch.setattr(copy_engine, "driver_copy", lambda: None)
    host = SimpleNamespace(num_bytes=20 << 30, page_bytes=73_728, layer_bases=lambda: torch.tensor([4096, 8192]))
    pool = SimpleNamespace(device="cuda:0", device_bases=lambda: torch.tensor([7, 9]))
    monkeypatch.delenv(copy_engine.ENGINE_VARIABLE, raising=False)
    assert CopyEngine.from_env(host, pool) is None
    monkeypatch.setenv(copy_engine.ENGINE_VARIABLE, "1")
    engine = CopyEngine.from_env(host, pool)
    assert engine._bases == [(4096, 7), (8192, 9)] and len(engine._borders) == 3
    assert all((border - 4096) % 73_728 == 0 for border in engine._borders)
    assert CopyEngine.from_env(host, SimpleNamespace(device="cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("elastic_border", [False, True])
def test_the_driver_brings_pages_to_their_homes(elastic_border: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what the kernel does, the copy engine does, also across the pieces of a border that moves. Method: three prompts, the
    second of which has ended, mirrored without the kernel; every row of every layer on the host against its token."""
    monkeypatch.setenv(copy_engine.ENGINE_VARIABLE, "1")
    sizes = Sizes(device_pages=400, ratio=3.0, context_pages=600)
    with make_world(sizes, device="cuda", elastic_border=elastic_border) as world:
        engine, done = world.runtime.worker.engine, []
        to_host = engine.to_host
        monkeypatch.setattr(engine, "to_host", lambda *told: done.append(to_host(*told)) or done[-1])
        clients = [world.start(60 * PAGE_TOKENS, seed=seed) for seed in range(3)]
        world.finish(clients.pop(1))
        clients.append(world.start(90 * PAGE_TOKENS, seed=9))
        world.settle()
        torch.cuda.synchronize()
        assert done and all(done)
        for client in clients:
            sealed = client.length // PAGE_TOKENS * PAGE_TOKENS
            ids = torch.tensor(world.row_of(client))[:sealed]
            for layer in range(sizes.layers):
                assert np.array_equal(world.host_rows(layer, ids), world.expected(client, np.arange(sealed), layer)), layer
