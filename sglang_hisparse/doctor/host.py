"""Checks of the machine's memory: limits on locking it, limits of the container, what is free, where the GPUs are attached.

Called by the command `check`. Reads /proc and /sys through the folder it is given; changes nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from sglang_hisparse.capacity import host_share_bytes
from sglang_hisparse.config import GIB
from sglang_hisparse.doctor.findings import Finding, error, ok, warning

RESERVE_BYTES = 10 * GIB
USEFUL_BYTES = 16 * GIB
_UNLIMITED = 1 << 60
_FEW_LOCKED_BYTES = 1 * GIB


def check_memlock(soft: int | None = None) -> Finding:
    """RLIMIT_MEMLOCK. CUDA registers memory past it on most drivers, so that a low limit is no error by itself."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if soft is None else soft
    if soft in (resource.RLIM_INFINITY, -1):
        return ok("locked memory (ulimit -l)", "unlimited")
    shown = f"{soft / GIB:.2f} GiB"
    if soft >= _FEW_LOCKED_BYTES:
        return ok("locked memory (ulimit -l)", shown)
    remedy = "if the start fails in cudaHostRegister: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return warning("locked memory (ulimit -l)", shown, remedy)


def cgroup_limit_bytes(root: Path = Path("/")) -> tuple[int, int] | None:
    """(limit, in use) of the tightest memory cgroup above this process, None where there is no limit."""
    tightest = None
    for folder, limit_name, usage_name in _cgroup_folders(root):
        try:
            text = (folder / limit_name).read_text().strip()
            limit = _UNLIMITED if text == "max" else int(text)
            usage = int((folder / usage_name).read_text())
        except (OSError, ValueError):
            continue
        if limit < _UNLIMITED and (tightest is None or limit - usage < tightest[0] - tightest[1]):
            tightest = limit, usage
    return tightest


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, str, str]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may be the machine's, and the mounted root is the container's own group.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth]), *names


def check_cgroup(limit: tuple[int, int] | None) -> Finding:
    """The container's limit, which pinned memory counts against."""
    if limit is None:
        return ok("container memory limit", "none")
    most, used = limit
    found = f"{most / GIB:.1f} GiB, {used / GIB:.1f} in use (page cache included)"
    if most < USEFUL_BYTES:
        return warning("container memory limit", found, "raise it (docker run --memory, resources.limits.memory)")
    return ok("container memory limit", found)


def check_available(limit: tuple[int, int] | None, gpu_bytes: int, ranks: int, available: int | None = None) -> Finding:
    """Memory that may be pinned. gpu_bytes: of all GPUs here; the host tier has to hold at least what they cache."""
    available = psutil.virtual_memory().available if available is None else available
    if limit is not None:
        available = min(available, max(limit[0] - limit[1], 0))
    each = host_share_bytes(available, RESERVE_BYTES, max(ranks, 1))
    found = f"{available / GIB:.1f} GiB free, {each / GIB:.1f} for each of {max(ranks, 1)} ranks"
    if available < USEFUL_BYTES:
        remedy = "free some, or serve a small model with host_pool_gib"
        return (error if gpu_bytes else warning)("available memory", found, remedy)
    if available < gpu_bytes:
        remedy = "`sglang-hisparse plan` tells what fits: ratio 1 pins as much as the GPUs' KV cache"
        return warning("available memory", found, remedy)
    return ok("available memory", found)


def numa_nodes(root: Path = Path("/")) -> int:
    """NUMA nodes of this machine, at least 1."""
    return max(len(list((root / "sys/devices/system/node").glob("node[0-9]*"))), 1)


def check_numa(nodes: list[int | None], machine_nodes: int) -> Finding:
    """The NUMA node of each GPU: pinned memory is placed there."""
    if machine_nodes == 1:
        return ok("NUMA node of each GPU", "the machine has one node")
    found = ", ".join(f"GPU {gpu}: {'unknown' if node is None else node}" for gpu, node in enumerate(nodes))
    if None in nodes:
        remedy = "host memory may lie on the wrong socket: expose /sys/bus/pci to the container, or bind with numactl"
        return warning("NUMA node of each GPU", found, remedy)
    return ok("NUMA node of each GPU", found)
