"""Checks of the GPUs: driver, capability, shared memory, and what the link carries, measured with the real copy kernels.

Called by the command `check`, with `Gpu` objects that `visible_gpus` makes. The measurement takes some 600 MiB on each side
for a few seconds; it can be run on "cpu" with the CPU library, where it measures memory and shows that it works.
"""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_hisparse.config import GIB
from sglang_hisparse.doctor.findings import Finding, error, no_gpu, ok, warning
from sglang_hisparse.errors import HiSparseError
from sglang_hisparse.memory.host_memory import HostMemory, gpu_numa_node

LEAST_CAPABILITY = (9, 0)
SHARED_BYTES = 64 << 10
"""What one block of the resolver takes for top-k 2,048, rounded up."""

SLOW_GBPS = 20.0
"""A PCIe Gen5 x16 link carries about 55 GB/s, Gen4 x16 about 25; less points to a narrow or remote link."""

ROW_BYTES = {"bf16": 1152, "fp8": 656}
_LARGE_BYTES = 256 << 20
_NUM_ROWS = 6528
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the driver says of one GPU."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    shared_bytes: int
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Link:
    """GB/s between pinned host memory and one device. rows: scattered rows by cache type."""

    to_device: float
    to_host: float
    rows: dict[str, float]


def visible_gpus() -> list[Gpu]:
    """The GPUs that torch sees; none where there is no driver."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        shared = properties.shared_memory_per_block_optin
        node = gpu_numa_node(index)
        found.append(Gpu(index, properties.name, capability, properties.total_memory, shared, node))
    return found


def driver_version(root: Path = Path("/")) -> str:
    """The driver's version and the CUDA version that it is made for, as far as they can be told."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        number.value = 0
    cuda = f", for CUDA {number.value // 1000}.{number.value % 1000 // 10}" if number.value else ""
    return (found.group() if found else "version unknown") + cuda


def check_gpus(gpus: list[Gpu]) -> list[Finding]:
    """One line a GPU; without one, what torch says of it."""
    if not gpus:
        built = torch.version.cuda
        why = "this torch is built without CUDA" if built is None else "torch sees no NVIDIA GPU"
        return [
            warning("GPU", f"no GPU: {why}", "run this on the machine that will serve; nvidia-smi tells of the driver")
        ]
    findings = [ok("driver", f"{driver_version()}; torch for CUDA {torch.version.cuda}")]
    for gpu in gpus:
        shown = f"{gpu.name}, {gpu.total_bytes / GIB:.1f} GiB, capability {gpu.capability[0]}.{gpu.capability[1]}"
        if gpu.capability < LEAST_CAPABILITY:
            findings.append(error(f"GPU {gpu.index}", shown, "the kernels need capability 9.0 (Hopper) or newer"))
        else:
            findings.append(ok(f"GPU {gpu.index}", shown))
    return findings


def check_shared_memory(gpus: list[Gpu]) -> Finding:
    """Shared memory that one block may ask for."""
    name = "shared memory per block"
    if not gpus:
        return no_gpu(name)
    least = min(gpu.shared_bytes for gpu in gpus)
    found = f"{least >> 10} KiB, {SHARED_BYTES >> 10} needed"
    if least < SHARED_BYTES:
        return error(name, found, "this GPU cannot run the resolver with top-k 2048")
    return ok(name, found)


def check_link(gpus: list[Gpu], measure: Callable[[str], Link] | None = None) -> list[Finding]:
    """Measured bandwidth of each GPU's link."""
    if not gpus:
        return [no_gpu("link bandwidth")]
    return [_link_finding(gpu, measure or measure_link) for gpu in gpus]


def _link_finding(gpu: Gpu, measure: Callable[[str], Link]) -> Finding:
    name = f"link bandwidth of GPU {gpu.index}"
    try:
        link = measure(f"cuda:{gpu.index}")
    except (HiSparseError, RuntimeError) as problem:
        first = str(problem).strip().splitlines()[0]
        return error(
            name, f"not measured: {first}", "the server pins memory and copies in the same way: put this right"
        )
    rows = ", ".join(f"{kind} {gbps:.0f}" for kind, gbps in link.rows.items())
    found = f"GB/s: large copy {link.to_device:.0f} to the GPU, {link.to_host:.0f} back; scattered rows {rows}"
    if min(link.to_device, link.to_host) < SLOW_GBPS:
        return warning(name, found, "see nvidia-smi -q (PCIe generation and width, also under load) and the NUMA node")
    return ok(name, found)


def measure_link(device: str, large_bytes: int = _LARGE_BYTES, num_rows: int = _NUM_ROWS) -> Link:
    """Time copies between pinned host memory and `device`. Raises HiSparseError or RuntimeError where they fail."""
    target = torch.device(device)
    memory = HostMemory.allocate(large_bytes, device=target)
    try:
        host, other = memory.tensor, torch.empty(large_bytes, dtype=torch.uint8, device=target)
        to_device = _gbps(target, large_bytes, lambda: other.copy_(host, non_blocking=True))
        to_host = _gbps(target, large_bytes, lambda: host.copy_(other, non_blocking=True))
        rows = {kind: _rows_gbps(memory, other, num_rows, row_bytes) for kind, row_bytes in ROW_BYTES.items()}
    finally:
        memory.release()
    return Link(to_device, to_host, rows)


def _rows_gbps(memory: HostMemory, other: torch.Tensor, num_rows: int, row_bytes: int) -> float:
    """One gather of distinct rows, in an order that no prefetcher guesses."""
    from sglang_hisparse.kernels.page_copy import gather_rows

    device = other.device
    order = torch.randperm(memory.num_bytes // row_bytes, generator=torch.Generator().manual_seed(0))[:num_rows]
    bases = [
        torch.tensor([address], dtype=torch.int64, device=device) for address in (memory.address, other.data_ptr())
    ]
    host_rows = order.to(torch.int32).to(device)
    device_rows = torch.arange(len(order), dtype=torch.int32, device=device)

    def gather() -> None:
        gather_rows(
            host_bases=bases[0],
            device_bases=bases[1],
            host_rows=host_rows,
            device_rows=device_rows,
            row_bytes=row_bytes,
        )

    if device.type != "cuda":
        return _gbps(device, len(order) * row_bytes, gather)
    with torch.cuda.device(device):
        return _gbps(device, len(order) * row_bytes, gather)


def _gbps(device: torch.device, num_bytes: int, work: Callable[[], object]) -> float:
    """Median of a few runs after one that does not count."""
    seconds = []
    for _ in range(_REPEATS + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return num_bytes / max(statistics.median(seconds[1:]), 1e-9) / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
