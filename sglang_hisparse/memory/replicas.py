"""Host memory between the replicas of a server (--dp-size without DP attention), which share a machine and nothing else.

Each replica is a world of its own: they size their pools one after another, and what one has pinned is gone when the next one
looks. So all divide what the first of them saw. The process that starts the replicas opens the ledger, a file in memory that is
gone when it ends; memory/sizing.py asks `first_seen` in each rank. A ledger that cannot be read is no error: each replica then
divides what it sees itself. It must never wait for another replica.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

LEDGER_VARIABLE = "SGLANG_HISPARSE_REPLICA_LEDGER"
"""Set for the processes of the replicas, by the package itself."""


def open_ledger() -> None:
    """Make the ledger of the replicas that this process starts next; it lasts as long as this process."""
    try:
        descriptor = os.memfd_create("hisparse-replicas")
    except (AttributeError, OSError) as error:
        logger.warning("HiSparse: replicas cannot agree on host memory: %s", error)
        return
    os.environ[LEDGER_VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"


def first_seen(available_bytes: int) -> int:
    """What the first rank of all replicas on this machine saw; `available_bytes` where this is the first, or the only one.

    A rank must ask before it, or another rank of its world, pins memory.
    """
    name = os.environ.get(LEDGER_VARIABLE)
    if name is None:
        return available_bytes
    try:
        with Path(name).open("r+") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            seen = ledger.read()
            if seen:
                return int(seen)
            ledger.write(str(available_bytes))
    except (OSError, ValueError) as error:
        logger.warning("HiSparse: the host memory that other replicas saw is not known: %s", error)
    return available_bytes
