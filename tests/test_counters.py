"""Goal: what the device counts is read late but right, per request. Method: headers written by hand, events that come when told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from runtime_world import Sizes, World, make_world

from sglang_hisparse.kernels import row_counts
from sglang_hisparse.kernels.hot_state import HotGroupState
from sglang_hisparse.kernels.library import library_of
from sglang_hisparse.kernels.row_counts import COLUMNS, DEPTH, CountRing
from sglang_hisparse.transfer.hot_buffer import SAMPLE_PERIOD

RESIDENT, HOT, FETCHED, FAILED = 4, 5, 6, 7  # header columns


@dataclass
class Event:
    """A CUDA event that has happened once `done` says so."""

    done: bool = False
    records: int = 0

    def record(self) -> None:
        self.done, self.records = False, self.records + 1

    def query(self) -> bool:
        return self.done


@dataclass
class Device:
    """Two groups of one and three layers, four slots; samples arrive when `finish` is called, in the order of launches."""

    header: torch.Tensor = field(default_factory=lambda: torch.zeros((2, 4, 32), dtype=torch.int32))

    def __post_init__(self) -> None:
        self.ring = CountRing(self.header, [1, 3])
        self.ring._events = [Event() for _ in range(DEPTH)]

    def count(self, group: int, slot: int, column: int, number: int) -> None:
        wrapped = int(self.header[group, slot, column]) + number
        self.header[group, slot, column] = (wrapped + 2**31) % 2**32 - 2**31

    def finish(self) -> None:
        for event in self.ring._events:
            event.done = True


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def test_sums_over_groups(device: str) -> None:
    """Goal: each slot's counts over all groups, rows also weighted by layers, modulo 2**32. Method: random headers, numpy."""
    header = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, (67, 37, 32)).astype(np.int32))
    layers = np.arange(67) % 5 + 1
    out = torch.zeros((37, 5), dtype=torch.int32, pin_memory=device == "cuda")
    on_device = header.to(device)
    library_of(on_device).sum_counters(on_device, torch.from_numpy(layers.astype(np.int32)).to(device), out)
    if device == "cuda":
        torch.cuda.synchronize()
    counts = header[:, :, RESIDENT : FAILED + 1].numpy().astype(np.int64)
    want = np.concatenate([counts.sum(axis=0), (counts[:, :, 2] * layers[:, None]).sum(axis=0)[:, None]], axis=1)
    assert np.array_equal(out.numpy().view(np.uint32), (want % 2**32).astype(np.uint32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.zeros((4, 4), dtype=torch.int32)}, "out columns has size 4, expected 5"),
        ({"group_layers": torch.ones(3, dtype=torch.int32)}, "group_layers has size 3, expected 2"),
        ({"header": torch.zeros((2, 4, 64), dtype=torch.int32)[..., ::2]}, "header must be contiguous"),
    ],
)
def test_wrong_tables_are_named(change: dict, message: str) -> None:
    """Goal: nothing is written out of bounds. Method: one wrong table at a time."""
    arguments = {
        "header": torch.zeros((2, 4, 32), dtype=torch.int32),
        "group_layers": torch.ones(2, dtype=torch.int32),
        "out": torch.zeros((4, 5), dtype=torch.int32),
    } | change
    with pytest.raises(ValueError, match=message):
        library_of(arguments["header"]).sum_counters(arguments["header"], arguments["group_layers"], arguments["out"])


def test_nothing_is_told_before_it_has_arrived() -> None:
    """Goal: a place that the device still writes is not read. Method: an event that has not happened, then has."""
    device = Device()
    device.count(0, 1, FETCHED, 10)
    device.count(1, 1, FETCHED, 7)
    assert device.ring.sample()
    assert device.ring.latest().by_slot.sum() == 0
    device.finish()
    assert device.ring.latest().by_slot[1].tolist() == [0, 0, 17, 0, 10 + 3 * 7]


def test_a_ring_that_is_lapped_loses_nothing() -> None:
    """Goal: counts stay exact whoever reads them, and however seldom. Method: three laps unread, past 2**31 on the way."""
    device, expected = Device(), 0
    for _ in range(3 * DEPTH):
        device.count(1, 2, HOT, 2**28)
        expected += 2**28
        assert device.ring.sample()
        device.finish()
    device.count(1, 2, HOT, 99)  # not sampled
    assert expected > 2**32
    assert device.ring.latest().total("entries_hot") == expected == device.ring.latest().by_slot[2, 1]


def test_no_sample_is_taken_over_while_it_is_under_way() -> None:
    """Goal: a device that hangs behind costs samples, never truth. Method: events that do not come; one place too many."""
    device = Device()
    for _ in range(DEPTH):
        device.count(0, 0, FAILED, 1)
        assert device.ring.sample()
    records = [event.records for event in device.ring._events]
    assert not device.ring.sample() and [event.records for event in device.ring._events] == records == [1] * DEPTH
    device.finish()
    assert device.ring.latest().total("entries_failed") == DEPTH
    device.count(0, 0, FAILED, 5)
    assert device.ring.sample()
    device.finish()
    assert device.ring.latest().total("entries_failed") == DEPTH + 5


def test_samples_that_cross_on_two_streams_add_up() -> None:
    """Goal: an older count that lands later does no harm. Method: a counter that seems to fall and rises again."""
    device = Device()
    for number in (100, -40, 60):
        device.count(0, 3, RESIDENT, number)
        device.ring.sample()
        device.finish()
        device.ring.poll()
    assert device.ring.latest().total("entries_resident") == 120


def test_a_restart_forgets_what_is_under_way() -> None:
    """Goal: counts of the time before are in no total. Method: samples under way and landed, then counters set to zero."""
    device = Device()
    device.count(0, 0, HOT, 50)
    device.ring.sample()
    device.finish()
    device.ring.poll()
    device.ring.sample()
    device.header.zero_()
    device.ring.restart()
    device.count(0, 0, HOT, 3)
    device.ring.sample()
    device.finish()
    assert device.ring.latest().total("entries_hot") == 3


def test_rates_are_those_of_the_window() -> None:
    """Goal: rows per decode step of the last steps, by slot. Method: a rate that changes; prefills between are no steps."""
    device = Device()
    assert device.ring.rates(32) is None
    for step in range(40):
        device.finish()
        device.ring.before_forward(0, 4)  # a prefill
        device.finish()
        device.ring.before_forward(1, 4)
        device.count(0, 1, FETCHED, 5 if step < 20 else 11)
        device.count(1, 2, FETCHED, 2)
        device.count(0, 1, HOT, 1)
    device.finish()
    rates = device.ring.rates(8)
    assert (rates.step, rates.steps) == (36, 8)
    assert rates.of_slots("rows_fetched").tolist() == [0, 11, 2, 0]
    assert rates.total("rows_fetched") == 13 and rates.total("layer_rows_fetched") == 17
    assert rates.total("entries_hot") == 1
    longer = device.ring.rates(24)
    assert longer.steps == 24 and longer.of_slots("rows_fetched")[1] == (8 * 5 + 16 * 11) / 24


def test_the_state_of_a_server_counts_in_the_same_columns() -> None:
    """Goal: totals, slots and rates are one count. Method: a state of two groups, counted by hand."""
    state = HotGroupState.allocate(3, 32, "cpu", num_groups=2, group_layers=[2, 4])
    state.before_forward(1, 1)
    state[0].header[1, RESIDENT : FAILED + 1] = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    state[1].header[1, RESIDENT : FAILED + 1] = torch.tensor([10, 20, 30, 40], dtype=torch.int32)
    state.before_forward(1, 1)
    assert state.counters() == dict(zip(COLUMNS, [11, 22, 33, 44, 2 * 3 + 4 * 30], strict=True))
    assert state.latest().by_slot[1].tolist() == [11, 22, 33, 44, 126]
    state.forget_counts()
    state.counters()
    assert set(state.counters().values()) == {0}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """24 device pages, 96 logical ones, hot buffers of two pages, two layers a group."""
    with make_world(Sizes(), device=request.param) as world:
        yield world


def test_a_request_that_misses_shows_in_the_rates(world: World) -> None:
    """Goal: the runtime samples while it decodes, and tells who fetches. Method: one request spilled, one resident."""
    spilled, resident = world.client(world.prompt(900, seed=1)), world.client(world.prompt(200, seed=2))
    world.extend(spilled, resident)
    for client in (spilled, resident):
        world.publish(client)
    assert world.runtime.make_room(world.num_free_device + 4)
    for step in range(4 * SAMPLE_PERIOD):
        world.decode(spilled, resident)
        positions = torch.stack([(torch.arange(64) + 64 * step) % 256, torch.arange(64)])
        for leader in (0, 2):
            world.resolve([spilled, resident], positions, leader)
    if world.device != "cpu":
        torch.cuda.synchronize()
    rates = world.runtime.hot.step_rates()
    assert rates is not None and rates.step % SAMPLE_PERIOD == 0
    fetched = rates.of_slots("rows_fetched")
    assert fetched[spilled.slot] > 0 and fetched[resident.slot] == 0
    assert rates.total("layer_rows_fetched") == pytest.approx(2 * rates.total("rows_fetched"))
    assert rates.of_slots("entries_resident")[resident.slot] == 64 * 2, "two groups"


def test_depth_and_columns_fit_the_kernels() -> None:
    """Goal: Python and C++ agree on the table. Method: a table of another width is refused, this one is taken."""
    device = Device()
    assert device.ring._places.shape == (DEPTH, 4, len(row_counts.COLUMNS)) and device.ring.sample()
