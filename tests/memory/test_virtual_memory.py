"""Goal: memory moves between address ranges without losing a byte, and what is not mapped cannot be touched.

Method: the CPU twin moves real pages of memory under torch tensors; the GPU's driver runs the same tests where there is one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from sglang_hisparse.errors import HiSparseError, InvariantError
from sglang_hisparse.memory import virtual_memory
from sglang_hisparse.memory.virtual_memory import Driver, HostTwin, Range, VirtualMemory, probe


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def memory(request: pytest.FixtureRequest) -> Iterator[VirtualMemory]:
    """The twin, or the driver of a GPU."""
    if request.param == "cpu":
        twin = HostTwin()
        yield twin
        assert twin.num_handles == 0
        twin.close()
        return
    torch.zeros(1, device="cuda")  # makes the context current
    yield Driver(torch.cuda.current_device())
    torch.cuda.synchronize()


def settle() -> None:
    """Nothing launched reads or writes a chunk any more: who takes one away owes that to the driver."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def test_a_chunk_keeps_its_bytes_where_it_goes(memory: VirtualMemory) -> None:
    """Goal: a move copies nothing and loses nothing. Method: fill a chunk, map it elsewhere, read it there, and its neighbours."""
    giver, taker = Range(memory, 4, 2), Range(memory, 5, 1)
    for place in (2, 3):
        giver.put(place, memory.create(memory.chunk_bytes))
    giver.tensor().copy_(torch.arange(4).repeat_interleave(memory.chunk_bytes))
    taker.chunk(0).fill_(9)
    settle()
    taker.put(1, giver.take(3))
    assert (giver.num_mapped, taker.num_mapped) == (3, 2)
    assert (taker.chunk(1) == 3).all() and (taker.chunk(0) == 9).all()
    assert all((giver.chunk(place) == place).all() for place in range(3))
    taker.chunk(1).fill_(7)
    settle()
    giver.put(3, taker.take(1))
    assert (giver.chunk(3) == 7).all()
    settle()
    giver.close()
    taker.close()


def test_a_tensor_outlives_the_moves_under_it(memory: VirtualMemory) -> None:
    """Goal: addresses are fixed for life. Method: one tensor over a range, before and after another chunk came to its place."""
    held = Range(memory, 3, 1)
    values = held.tensor()
    address = values.data_ptr()
    for filling in (5, 6):
        held.put(2, memory.create(memory.chunk_bytes))
        values[2 * memory.chunk_bytes :].fill_(filling)
        assert int(values[-1]) == filling and held.tensor().data_ptr() == address
        settle()
        memory.release(held.take(2))
    held.close()


def test_places_are_guarded(memory: VirtualMemory) -> None:
    """Goal: bookkeeping errors stop before the driver. Method: every wrong place, by name."""
    held = Range(memory, 4, 2)
    handle = memory.create(memory.chunk_bytes)
    for place in (-1, 0, 1, 4):
        with pytest.raises(InvariantError, match=f"place {place} "):
            held.put(place, handle)
    held.put(3, handle)
    with pytest.raises(InvariantError, match="place 3 "):
        held.put(3, handle)
    for place in (0, 2):
        with pytest.raises(InvariantError, match=f"place {place} "):
            held.take(place)
    held.close()
    for fixed in (0, 5):
        with pytest.raises(InvariantError, match="memory for life"):
            Range(memory, 4, fixed)


def test_memory_that_is_refused_leaves_nothing_behind() -> None:
    """Goal: a failed start can be reported and left. Method: the twin refuses to create, and to map."""
    for call in ("create", "map"):
        twin = HostTwin()
        freed: list[int] = []

        def refuse(*arguments: int, call: str = call) -> int:
            raise HiSparseError(f"no {call}")

        original = twin.free
        setattr(twin, call, refuse)
        twin.free = lambda address, size, original=original, freed=freed: (freed.append(size), original(address, size))  # type: ignore[method-assign]
        with pytest.raises(HiSparseError, match=f"no {call}"):
            Range(twin, 4, 2)
        assert freed == [4 * twin.chunk_bytes] and twin.num_handles == 0
        twin.close()


def test_the_twin_refuses_what_the_driver_would() -> None:
    """Goal: a test on the twin means something. Method: a handle of another size, released twice, and odd chunks."""
    twin = HostTwin()
    address, handle = twin.reserve(2 * twin.chunk_bytes), twin.create(twin.chunk_bytes)
    with pytest.raises(HiSparseError, match="not 131072"):
        twin.map(address, handle, 2 * twin.chunk_bytes)
    twin.release(handle)
    with pytest.raises(HiSparseError, match="twice"):
        twin.release(handle)
    with pytest.raises(InvariantError, match="machine's pages"):
        HostTwin(1000)
    twin.free(address, 2 * twin.chunk_bytes)
    twin.close()


def test_a_place_without_memory_faults() -> None:
    """Goal: whoever reads a place that was taken away is found out. Method: a process of its own does, and dies of it."""
    program = (
        "from sglang_hisparse.memory.virtual_memory import HostTwin, Range\n"
        "memory = HostTwin()\n"
        "held = Range(memory, 3, 1)\n"
        "held.put(2, memory.create(memory.chunk_bytes))\n"
        "values = held.tensor()\n"
        "values[-1] = 1\n"
        "print(int(values[-1]), flush=True)\n"
        "held.take(2)\n"
        "print(int(values[-1]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "1\n"), ended.stderr


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a machine without a GPU says so. Method: no library of that name."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(virtual_memory.ctypes, "CDLL", missing)
    with pytest.raises(HiSparseError, match="elastic_border: the CUDA driver cannot be loaded"):
        Driver(0)


class _FakeLibrary:
    """A driver that refuses one call."""

    def __init__(self, refused: str, granularity: int = 2 << 20) -> None:
        self.refused, self.granularity, self.called = refused, granularity, []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.called.append(name)
            if name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = self.granularity
            return 2 if name == self.refused else 0

        return call


def test_refusals_of_the_driver_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the error says which call and why, and a half-made mapping is undone. Method: a driver that refuses one call."""
    for refused in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"):
        library = _FakeLibrary(refused)
        monkeypatch.setattr(virtual_memory.ctypes, "CDLL", lambda name, library=library: library)
        driver = Driver(0)
        with pytest.raises(HiSparseError, match=f"{refused}: out of memory"):
            driver.map(1 << 30, driver.create(2 << 20), 2 << 20)
            driver.unmap(1 << 30, 2 << 20)
        assert (library.called[-1] == "cuMemUnmap") == (refused in ("cuMemSetAccess", "cuMemUnmap"))
    monkeypatch.setattr(virtual_memory.ctypes, "CDLL", lambda name: _FakeLibrary("", 1 << 25))
    with pytest.raises(HiSparseError, match="33554432 bytes"):
        Driver(0)


def test_a_probe_finds_each_refusal_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what a border needs is asked for once, and given back. Method: a willing driver's calls, then one that refuses each."""
    willing = _FakeLibrary("")
    monkeypatch.setattr(virtual_memory.ctypes, "CDLL", lambda name: willing)
    probe(Driver(0))
    pairs = (("cuMemAddressReserve", "cuMemAddressFree"), ("cuMemCreate", "cuMemRelease"), ("cuMemMap", "cuMemUnmap"))
    assert all(willing.called.count(name) == 1 for pair in pairs for name in pair)
    for refused in ("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"):
        library = _FakeLibrary(refused)
        monkeypatch.setattr(virtual_memory.ctypes, "CDLL", lambda name, library=library: library)
        with pytest.raises(HiSparseError, match=refused):
            probe(Driver(0))
        for made, undone in pairs:
            was_made = made in library.called and made != refused
            assert (undone in library.called) == was_made, (refused, made)


def test_a_probe_of_the_twin_maps_and_unmaps() -> None:
    """Goal: the probe does what a move does. Method: counts of the twin, on which touching what is not there would fault."""
    twin = HostTwin()
    probe(twin)
    assert (twin.num_maps, twin.num_unmaps, twin._sizes) == (1, 1, {})
    twin.close()
