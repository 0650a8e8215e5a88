"""Moves 2 MiB chunks of GPU memory from one address range to another, as a movable border would, and times it.

`index_border.py probe` calls it on a machine with a GPU. It talks to the CUDA driver by itself (the calls for virtual memory
have no counterpart in torch) and gives everything back at the end; the package does not use it.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CHUNK_BYTES = 2 << 20
ROW_BYTES = 1152
_PINNED, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0  # CUmemAllocationType, CUmemLocationType, access flags, granularity
_SLEEP_CYCLES = 600_000_000  # a third of a second


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp; the last field holds its allocFlags."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """The driver's calls for virtual memory on one device. Each raises RuntimeError where the driver refuses."""

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._location = Location(_DEVICE, device)
        self._properties = Properties(_PINNED, 0, self._location, None)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with CUresult {status}")

    def granularity(self) -> int:
        """Bytes that a chunk must be a multiple of."""
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), _MINIMUM)
        return size.value

    def reserve(self, num_bytes: int) -> int:
        """Address of a range that nothing is mapped to."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(num_bytes), ctypes.c_size_t(0),
                   ctypes.c_uint64(0), ctypes.c_ulonglong(0))  # fmt: skip
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        """Give the range back."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def create(self) -> int:
        """Handle of one physical chunk."""
        handle = ctypes.c_ulonglong()
        size = ctypes.c_size_t(CHUNK_BYTES)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_ulonglong(0))
        return handle.value

    def release(self, handle: int) -> None:
        """Let go of a chunk; it lives while it is mapped."""
        self._call("cuMemRelease", ctypes.c_ulonglong(handle))

    def map(self, address: int, handle: int) -> None:
        """Put a chunk at an address."""
        self._call("cuMemMap", ctypes.c_uint64(address), ctypes.c_size_t(CHUNK_BYTES), ctypes.c_size_t(0),
                   ctypes.c_ulonglong(handle), ctypes.c_ulonglong(0))  # fmt: skip

    def allow(self, address: int, num_bytes: int = CHUNK_BYTES) -> None:
        """Let the device read and write there."""
        access = Access(self._location, _READ_WRITE)
        size = ctypes.c_size_t(num_bytes)
        self._call("cuMemSetAccess", ctypes.c_uint64(address), size, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self, address: int) -> None:
        """Take a chunk away from an address."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(CHUNK_BYTES))


class Range:
    """An address range of `num_chunks` places, and a torch tensor over it. At first nothing is mapped."""

    def __init__(self, driver: Driver, num_chunks: int) -> None:
        self._driver, self.num_bytes = driver, num_chunks * CHUNK_BYTES
        self.address = driver.reserve(self.num_bytes)
        self.handles: dict[int, int] = {}  # place -> handle

    def put(self, place: int, handle: int) -> None:
        """Map a chunk to a place."""
        self._driver.map(self.address + place * CHUNK_BYTES, handle)
        self._driver.allow(self.address + place * CHUNK_BYTES)
        self.handles[place] = handle

    def take(self, place: int) -> int:
        """Unmap what lies at a place; returns it."""
        self._driver.unmap(self.address + place * CHUNK_BYTES)
        return self.handles.pop(place)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """uint8 [num_bytes]; the first place must be mapped, or torch cannot tell the device."""
        return torch.as_tensor(self, device="cuda")

    def close(self) -> None:
        """Unmap and release everything."""
        for place in list(self.handles):
            self._driver.release(self.take(place))
        self._driver.free(self.address, self.num_bytes)


def probe(num_chunks: int) -> dict[str, Any]:
    """All findings as plain values; times in microseconds but for names that end in _ms. Needs a GPU."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes the context current
    driver = Driver(torch.cuda.current_device())
    giver, taker = Range(driver, num_chunks + 1), Range(driver, num_chunks + 1)
    try:
        found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "chunks": num_chunks}
        found["granularity_bytes"] = driver.granularity()
        found |= _single_calls(driver)
        for place in range(num_chunks + 1):
            giver.put(place, driver.create())
        taker.put(0, driver.create())
        found |= _moves(giver, taker, num_chunks)
        found["graph_reads_new_chunk"] = _graph_reads_new_chunk(driver, taker)
        found["contents_kept_while_moved"] = _contents_kept(giver, taker, num_chunks)
        found |= _read_speed(giver)
        return found
    finally:
        torch.cuda.synchronize()
        giver.close()
        taker.close()


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _single_calls(driver: Driver) -> dict[str, float]:
    """Medians of each call on a range of its own."""
    seconds: dict[str, list[float]] = {name: [] for name in ("create", "map", "allow", "unmap", "release")}
    address = driver.reserve(CHUNK_BYTES)
    for _ in range(32):
        spent, handle = _timed(driver.create)
        seconds["create"].append(spent)
        for name, arguments in (("map", (address, handle)), ("allow", (address,)), ("unmap", (address,)), ("release", (handle,))):
            seconds[name].append(_timed(lambda name=name, arguments=arguments: getattr(driver, name)(*arguments))[0])
    driver.free(address, CHUNK_BYTES)
    return {f"{name}_us": round(1e6 * statistics.median(values), 2) for name, values in seconds.items()}


def _move(source: Range, target: Range, places: range) -> None:
    for place in places:
        target.put(place, source.take(place))


def _moves(giver: Range, taker: Range, num_chunks: int) -> dict[str, Any]:
    """One step of the border, on an idle device and behind a kernel that runs; and whether it waited for that kernel."""
    places = range(1, num_chunks + 1)
    torch.cuda.synchronize()
    idle_s, _ = _timed(lambda: _move(giver, taker, places))
    torch.cuda._sleep(_SLEEP_CYCLES)
    ended = torch.cuda.Event()
    ended.record()
    busy_s, _ = _timed(lambda: _move(taker, giver, places))
    waited = ended.query()
    torch.cuda.synchronize()
    return {"move_idle_ms": round(1e3 * idle_s, 3), "move_busy_ms": round(1e3 * busy_s, 3), "waits_for_kernels": waited}


def _graph_reads_new_chunk(driver: Driver, taker: Range) -> bool:
    """A graph that reads an address finds what is mapped there when it is replayed."""
    taker.put(1, driver.create())
    place = taker.tensor()[CHUNK_BYTES : 2 * CHUNK_BYTES]
    out = torch.zeros_like(place)
    place.fill_(3)
    out.copy_(place)  # once outside the graph, as capture asks for
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(place)
    graph.replay()
    torch.cuda.synchronize()
    first = bool((out == 3).all())
    old = taker.take(1)
    taker.put(1, driver.create())
    place.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    second = bool((out == 5).all())
    driver.release(old)
    driver.release(taker.take(1))
    return first and second


def _contents_kept(giver: Range, taker: Range, num_chunks: int) -> bool:
    """Kernels read one half of a range without pause while chunks of the other half leave it; what moves keeps its bytes."""
    half = num_chunks // 2
    values = giver.tensor()
    values.copy_((torch.arange(giver.num_bytes, device="cuda") >> 10).to(torch.uint8))
    kept = values[: half * CHUNK_BYTES].view(torch.int64)
    moved = values[half * CHUNK_BYTES :].view(torch.int64)
    expected, expected_moved = kept.sum(), moved.sum()
    torch.cuda.synchronize()
    sums = []
    for place in range(half, num_chunks + 1):
        sums += [kept.sum() for _ in range(20)]
        _move(giver, taker, range(place, place + 1))
    sums += [kept.sum() for _ in range(20)]
    arrived = taker.tensor()[half * CHUNK_BYTES :].view(torch.int64).sum()
    torch.cuda.synchronize()
    good = all(bool(value == expected) for value in sums) and bool(arrived == expected_moved)
    _move(taker, giver, range(half, num_chunks + 1))
    return good


def _read_speed(giver: Range) -> dict[str, float]:
    """GB/s of random rows from mapped chunks and from torch's own allocation of the same size."""
    num_rows = giver.num_bytes // ROW_BYTES
    order = torch.randperm(num_rows, device="cuda")
    own = torch.empty(giver.num_bytes, dtype=torch.uint8, device="cuda")
    found = {}
    for name, memory in (("mapped", giver.tensor()), ("allocated", own)):
        rows = memory[: num_rows * ROW_BYTES].view(torch.int64).view(num_rows, ROW_BYTES // 8)
        rows.index_select(0, order)
        times = []
        for _ in range(7):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            rows.index_select(0, order)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        found[f"read_{name}_gbps"] = round(num_rows * ROW_BYTES / statistics.median(times) / 1e6, 1)
    return found
