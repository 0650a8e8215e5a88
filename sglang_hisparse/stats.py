"""Counts of a running server: collected without waiting for the device, written to a file when asked.

`gather` collects them for the metrics and the log line (metrics.py). SGLANG_HISPARSE_STATS_FILE names a file that is
rewritten with one JSON object every two seconds of activity and at shutdown. It is how the verification scripts know that a
run has used the host tier. Every rank keeps a file, see `rank_file`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_hisparse.admission import StepFigures
from sglang_hisparse.residency import Owner, PageState, Residency, ResidencyCoordinator
from sglang_hisparse.storage.counters import STORAGE_OUTCOMES

if TYPE_CHECKING:
    from sglang_hisparse.residency.types import PageTransfer
    from sglang_hisparse.runtime import HiSparseRuntime
    from sglang_hisparse.transfer.hot_buffer import HotBuffers

STATS_VARIABLE = "SGLANG_HISPARSE_STATS_FILE"
PERIOD_SECONDS = 2.0

#: name of a metric -> value of its own label ("": it has none) -> number; the names are those of metrics.METRICS
Sample = dict[str, dict[str, float]]


def residency_counts(runtime: HiSparseRuntime) -> dict[str, int]:
    """Pages moved since start, and the pools as they are."""
    counters, residency = runtime.residency.counters, runtime.residency
    believed = StepFigures() if runtime.gate is None else runtime.gate.figures
    return {
        "pages_mirrored": counters.pages_mirrored,
        "pages_spilled": counters.pages_spilled,
        "pages_promoted": counters.pages_promoted,
        "leases_acquired": counters.leases_acquired,
        "retractions_avoided": counters.retractions_avoided,
        "copies_failed": counters.copies_failed,
        "pages_rehomed": counters.pages_rehomed,
        "pages_relocated": counters.pages_relocated,
        "refusals": counters.refusals,
        "admission_waits": 0 if runtime.gate is None else runtime.gate.waits,
        "admission_closed": int(runtime.gate is not None and runtime.gate.closed),
        "admission_compute_ns": round(believed.compute * 1e9),
        "admission_request_ns": round(believed.per_request * 1e9),
        "admission_host_page_ns": round(believed.per_host_page * 1e9),
        "device_pages_free": residency.device_pages.num_free,
        "device_pages_resident": residency.device_pages.count(Owner.RESIDENT),
        "device_pages_hot": residency.device_pages.count(Owner.HOT),
        "logical_pages_free": residency.book.num_free,
        "forwards": residency.step,
        "bytes_to_host": runtime.worker.bytes_to_host,
        "bytes_to_device": runtime.worker.bytes_to_device,
    }


def times(runtime: HiSparseRuntime) -> dict[str, int]:
    """What this rank's scheduler thread has spent, microseconds since start; unlike counts no rank's is another's."""
    return {"border_move_us": 0 if runtime.border is None else round(runtime.border.memory.seconds_moving * 1e6)}


def resolver_counts(counters: dict[str, int]) -> dict[str, int]:
    """The resolver's own counters under the names that users see: entries of top-k answered, by where the row was."""
    return {
        "rows_resident": counters["entries_resident"],
        "rows_hot": counters["entries_hot"],
        "rows_fetched": counters["rows_fetched"],
        "errors": counters["entries_failed"],
    }


class FetchedBytes:
    """Bytes that the resolver has fetched from the host tier: the rows of each index group times the layers of that group.

    Lags like the resolver's other counts by one sample, and waits for nothing.
    """

    def __init__(self, hot: HotBuffers) -> None:
        self._hot = hot

    def total(self) -> int:
        """Bytes since start, as of an earlier sample; enqueues the next one on the current stream."""
        return self._hot.counters()["layer_rows_fetched"] * self._hot.row_bytes


class CopyTimes:
    """How long host copies took, by the CPU's clock: one entry for all the pages of one launch.

    `enqueued`: from planning until the launch returned. `completed`: until the copies were seen to be complete, which is
    looked at before each forward and while idle, so the time of a forward may be in it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._planned: dict[
            int, float
        ] = {}  # id of a launch's last copy, the last to be complete -> when it was planned
        self._seconds: dict[str, list[float]] = {"enqueued": [], "completed": []}

    def measure(
        self, mirror: Callable[[list[PageTransfer]], Iterable[int]], transfers: list[PageTransfer]
    ) -> Iterable[int]:
        """What `mirror(transfers)` returns: the ids of the copies that were enqueued."""
        planned = self._clock()
        ids = list(mirror(transfers))
        if ids:
            self._seconds["enqueued"].append(self._clock() - planned)
            self._planned[ids[-1]] = planned
        return ids

    def note_completed(self, transfer_ids: Iterable[int]) -> None:
        """These copies have just been seen to be complete, in the order in which they were planned. Unknown ids are passed
        over; launches before them whose completion was not told are forgotten."""
        now = self._clock()
        for transfer_id in transfer_ids:
            if transfer_id in self._planned:
                self._seconds["completed"].append(now - self._planned[transfer_id])
                self._planned = {later: planned for later, planned in self._planned.items() if later > transfer_id}

    def forget(self) -> None:
        """No copy under way will be acknowledged."""
        self._planned.clear()

    def take(self, stage: str) -> list[float]:
        """Seconds of `stage` since the last call."""
        taken, self._seconds[stage] = self._seconds[stage], []
        return taken


def exceeds_device(residency: ResidencyCoordinator, num_pages: int) -> bool:
    """Whether `num_pages` more could not stay on the device beside the pages of the running requests, even with everything
    that is only cached evicted: a server without a host tier would retract a request."""
    return int(np.count_nonzero(residency.book.users)) + num_pages > residency.device_pages.num_usable


def shares(rows: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Where the rows resolved between two samples were found, as shares of 1; NaN each when there were none."""
    grown = {source: rows[source] - before.get(source, 0) for source in ("resident", "hot", "host")}
    total = sum(grown.values())
    return {source: count / total if total else math.nan for source, count in grown.items()}


def gather(runtime: HiSparseRuntime, fetched: FetchedBytes) -> Sample:
    """All that metrics.METRICS names, but what is derived from two samples or measured on its own.

    CPU state, and device counts as copied by an earlier call. Under 2 ms for 256 requests of 64k tokens and ten million
    logical tokens, measured on one slow core.
    """
    counts = runtime.counters()
    return {
        "rows_total": {
            "resident": counts["rows_resident"],
            "hot": counts["rows_hot"],
            "host": counts["rows_fetched"],
            "failed": counts["errors"],
        },
        "to_host_bytes_total": {"": counts["bytes_to_host"]},
        "to_device_bytes_total": {
            "promote": counts["bytes_to_device"],
            "fetch": fetched.total(),
            "stream": counts.get("streamed_host_bytes", 0),
        },
        "mirrored_pages_total": {"": counts["pages_mirrored"]},
        "spilled_pages_total": {"": counts["pages_spilled"]},
        "promoted_pages_total": {"": counts["pages_promoted"]},
        "failed_copies_total": {"": counts["copies_failed"]},
        "rehomed_pages_total": {"": counts["pages_rehomed"]},
        "hot_leases_acquired_total": {"": counts["leases_acquired"]},
        "retractions_avoided_total": {"": counts["retractions_avoided"]},
        "refusals_total": {"": counts["refusals"]},
        "admission_waits_total": {"": counts["admission_waits"]},
        "admission_closed": {"": counts["admission_closed"]},
        "audited_rows_total": {"": counts["audited_rows"]},
        "audit_mismatches_total": {"": counts["mismatches"]},
        **_storage(counts, runtime),
        **_pools(runtime),
        **_requests(runtime),
    }


def _storage(counts: Mapping[str, int], runtime: HiSparseRuntime) -> Sample:
    """What has gone to storage and come from it; zeros where none is configured."""
    storage = runtime.storage
    publishing = storage.publisher.backlog if storage is not None and storage.publisher is not None else 0
    return {
        "storage_pages_total": {outcome: counts[f"storage_pages_{outcome}"] for outcome in STORAGE_OUTCOMES},
        "storage_failures_total": {"backend": counts["storage_errors"], "wait": counts["storage_waits_expired"]},
        "storage_backlog_pages": {
            "publish": publishing,
            "load": 0 if storage is None else storage.prefetches.loading_pages,
        },
    }


def _pools(runtime: HiSparseRuntime) -> Sample:
    """The pools as they are."""
    residency, book = runtime.residency, runtime.residency.book
    device, host = residency.device_pages, runtime.mem_pool_host
    num_host = residency.limits.num_logical_pages
    border = {} if runtime.border is None else runtime.border.counters()
    in_state = np.bincount(book.state[1 : book.num_usable + 1], minlength=len(PageState)).tolist()
    return {
        "pages": {
            **{state.name.lower(): in_state[state] for state in PageState},
            "unbacked": num_host - book.num_usable,
        },
        "border_steps": {"taken": border.get("border_steps", 0), "left": border.get("border_steps_left", 0)},
        "prefixes_return_rarely": {"": border.get("prefixes_return_rarely", 0)},
        "mirror_backlog_pages": {"waiting": residency.num_dirty, "in_flight": int(np.count_nonzero(book.transfer))},
        "device_pages": {owner.name.lower(): device.count(owner) for owner in Owner},
        "device_usage": {"": 1 - device.num_free / device.num_usable},
        "host_usage": {"": (book.num_usable - book.num_free) / num_host},
        "host_tier_bytes": {"": host.num_bytes},
        "device_demand": {"": int(np.count_nonzero(book.users)) / device.num_usable},
    }


def _requests(runtime: HiSparseRuntime) -> Sample:
    """Requests that hold a slot, by where their pages are."""
    book = runtime.residency.book
    live = np.flatnonzero(book.live)
    on_host = book.host_counts(live)
    num_full = int(np.count_nonzero(on_host == 0))
    # What is held has its device pages, so host-only pages are as many as may leave when all of those have left.
    num_none = int(np.count_nonzero((on_host > 0) & (on_host >= book.held_from[live])))
    numbers = {Residency.FULL: num_full, Residency.MIXED: live.size - num_full - num_none, Residency.NONE: num_none}
    return {
        "requests": {mode.value: numbers[mode] for mode in Residency},
        "hot_leases": {"": len(runtime.residency.hot_lease)},
        "kept_requests": {"": int(np.count_nonzero(runtime.residency.book.kept))},
    }


def rank_file(path: Path, group: torch.distributed.ProcessGroup | None) -> Path:
    """`path` for the first rank of the first replica; others have their numbers before the last suffix.

    group: that of the runtime, None: the only rank. "s.json": "s.rank1.json"; in replica 2: "s.dp2.json", "s.dp2.rank1.json".
    Ranks with DP attention are ranks of one world, and are counted through.
    """
    if group is None:
        return path
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    replica = 0 if parallel.attn_dp_enabled else parallel.dp_rank or 0
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    marks = [f".dp{replica}"] * bool(replica) + [f".rank{rank}"] * bool(rank)
    return path.with_name("".join([path.stem, *marks, path.suffix]))


class StatsWriter:
    """Writes `runtime.counters()`; every method is free of cost when no file is named."""

    def __init__(self, runtime: HiSparseRuntime, path: str | None) -> None:
        self._runtime = runtime
        self._path = Path(path) if path else None
        self._next = 0.0

    @classmethod
    def from_env(cls, runtime: HiSparseRuntime) -> StatsWriter:
        path = os.environ.get(STATS_VARIABLE)
        return cls(runtime, path and str(rank_file(Path(path), runtime.tp_group)))

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
        partial.write_text(json.dumps(self._runtime.counters() | times(self._runtime)))
        partial.replace(self._path)
