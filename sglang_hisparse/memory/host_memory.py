"""Page-locked host memory: mapped, bound to the GPU's NUMA node, touched in parallel, registered in bounded chunks.

Owns the mapping and its CUDA registrations from `HostMemory.allocate` to `release`. Called by memory/host_tier.py. It
must never release memory that a copy or kernel may still touch (release waits for the device first), and a NUMA node
that cannot be found out or bound is never an error: it costs speed, not correctness.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import platform
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from sglang_hisparse.errors import HiSparseError

logger = logging.getLogger(__name__)

SMALL_PAGE_BYTES = 4096
MAX_CHUNK_BYTES = 8 << 30
_TOUCH_BYTES = 256 << 20
_TOUCH_THREADS_MAX = 16
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_PCI_DEVICES = Path("/sys/bus/pci/devices")


class HostMemoryError(HiSparseError, RuntimeError):
    """Host memory could not be mapped or registered with CUDA."""


def chunk_ranges(
    num_bytes: int, *, granularity: int = SMALL_PAGE_BYTES, max_chunk_bytes: int = MAX_CHUNK_BYTES
) -> list[tuple[int, int]]:
    """Registration chunks [(offset, bytes)] that cover num_bytes in order.

    Every inner border is a multiple of both granularity (the unit of one copy: a copy must not span two registrations)
    and of the 4 KiB page (registering one page twice fails). Raises HostMemoryError if that unit exceeds the limit.
    """
    unit = math.lcm(granularity, SMALL_PAGE_BYTES)
    if unit > max_chunk_bytes:
        raise HostMemoryError(f"a copy unit of {granularity} bytes does not fit a registration of {max_chunk_bytes}")
    step = max_chunk_bytes // unit * unit
    return [(start, min(step, num_bytes - start)) for start in range(0, num_bytes, step)]


def gpu_numa_node(device_index: int, root: Path = _PCI_DEVICES) -> int | None:
    """NUMA node of a GPU, or None where the kernel or the driver does not tell."""
    try:
        properties = torch.cuda.get_device_properties(device_index)
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except (AttributeError, AssertionError, RuntimeError):
        return None
    return _numa_node_of(address, root)


def _numa_node_of(pci_address: str, root: Path) -> int | None:
    try:
        node = int((root / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_numa_node(address: int, num_bytes: int, node: int) -> bool:
    """Ask the kernel to place the still untouched range on `node`; False where it declines.

    Preferred, not bound: a full node then spills to its neighbour, where a strict policy would kill the process.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * 64 + 1),
        ctypes.c_uint(0),
    )
    return result == 0


def touch_pages(view: np.ndarray, threads: int | None = None) -> None:
    """Fault in every small page of a fresh uint8 array; NumPy drops the GIL, so the threads do run side by side."""
    if threads is None:
        threads = min(len(os.sched_getaffinity(0)), _TOUCH_THREADS_MAX)

    def touch(start: int) -> None:
        view[start : start + _TOUCH_BYTES : SMALL_PAGE_BYTES] = 0

    with ThreadPoolExecutor(max_workers=max(threads, 1)) as pool:
        list(pool.map(touch, range(0, view.size, _TOUCH_BYTES)))


class HostMemory:
    """One zeroed host mapping; `tensor` is uint8 [num_bytes].

    Released once: by `release`, when the object is collected, or at interpreter exit, whichever comes first. Views of
    `tensor` stay valid as host memory for as long as they live; after release they are no longer page-locked.
    """

    def __init__(self, mapping: mmap.mmap, num_bytes: int, numa_node: int | None) -> None:
        self._view = np.frombuffer(mapping, dtype=np.uint8)[:num_bytes]
        self.num_bytes = num_bytes
        self.numa_node = numa_node
        self.tensor: torch.Tensor | None = torch.from_numpy(self._view)
        self.address = self._view.ctypes.data
        self.registered: list[tuple[int, int]] = []
        self._finalizer: weakref.finalize | None = None

    @classmethod
    def allocate(
        cls,
        num_bytes: int,
        *,
        device: torch.device | str,
        pin: bool = True,
        granularity: int = SMALL_PAGE_BYTES,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> HostMemory:
        """Map, place, touch and (pin on a CUDA device) register num_bytes; blocks until all of it is there.

        granularity: bytes that one copy may cover at most, starting at a multiple of it. On device "cpu", or with pin
        False, nothing is registered. Raises HostMemoryError; what was registered until then is undone.
        """
        if num_bytes <= 0:
            raise HostMemoryError(f"cannot map {num_bytes} bytes of host memory")
        device = torch.device(device)
        index = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
        start = time.perf_counter()
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise HostMemoryError(f"cannot map {num_bytes / 2**30:.2f} GiB of host memory: {error}") from error
        node = None if index is None else gpu_numa_node(index)
        memory = cls(mapping, num_bytes, node)
        _advise(mapping, "MADV_HUGEPAGE")
        if node is not None and not prefer_numa_node(memory.address, num_bytes, node):
            memory.numa_node = None
        touch_pages(memory._view)
        touched = time.perf_counter()
        if index is not None and pin:
            # A child process would share these pages copy-on-write and move ours away from under the GPU.
            _advise(mapping, "MADV_DONTFORK")
            memory._register(index, chunk_ranges(num_bytes, granularity=granularity, max_chunk_bytes=max_chunk_bytes))
        logger.info(
            "HiSparse host memory: %.2f GiB, NUMA node %s, touched in %.1f s, %d registrations in %.1f s",
            num_bytes / 2**30,
            memory.numa_node,
            touched - start,
            len(memory.registered),
            time.perf_counter() - touched,
        )
        return memory

    def _register(self, device_index: int, ranges: list[tuple[int, int]]) -> None:
        # The finalizer sees the list, not self, so that it can run after self is gone; it keeps the mapping alive.
        self._finalizer = weakref.finalize(self, _unregister, self.registered, device_index, self._view)
        try:
            with torch.cuda.device(device_index):
                cudart = torch.cuda.cudart()
                for offset, num_bytes in ranges:
                    pointer = self.address + offset
                    code = int(cudart.cudaHostRegister(pointer, num_bytes, 0))
                    if code != 0:
                        raise HostMemoryError(
                            f"cudaHostRegister failed with {code} at {offset / 2**30:.2f} of "
                            f"{self.num_bytes / 2**30:.2f} GiB; lower host_pool_gib or raise the locked-memory limit "
                            "(ulimit -l, container memory)"
                        )
                    self.registered.append((pointer, num_bytes))
                    _check_device_address(pointer)
        except BaseException:
            self.release()
            raise

    @property
    def pinned(self) -> bool:
        return bool(self.registered)

    def release(self) -> None:
        """Wait for the device and undo every registration, last first. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self.tensor = None


def _advise(mapping: mmap.mmap, name: str) -> None:
    option = getattr(mmap, name, None)
    if option is None:
        return
    try:
        mapping.madvise(option)
    except OSError:
        logger.debug("madvise(%s) declined", name)


def _unregister(registered: list[tuple[int, int]], device_index: int, view: np.ndarray) -> None:
    """Finalizer of HostMemory. `view` is only held: the mapping must outlive its registrations."""
    if not registered:
        return
    try:
        torch.cuda.synchronize(device_index)
    except RuntimeError as error:
        # A broken context at exit: the driver lets go of the pages with the process.
        logger.warning("HiSparse host memory: device %d cannot be waited for: %s", device_index, error)
    cudart = torch.cuda.cudart()
    while registered:
        pointer, num_bytes = registered.pop()
        code = int(cudart.cudaHostUnregister(pointer))
        if code != 0:
            logger.warning("cudaHostUnregister failed with %d for %d bytes at %#x", code, num_bytes, pointer)


def _check_device_address(pointer: int) -> None:
    """Kernels get host addresses as they are: make sure that the device sees this range at the same address."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        logger.warning("the CUDA driver library cannot be opened; host and device addresses are taken to be equal")
        return
    address = ctypes.c_uint64()
    query = driver.cuMemHostGetDevicePointer_v2
    query.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint]
    code = query(ctypes.byref(address), ctypes.c_void_p(pointer), 0)
    if code != 0 or address.value != pointer:
        raise HostMemoryError(
            f"the device sees host address {pointer:#x} at {address.value:#x} (code {code}); "
            "unified addressing of registered memory is required"
        )
