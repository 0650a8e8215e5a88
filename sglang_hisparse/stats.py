"""Counts of a running server: collected without waiting for the device, written to a file when asked.

SGLANG_HISPARSE_STATS_FILE names a file that is rewritten with one JSON object every two seconds of activity and at
shutdown. It is how the verification scripts know that a run has used the host tier.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_hisparse.residency import Owner

if TYPE_CHECKING:
    from sglang_hisparse.runtime import HiSparseRuntime

STATS_VARIABLE = "SGLANG_HISPARSE_STATS_FILE"
PERIOD_SECONDS = 2.0


def residency_counts(runtime: HiSparseRuntime) -> dict[str, int]:
    """Pages moved since start, and the pools as they are."""
    counters, residency = runtime.residency.counters, runtime.residency
    return {
        "pages_mirrored": counters.pages_mirrored,
        "pages_spilled": counters.pages_spilled,
        "pages_promoted": counters.pages_promoted,
        "leases_acquired": counters.leases_acquired,
        "pages_rehomed": counters.pages_rehomed,
        "refusals": counters.refusals,
        "device_pages_free": residency.device_pages.num_free,
        "device_pages_resident": residency.device_pages.count(Owner.RESIDENT),
        "device_pages_hot": residency.device_pages.count(Owner.HOT),
        "logical_pages_free": residency.book.num_free,
        "forwards": residency.step,
        "bytes_to_host": runtime.worker.bytes_to_host,
        "bytes_to_device": runtime.worker.bytes_to_device,
    }


def resolver_counts(counters: dict[str, int]) -> dict[str, int]:
    """The resolver's own counters under the names that users see: entries of top-k answered, by where the row was."""
    return {
        "rows_resident": counters["entries_resident"],
        "rows_hot": counters["entries_hot"],
        "rows_fetched": counters["rows_fetched"],
        "errors": counters["entries_failed"],
    }


class StatsWriter:
    """Writes `runtime.counters()`; every method is free of cost when no file is named."""

    def __init__(self, runtime: HiSparseRuntime, path: str | None) -> None:
        self._runtime = runtime
        self._path = Path(path) if path else None
        self._next = 0.0

    @classmethod
    def from_env(cls, runtime: HiSparseRuntime) -> StatsWriter:
        return cls(runtime, os.environ.get(STATS_VARIABLE))

    def tick(self) -> None:
        if self._path is not None and (now := time.monotonic()) >= self._next:
            self._next = now + PERIOD_SECONDS
            self._write()

    def close(self) -> None:
        if self._path is not None:
            self._runtime.counters()  # starts the copies of the device counts that the next call reads
            self._runtime.worker.synchronize()
            self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._runtime.counters()))
        partial.replace(self._path)
