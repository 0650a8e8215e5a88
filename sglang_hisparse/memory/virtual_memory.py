"""Address ranges whose physical memory comes and goes in chunks, and torch tensors over them.

Owns the driver's calls for virtual memory (torch has no counterpart), and a twin of them for machines without a GPU. Called by
memory/elastic.py, which owns the ranges. It moves chunks when it is told to, never waits for the device, and knows nothing of
pages: whoever takes a chunk away has made sure that nothing launched still reads or writes it.

On the CPU twin a range is real virtual memory too: a chunk keeps its bytes wherever it is mapped, and touching a place without
one is a segmentation fault, as it would be an illegal address on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any, Protocol

import torch

from sglang_hisparse.elastic_layout import CHUNK_BYTES
from sglang_hisparse.errors import HiSparseError, InvariantError

_PINNED, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0  # CUmemAllocationType, CUmemLocationType, access flags, granularity
_OUT_OF_MEMORY = 2  # CUresult


class VirtualMemory(Protocol):
    """Addresses in bytes, sizes in bytes, multiples of `chunk_bytes`. Each call raises HiSparseError where it is refused."""

    chunk_bytes: int

    def reserve(self, num_bytes: int) -> int:
        """Address of a range to which nothing is mapped."""

    def free(self, address: int, num_bytes: int) -> None:
        """Give a range back, to which nothing is mapped any more."""

    def create(self, num_bytes: int) -> int:
        """Handle of physical memory; its content is anything."""

    def release(self, handle: int) -> None:
        """Let go of it; it lives while it is mapped."""

    def map(self, address: int, handle: int, num_bytes: int) -> None:
        """Put all of it at an address, readable and writable."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take away what was mapped there by one call."""

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] over a range whose first place is mapped."""


def probe(memory: VirtualMemory) -> None:
    """Move one chunk through all that a border asks of it, and leave nothing behind. Raises HiSparseError where that is refused."""
    size = memory.chunk_bytes
    with contextlib.ExitStack() as undo:
        address = memory.reserve(size)
        undo.callback(memory.free, address, size)
        handle = memory.create(size)
        undo.callback(memory.release, handle)
        memory.map(address, handle, size)
        memory.unmap(address, size)


# -- a GPU -----------------------------------------------------------------------------------------------------------


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; the last field holds its allocFlags."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Interface:
    """What torch asks of an object that lies in GPU memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class Driver:
    """CUDA's calls for virtual memory on one device, whose context must be current in the calling thread."""

    def __init__(self, device: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise HiSparseError(f"elastic_border: the CUDA driver cannot be loaded ({error}); allowed: false") from error
        self._device = device
        self._location = _Location(_DEVICE, device)
        self._properties = _Properties(_PINNED, 0, self._location, None)
        self.chunk_bytes = CHUNK_BYTES
        if CHUNK_BYTES % (granularity := self._granularity()):
            raise HiSparseError(
                f"elastic_border: this GPU maps memory in pieces of {granularity} bytes, not of {CHUNK_BYTES}; allowed: false"
            )

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            why = "out of memory" if status == _OUT_OF_MEMORY else self._words(status)
            raise HiSparseError(f"elastic_border: the driver refuses {name}: {why} (CUresult {status})")

    def _words(self, status: int) -> str:
        text = ctypes.c_char_p()
        found = self._library.cuGetErrorString(status, ctypes.byref(text)) == 0 and text.value
        return found.decode() if found else "no reason given"

    def _granularity(self) -> int:
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), _MINIMUM)
        return size.value

    def reserve(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(num_bytes), ctypes.c_size_t(0),
                   ctypes.c_uint64(0), ctypes.c_ulonglong(0))  # fmt: skip
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def create(self, num_bytes: int) -> int:
        handle = ctypes.c_ulonglong()
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(num_bytes), ctypes.byref(self._properties),
                   ctypes.c_ulonglong(0))  # fmt: skip
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_ulonglong(handle))

    def map(self, address: int, handle: int, num_bytes: int) -> None:
        self._call("cuMemMap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes), ctypes.c_size_t(0),
                   ctypes.c_ulonglong(handle), ctypes.c_ulonglong(0))  # fmt: skip
        access = _Access(self._location, _READ_WRITE)
        try:
            self._call("cuMemSetAccess", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes), ctypes.byref(access),
                       ctypes.c_size_t(1))  # fmt: skip
        except HiSparseError:
            self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_Interface(address, num_bytes), device=f"cuda:{self._device}")


# -- a machine without one -------------------------------------------------------------------------------------------

_MAP_FIXED = 0x10
_PROT_NONE = 0
_NO_RESERVE = 0x4000


class HostTwin:
    """The same on the CPU's own page tables: physical memory is a range of one anonymous file."""

    def __init__(self, chunk_bytes: int = 1 << 16) -> None:
        if chunk_bytes % mmap.PAGESIZE:
            raise InvariantError(f"a chunk of {chunk_bytes} bytes is not made of the machine's pages of {mmap.PAGESIZE}")
        self.chunk_bytes = chunk_bytes
        self.num_maps = self.num_unmaps = 0
        self._file = os.memfd_create("hisparse-twin")
        self._end = 0
        self._sizes: dict[int, int] = {}  # handle (offset + 1) -> bytes, until it is released
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        )  # fmt: skip
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def _mmap(self, address: int | None, num_bytes: int, protection: int, flags: int, file: int, offset: int) -> int:
        found = self._libc.mmap(address, num_bytes, protection, flags, file, offset)
        if found == ctypes.c_void_p(-1).value:
            raise HiSparseError(f"elastic_border: mmap of {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")
        return found

    def reserve(self, num_bytes: int) -> int:
        return self._mmap(None, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1, 0)

    def free(self, address: int, num_bytes: int) -> None:
        self._libc.munmap(address, num_bytes)

    def create(self, num_bytes: int) -> int:
        handle, self._end = self._end + 1, self._end + num_bytes
        os.ftruncate(self._file, self._end)
        self._sizes[handle] = num_bytes
        return handle

    def release(self, handle: int) -> None:
        if self._sizes.pop(handle, None) is None:
            raise HiSparseError(f"elastic_border: handle {handle} is released twice")

    def map(self, address: int, handle: int, num_bytes: int) -> None:
        if self._sizes.get(handle) != num_bytes:
            raise HiSparseError(f"elastic_border: handle {handle} has {self._sizes.get(handle)} bytes, not {num_bytes}")
        self._mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self._file, handle - 1)
        self.num_maps += 1

    def unmap(self, address: int, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | _MAP_FIXED
        self._mmap(address, num_bytes, _PROT_NONE, flags, -1, 0)
        self.num_unmaps += 1

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)

    @property
    def num_handles(self) -> int:
        """Handles that have not been released."""
        return len(self._sizes)

    def close(self) -> None:
        """The file; nothing may be mapped any more."""
        os.close(self._file)


# -- ranges ----------------------------------------------------------------------------------------------------------


class Range:
    """Places 0..num_places-1 of one chunk each. The first `num_fixed` hold memory for life; the others get it chunk by chunk.

    One piece of memory backs all fixed places, since mapping is paid for by the piece. Raises HiSparseError where the memory
    for them is refused; nothing is kept then.
    """

    def __init__(self, memory: VirtualMemory, num_places: int, num_fixed: int) -> None:
        if not 0 < num_fixed <= num_places:
            raise InvariantError(f"{num_fixed} of {num_places} places of an address range are to hold memory for life")
        self._memory, self.num_places, self.num_fixed = memory, num_places, num_fixed
        self._handles: dict[int, int] = {}  # place -> handle; place 0 stands for the fixed ones
        self.address = memory.reserve(num_places * memory.chunk_bytes)
        try:
            self._fixed = memory.create(num_fixed * memory.chunk_bytes)
            try:
                memory.map(self.address, self._fixed, num_fixed * memory.chunk_bytes)
            except HiSparseError:
                memory.release(self._fixed)
                raise
        except HiSparseError:
            memory.free(self.address, num_places * memory.chunk_bytes)
            raise

    @property
    def num_bytes(self) -> int:
        return self.num_places * self._memory.chunk_bytes

    @property
    def num_mapped(self) -> int:
        """Places that hold memory."""
        return self.num_fixed + len(self._handles)

    def put(self, place: int, handle: int) -> None:
        """Map a chunk to a place that has none."""
        if not self.num_fixed <= place < self.num_places or place in self._handles:
            raise InvariantError(f"place {place} of an address range takes no chunk")
        size = self._memory.chunk_bytes
        self._memory.map(self.address + place * size, handle, size)
        self._handles[place] = handle

    def take(self, place: int) -> int:
        """Unmap the chunk at a place; returns its handle."""
        if place not in self._handles:
            raise InvariantError(f"place {place} of an address range holds no chunk that could leave")
        size = self._memory.chunk_bytes
        self._memory.unmap(self.address + place * size, size)
        return self._handles.pop(place)

    def chunk(self, place: int) -> torch.Tensor:
        """uint8 [chunk_bytes] of a place that holds memory."""
        size = self._memory.chunk_bytes
        return self.tensor()[place * size : (place + 1) * size]

    def tensor(self) -> torch.Tensor:
        """uint8 [num_bytes] over the whole range, mapped or not."""
        return self._memory.tensor(self.address, self.num_bytes)

    def close(self) -> None:
        """Unmap and release everything; no tensor over the range may be used any more."""
        size = self._memory.chunk_bytes
        for place in list(self._handles):
            self._memory.release(self.take(place))
        self._memory.unmap(self.address, self.num_fixed * size)
        self._memory.release(self._fixed)
        self._memory.free(self.address, self.num_bytes)
