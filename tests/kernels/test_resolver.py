"""Goal: the resolver answers as its contract says, on every backend. Method: worlds of requests, each step against the oracle."""

from __future__ import annotations

from dataclasses import replace

import kernel_checks
import numpy as np
import pytest
import torch
from oracle import OracleError
from resolver_world import Shape, World

from sglang_hisparse.kernels.resolver import HotGroupState, resolve

NAMED = {
    "ids": lambda value: (
        getattr(value, "name", None) or (f"k{value.k}-B{value.buffer_size}" if isinstance(value, Shape) else str(value))
    )
}


@pytest.mark.parametrize("shape", kernel_checks.SMALL, **NAMED)
def test_random_lives(backend: str, shape: Shape) -> None:
    """Goal: no mixture of requests, holes, repeats and absurd positions breaks a clause. Method: random worlds, seeded."""
    for seed in range(2):
        kernel_checks.lives(backend, shape, seed, 8)


@pytest.mark.parametrize("row_bytes", [48, 1040])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_every_way_to_fetch(backend: str, blocks: int, row_bytes: int) -> None:
    """Goal: how rows travel changes no answer. Method: one world over cluster sizes, rows of up to and above 1,024 bytes."""
    shape = Shape(k=40, buffer_size=64, page_size=8, rows=2, num_slots=2, cluster_blocks=blocks, row_bytes=row_bytes)
    world = World(shape, backend, 5)
    for _ in range(3):
        world.decode_step()


@pytest.mark.parametrize("shape", kernel_checks.SERVING, **NAMED)
def test_serving_sizes(backend: str, shape: Shape) -> None:
    """Goal: real sizes work, up to the largest buffer. Method: decode steps of which a share changes, all checked."""
    world = World(replace(shape, rows=1, row_bytes=16, layers=1), backend, 1)
    for _ in range(3):
        world.decode_step()


def test_all_resident_rows_touch_no_hot_state(backend: str) -> None:
    """Goal: full residency costs a translation only. Method: poisoned tags and stamps stay as they are."""
    world = World(Shape(), backend, 0)
    world.admit(2, num_pages=20, resident=1.0)
    world.state.tags.fill_(12345)
    world.state.stamps.fill_(77)
    world.step({2: np.arange(world.shape.k, dtype=np.int32)})
    assert bool((world.state.tags == 12345).all()) and bool((world.state.stamps == 77).all())
    assert world.state.header[2, :4].tolist() == [1, 0, 0, 0]  # the reset at admission, and no step counted


def test_host_only_row_without_a_lease_fails_alone(backend: str) -> None:
    """Goal: a missing lease spoils one entry, not the batch. Method: half the pages host-only, no lease; errors counted."""
    world = World(Shape(), backend, 3)
    world.admit(1, num_pages=20, resident=0.5, leased=False)
    out = world.step({1: np.arange(0, 64, 4, dtype=np.int32)})
    failed = int((out[0] == -1).sum())
    assert 0 < failed < world.shape.k
    assert world.state.header[1, 4:8].tolist() == [world.shape.k - failed, 0, 0, failed]


@pytest.mark.parametrize("slot", [-1, 6, 2**31 - 1])
def test_unknown_request_slot_fails_at_slot_0(backend: str, slot: int) -> None:
    """Goal: an absurd slot number reads and writes nothing. Method: every entry -1, counted at slot 0."""
    world = World(Shape(), backend, 0)
    world.admit(2, num_pages=20, resident=0.5)
    out = world.step({2: np.arange(world.shape.k, dtype=np.int32)}, strange_slot=slot)
    assert bool((out == -1).all())
    assert world.state.header[0, 7] == world.shape.k


def test_least_recently_used_rows_leave(backend: str) -> None:
    """Goal: replacement is LRU to one unit of turnover. Method: fill, use one half, miss as many as the other half."""
    shape = Shape(k=16, buffer_size=32, page_size=16, max_pages=8, rows=1, num_slots=1)
    world = World(shape, backend, 0)
    world.admit(0, num_pages=8, resident=0.0)
    first, second, third = (np.arange(start, start + 16, dtype=np.int32) for start in (0, 16, 32))
    for positions in (first, second, first, third):
        world.step({0: positions})
    ids = [world.requests[0].pages[p // 16] * 16 + p % 16 for p in (*first, *third)]
    assert sorted(world.state.tags[0].tolist()) == sorted(ids)


def test_reset_forgets_a_slot(backend: str) -> None:
    """Goal: a new lease never sees rows of the last one. Method: the same positions again after a reset are fetched again."""
    world = World(Shape(), backend, 0)
    world.admit(1, num_pages=20, resident=0.0)
    positions = {1: np.arange(world.shape.k, dtype=np.int32)}
    for _ in range(2):
        world.step(positions)
    assert world.state.header[1, 6] == world.shape.k
    world.state.reset(torch.tensor([1], device=world.device))
    world.oracle.reset([1])
    world.kv.fill_(0x11)
    world.step(positions)
    assert world.state.header[1, 6] == 2 * world.shape.k


def test_table_says_what_tags_say(device_code: str) -> None:
    """Goal: the table neither loses nor keeps a row. Method: random lives of the device code, entries against tags."""
    assert kernel_checks.tables(device_code)


def test_counters_add_up_over_groups() -> None:
    """Goal: totals are exact one call later, past a wrap of the 32-bit counts. Method: known header values."""
    state = HotGroupState.allocate(3, 32, "cpu", num_groups=2)
    state[0].header[1, 4:8] = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    state[1].header[2, 4:8] = torch.tensor([2**31 - 1, 0, 1, 0], dtype=torch.int32)
    assert set(state.counters().values()) == {0}
    assert list(state.counters().values()) == [2**31 + 4, 6, 8, 8, 8]
    state[1].header[2, 4] = -(2**31) + 9  # ten more, modulo 2**32
    state.counters()
    assert list(state.counters().values()) == [2**31 + 14, 6, 8, 8, 8]


def test_state_bytes_are_what_is_allocated() -> None:
    """Goal: sizing charges the truth. Method: storage of an allocated state."""
    for num_slots, buffer_size, groups in ((3, 32, 2), (2, 10, 1), (5, 4096, 3)):
        state = HotGroupState.allocate(num_slots, buffer_size, "cpu", num_groups=groups)
        tensors = (state[0].tags, state[0].stamps, state[0].header, state[0].table)
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == groups * HotGroupState.bytes(
            num_slots, buffer_size
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": "top_k"}, ValueError, "out must not alias top_k"),
        ({"row_bytes": 40}, ValueError, "row_bytes must be a multiple of 16 up to 65536, not 40"),
        ({"page_size": 3}, ValueError, "page_size must be a power of two"),
        ({"host_row_bytes": 16}, ValueError, "host_row_bytes must be a multiple of 16 and at least row_bytes, not 16"),
        ({"cluster_blocks": 3}, ValueError, "cluster_blocks must be 0 .automatic., 1, 2, 4 or 8, not 3"),
        ({"seq_lens": torch.zeros(5)}, TypeError, "seq_lens must be int32 or int64"),
        ({"page_table": torch.zeros(9, dtype=torch.int64)}, TypeError, "page_table must be int32"),
        ({"hot_pages": torch.zeros((6, 7), dtype=torch.int32)}, ValueError, "hot_pages columns has size 7, expected 8"),
        ({"group": HotGroupState.allocate(6, 12, "cpu")}, ValueError, r"hold k \(16\) to 32768 rows"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named(change: dict, error: type[Exception], message: str) -> None:
    """Goal: a mistake is told by argument, before anything is written. Method: one wrong argument at a time."""
    world = World(Shape(), "cpu", 0)
    world.admit(0, num_pages=4, resident=0.0)
    arguments = world.launch_arguments({0: np.zeros(16, dtype=np.int32)})
    change = {name: arguments[value] if isinstance(value, str) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        resolve(**{**arguments, **change})
    assert world.state.header.sum() == 1  # the reset at admission


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check",
    [kernel_checks.same_as_cpu, kernel_checks.graph_replay, kernel_checks.no_sync],
    ids=lambda check: check.__name__,
)
def test_on_a_gpu(check) -> None:
    """Goal: the CUDA library equals the CPU library, in captured graphs too, and never waits. Method: shared checks."""
    assert check("cuda")


def _wrong_row(arguments: dict) -> None:
    arguments["out"][0, 0] = arguments["out"][0, 1]


def _wrong_byte(arguments: dict) -> None:
    world_row = int(arguments["out"][0, 0])
    arguments["kv"][0, world_row, 0] ^= 1


def _wrong_count(arguments: dict) -> None:
    arguments["group"].header[0, 6] += 1


def _wrong_tag(arguments: dict) -> None:
    arguments["group"].tags[0, 31] = 9


@pytest.mark.parametrize("fault", [_wrong_row, _wrong_byte, _wrong_count, _wrong_tag], ids=lambda fault: fault.__name__)
def test_checks_bite(fault) -> None:
    """Goal: the checks above can fail. Method: one fault put in after a right answer, each must be seen."""
    world = World(Shape(), "cpu", 0)
    world.admit(0, num_pages=20, resident=0.0)

    def launch(**arguments: object) -> None:
        resolve(**arguments)
        fault({**arguments, "kv": world.kv})

    with pytest.raises((OracleError, AssertionError)):
        world.step({0: np.arange(16, dtype=np.int32)}, launch=launch)
