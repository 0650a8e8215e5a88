"""The transfer worker: copies, streams, events and tables. It executes plans and decides nothing.

Called by the runtime on the scheduler's thread. Host copies run on a copy stream of their own, each batch behind the
forward that was launched last when it was enqueued; everything that a forward reads (page table, leases, promoted pages)
is written on the forward stream just before it. No call waits for the device (R1, R4, R5).

On a CPU pool the same code runs without streams: copies are complete when `mirror` returns, and are acknowledged as
completed at the next `poll`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_hisparse.faults import FaultSeam
from sglang_hisparse.kernels.page_copy import Direction, copy_pages
from sglang_hisparse.kernels.resolver import apply_table_diff
from sglang_hisparse.residency.types import LeaseChange, PageTransfer, StepPlan
from sglang_hisparse.transfer.copy_engine import CopyEngine

logger = logging.getLogger(__name__)

RELOCATION_BLOCKS = 64
"""Thread blocks of a copy within the device's own memory, between two forwards."""


@dataclass(slots=True)
class _Batch:
    """Copies enqueued together, and the event behind the last of them (the host-write event); None: they are complete."""

    transfer_ids: list[int]
    event: Any


class TransferWorker:
    """Copies pages of one rank between its device pool and its host tier.

    host_bases, device_bases: int64 [layers], addresses of row 0 of each layer, on the pool's device.
    page_table: int32 [logical pages + 1]; hot_pages: int32 [slots, hot pages]; hot_state: object with `reset(slots)`.
    """

    def __init__(
        self,
        *,
        host_bases: torch.Tensor,
        device_bases: torch.Tensor,
        page_bytes: int,
        page_table: torch.Tensor,
        hot_pages: torch.Tensor,
        hot_state: Any,
    ) -> None:
        self.device = page_table.device
        self.page_table = page_table
        self.hot_pages = hot_pages
        self.hot_state = hot_state
        self.page_bytes = page_bytes
        self.num_layers = int(host_bases.numel())
        self._host_bases = host_bases
        self._device_bases = device_bases
        self._batches: deque[_Batch] = deque()
        self._reset = False
        self._vacated: Any = None  # event behind the last plan that vacated device pages
        self._on_gpu = self.device.type == "cuda"
        self._copy_stream = torch.cuda.Stream(device=self.device) if self._on_gpu else None
        self.forward_stream: Any = None
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        self.failed_launches = 0
        self.failed_events = 0
        # Set by the runtime, where failures have an answer: who takes failed copies back, and how to copy the slow way.
        self.on_failed: Callable[[Iterable[int]], None] | None = None
        self.copy_now: Callable[[Sequence[PageTransfer]], None] | None = None
        self.must_succeed = False
        self.faults: FaultSeam | None = None
        self.engine: CopyEngine | None = None  # set by the runtime: copies to the host without a kernel

    # -- copies to the host -----------------------------------------------------------------------------------------

    def mirror(self, transfers: Sequence[PageTransfer]) -> list[int]:
        """Enqueue host copies behind the last launched forward. Returns the ids of those that are.

        Copies that failed are given back through `on_failed`; with `must_succeed` they are made at once instead, by
        `copy_now`, and count as enqueued.
        """
        wanted = transfers if self.faults is None else self.faults.surviving(transfers)
        enqueued = self.launch(wanted) if wanted else []
        if len(enqueued) == len(transfers):
            return enqueued
        done = set(enqueued)
        failed = [transfer for transfer in transfers if transfer.transfer_id not in done]
        if self.must_succeed and self.copy_now is not None:
            self.copy_now(failed)
            self.note_enqueued([transfer.transfer_id for transfer in failed], None)
            return [transfer.transfer_id for transfer in transfers]
        if self.on_failed is not None:
            self.on_failed([transfer.transfer_id for transfer in failed])
        return enqueued

    def launch(self, transfers: Sequence[PageTransfer]) -> list[int]:
        """Put copies on the copy stream. Returns their ids; none, when the launch failed."""
        ids = [transfer.transfer_id for transfer in transfers]
        host = [transfer.logical_page for transfer in transfers]
        device = [transfer.device_page for transfer in transfers]
        try:
            self._enqueue(host, device)
        except RuntimeError as error:
            self.failed_launches += 1
            if self.failed_launches == 1:
                logger.error("hisparse: a copy to the host could not be enqueued and will be tried again: %s", error)
            return []
        self.note_enqueued(ids, self._event_behind() if self._on_gpu else None)
        return ids

    def _enqueue(self, host: list[int], device: list[int]) -> None:
        if not self._on_gpu:
            self._copy(Direction.TO_HOST, host, device)
            return
        launched = torch.cuda.Event()
        launched.record(self.forward_stream or torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(launched)
            if self.engine is None or not self.engine.to_host(host, device, self._copy_stream.cuda_stream):
                self._copy(Direction.TO_HOST, host, device)

    def note_enqueued(self, transfer_ids: list[int], event: Any) -> None:
        """Copies that were enqueued together, in the order of their ids; event: behind the last, None when complete."""
        self._batches.append(_Batch(transfer_ids, event))
        self.bytes_to_host += len(transfer_ids) * self.page_bytes * self.num_layers

    def _event_behind(self) -> Any:
        """An event behind everything on the copy stream; where none can be had, the copies are waited for instead."""
        try:
            if self.faults is not None:
                self.faults.on_event()
            event = torch.cuda.Event()
            event.record(self._copy_stream)
        except RuntimeError:
            self.failed_events += 1
            self.drain()
            return None
        return event

    def poll(self) -> list[int]:
        """Ids of copies that have been observed to be complete since the last call."""
        done: list[int] = []
        while self._batches and self._is_complete(self._batches[0]):
            done += self._batches.popleft().transfer_ids
        return done if self.faults is None else self.faults.observe(done)

    def _is_complete(self, batch: _Batch) -> bool:
        if batch.event is None:
            return True
        try:
            if self.faults is not None:
                self.faults.on_event()
            return batch.event.query()
        except RuntimeError:
            self.failed_events += 1
            self.drain()
            return True

    @property
    def in_flight(self) -> bool:
        return bool(self._batches) or (self.faults is not None and self.faults.holds_back)

    def settle(self) -> list[int]:
        """Wait for every copy (no request runs) and return the ids that had not been observed."""
        self.drain()
        done = self.poll()
        return done if self.faults is None else done + self.faults.settle()

    def drain(self) -> None:
        """Wait for every copy (flush and shutdown only)."""
        if self._on_gpu:
            self._copy_stream.synchronize()

    def synchronize(self) -> None:
        """Wait for the whole device (shutdown only): the resolver reads host rows from captured graphs."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    # -- before a forward -------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Execute a plan on the current stream, which is the one that runs the next forward."""
        if self._reset:
            self.page_table.zero_()
            self.hot_pages.zero_()
            self._reset = False
        if plan.is_empty:
            return
        if plan.wait_transfer_id and self._on_gpu:
            # Ids ascend: the last batch that begins at or before this id is behind all that must be done.
            for batch in reversed(self._batches):
                if batch.event is not None and batch.transfer_ids[0] <= plan.wait_transfer_id:
                    torch.cuda.current_stream(self.device).wait_event(batch.event)
                    break
        if plan.relocations:
            self._relocate([relocation.source for relocation in plan.relocations],
                           [relocation.target for relocation in plan.relocations])  # fmt: skip
        if plan.promotions:
            self._copy(
                Direction.TO_DEVICE,
                [promotion.logical_page for promotion in plan.promotions],
                [promotion.device_page for promotion in plan.promotions],
            )
            self.bytes_to_device += len(plan.promotions) * self.page_bytes * self.num_layers
        if plan.table:
            self._apply_table(plan.table)
        if plan.leases:
            self._apply_leases(plan.leases)
        if plan.vacates and self._on_gpu:
            self._vacated = torch.cuda.Event()
            self._vacated.record()

    def has_vacated(self) -> bool:
        """Whether the forward stream has passed the last plan that vacated device pages."""
        return self._vacated is None or self._vacated.query()

    def _relocate(self, sources: list[int], targets: list[int]) -> None:
        """Copy device pages, all layers; no page is both source and target."""
        source, target = self._to_device([sources, targets])
        copy_pages(
            direction=Direction.TO_DEVICE,
            host_bases=self._device_bases,
            device_bases=self._device_bases,
            host_pages=source,
            device_pages=target,
            page_bytes=self.page_bytes,
            max_blocks=RELOCATION_BLOCKS,
        )

    def _apply_table(self, table: Sequence[tuple[int, int]]) -> None:
        """One copy to the device and one launch: index and value travel in one piece, the index as the kernel wants it."""
        changes = np.array(table, dtype=np.int64)
        words = np.concatenate([np.ascontiguousarray(changes[:, 0]).view(np.int32), changes[:, 1].astype(np.int32)])
        sent, split = self._send(words), 2 * len(table)
        apply_table_diff(self.page_table, sent[:split].view(torch.int64), sent[split:])

    def _apply_leases(self, leases: Sequence[LeaseChange]) -> None:
        width = self.hot_pages.shape[1]
        rows = [list(lease.device_pages) or [0] * width for lease in leases]
        slots = self._to_device([[lease.slot for lease in leases]])[0].long()
        self.hot_pages[slots] = self._to_device(rows)
        self.hot_state.reset(slots)

    def forget_all(self) -> None:
        """After a flush: the next forward finds an empty page table and no leases."""
        self._batches.clear()
        if self.faults is not None:
            self.faults.settle()
        self._reset = True

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _to_device(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Lists of equal length as one int32 tensor on the device; the copy is ordered on the current stream."""
        return self._send(np.array(rows, dtype=np.int32))

    def _send(self, words: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(words)
        # Page-locked memory from torch's cache is not handed out again before this copy has run.
        return tensor.pin_memory().to(self.device, non_blocking=True) if self._on_gpu else tensor

    def _copy(self, direction: Direction, host_pages: list[int], device_pages: list[int]) -> None:
        both = self._to_device([host_pages, device_pages])
        host, device = both[0], both[1]
        copy_pages(
            direction=direction,
            host_bases=self._host_bases,
            device_bases=self._device_bases,
            host_pages=host,
            device_pages=device,
            page_bytes=self.page_bytes,
        )
