"""Counts of the storage tier. Written by the scheduler's thread and the two storage threads, read by stats.py."""

from __future__ import annotations

import threading

#: what becomes of a page: stored; brought back into the radix tree; asked for and not there; ended, or not taken by the backend,
#: before it was stored; there but torn, damaged or another's
STORAGE_OUTCOMES = ("published", "loaded", "missed", "dropped", "corrupt")
#: all that is counted; zero where no storage is configured
STORAGE_COUNTS = (
    *(f"storage_pages_{outcome}" for outcome in STORAGE_OUTCOMES),
    "storage_errors",
    "storage_waits_expired",
)


class StorageCounters:
    """Counted since start, never reset; `add` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(STORAGE_COUNTS, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Raise the count `name` (one of STORAGE_COUNTS, without its `storage_`)."""
        with self._lock:
            self._counts[f"storage_{name}"] += count

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
