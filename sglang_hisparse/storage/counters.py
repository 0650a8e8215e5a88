"""Counts of the storage tier. Written by the scheduler's thread and the two storage threads, read by stats.py."""

from __future__ import annotations

import threading

#: what is counted, in pages unless the name says otherwise; zero where no storage is configured
STORAGE_COUNTS = (
    "storage_pages_published",
    "storage_pages_loaded",
    "storage_pages_missed",
    "storage_pages_dropped",
    "storage_pages_corrupt",
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
