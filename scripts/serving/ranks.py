"""Whether the ranks of a tensor-parallel server have decided alike, by the counters that each of them keeps.

`verify_server` calls it while the server idles. It needs a statistics file of every rank and sends nothing.
"""

import time
from collections.abc import Sequence

from serving.server import Server

# What follows from decisions alone. Rows and bytes fetched by the resolver are left out: device counts are written late.
DECISIONS = (
    "forwards", "pages_mirrored", "pages_spilled", "pages_promoted", "pages_rehomed", "leases_acquired", "refusals",
    "retractions_avoided", "admission_waits", "admission_closed", "copies_failed", "device_pages_free",
    "device_pages_resident", "device_pages_hot", "logical_pages_free", "bytes_to_host", "bytes_to_device",
)  # fmt: skip
PATIENCE_S = 9.0


def differences(counters: Sequence[dict[str, int]]) -> list[str]:
    """In words, where a rank's decisions differ from the first rank's, where it has found wrong rows or has not told."""
    found = []
    for rank, counts in enumerate(counters):
        if not counts:
            found.append(f"rank {rank} has written no counters")
            continue
        found += [f"rank {rank}: {name} {counts[name]}" for name in ("errors", "mismatches") if counts.get(name)]
        if not rank or not counters[0]:
            continue
        if counters[0].get("audited_rows") and not counts.get("audited_rows"):
            found.append(f"rank {rank} has audited no rows")
        for name in DECISIONS:
            if counts.get(name) != counters[0].get(name):
                found.append(f"{name}: {counters[0].get(name)} on rank 0, {counts.get(name)} on rank {rank}")
    return found


def disagreements(server: Server) -> list[str]:
    """`differences` of an idle server. Ranks write every two seconds, each at its own time, so they are asked again."""
    deadline = time.monotonic() + PATIENCE_S
    while found := differences(server.rank_counters()):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.5)
    return found
