"""The replay's stand-in for a GPU's forward pass: KV buffers, writes of new rows, resolve, and the check of every row.

Built and called by the engine. Memory, tables, transfer worker, hot buffers and kernels are the production ones; only
attention is replaced, by a comparison of every row that it would read with the row's home content. It must take no
residency decision, and never derive what it expects from a copy that it could have made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_hisparse.kernels.hot_state import COUNTER_NAMES, FIRST_COUNTER
from sglang_hisparse.kernels.resolver import read_rows, write_rows
from sglang_hisparse.memory.host_memory import HostMemory
from sglang_hisparse.replay.content import HomeContent
from sglang_hisparse.replay.options import ReplayOptions
from sglang_hisparse.residency.types import PageTransfer, StepPlan
from sglang_hisparse.transfer.hot_buffer import GroupTable, HotBuffers
from sglang_hisparse.transfer.worker import TransferWorker

#: Bytes of a row that nobody has written, and outputs that nobody has written: neither may be mistaken for a result.
POISON_BYTE = 0xA5
POISON_ROW = -7
#: A padding row follows the real ones in every resolve, as in a captured graph; the resolver must answer it with -1.
PADDING_ROWS = 1
#: On a CPU a host copy that nothing waits for runs this many forwards after it was enqueued.
LATE_FORWARDS = 6


class LateWorker(TransferWorker):
    """On a CPU, a worker whose host copies run as late as the protocol allows: at a plan that waits for them, or some
    forwards later. A decision that relies on more than it was promised then reads or overwrites the wrong bytes."""

    def __init__(self, **tables: object) -> None:
        super().__init__(**tables)  # type: ignore[arg-type]
        self._late: deque[tuple[int, list[PageTransfer]]] = deque()
        self._forwards = 0

    def mirror(self, transfers: Sequence[PageTransfer]) -> list[int]:
        self._late.append((self._forwards, list(transfers)))
        return [transfer.transfer_id for transfer in transfers]

    def apply(self, plan: StepPlan) -> None:
        while self._late and plan.wait_transfer_id and self._late[0][1][0].transfer_id <= plan.wait_transfer_id:
            self._run_oldest()
        super().apply(plan)

    def after_forward(self) -> None:
        self._forwards += 1
        while self._late and self._late[0][0] <= self._forwards - LATE_FORWARDS:
            self._run_oldest()

    def _run_oldest(self) -> None:
        super().mirror(self._late.popleft()[1])

    @property
    def in_flight(self) -> bool:
        return bool(self._late) or super().in_flight

    def drain(self) -> None:
        while self._late:
            self._run_oldest()
        super().drain()


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One decode step of `rows` requests; arrays are int32 unless the line says otherwise."""

    slots: np.ndarray  #: int64 [rows]
    seq_lens: np.ndarray  #: [rows] tokens, with the one that this step writes
    page_rows: np.ndarray  #: [rows, max_pages] logical pages
    top_k: tuple[np.ndarray, ...]  #: per index group [rows, k] positions, -1: none
    profiles: np.ndarray  #: int64 [groups, rows] index of the profile that each stream follows


class Executor:
    """One model rank without a model. `kv[layer]` is uint8 [device rows, row_bytes], `host[layer]` uint8 [host rows, row_bytes].

    Counts stay on the device until they are read: `rows_checked`, `rows_mismatched`, and `entries` int64 [profiles, 4]
    (entries answered by a resident page, by a hot row, rows fetched, errors, in the order of the resolver's header).
    """

    def __init__(self, options: ReplayOptions, num_profiles: int, worker_class: type[TransferWorker] | None = None) -> None:
        self.options = options
        self.device = torch.device(options.device)
        limits, row_bytes, layers = options.limits, options.row_bytes, options.num_layers
        device_rows = (limits.num_device_pages + 1) * options.page_size
        host_rows = (limits.num_logical_pages + 1) * options.page_size
        self.kv = torch.full((layers, device_rows, row_bytes), POISON_BYTE, dtype=torch.uint8, device=self.device)
        self.host_memory = HostMemory.allocate(
            layers * host_rows * row_bytes, device=self.device, granularity=options.page_bytes
        )
        self.host = self.host_memory.tensor.view(layers, host_rows, row_bytes)
        self.host.fill_(POISON_BYTE)
        self._words = self.kv.view(torch.int64)  # [layers, device rows, row_bytes / 8]
        self.home = HomeContent(row_bytes, self.device)
        self.home_seeds = torch.zeros((limits.num_slots, options.max_tokens), dtype=torch.int64, device=self.device)
        members = [tuple(range(g * options.layers_per_group, (g + 1) * options.layers_per_group)) for g in range(options.num_groups)]
        flags = [layer % options.layers_per_group != 0 for layer in range(layers)]
        self.hot = HotBuffers(
            groups=GroupTable.from_reuse_flags(flags, layers),
            num_slots=limits.num_slots,
            buffer_size=options.buffer_size,
            page_size=options.page_size,
            top_k=options.top_k,
            max_pages=limits.max_pages_per_slot,
            row_bytes=row_bytes,
            page_table=torch.zeros(limits.num_logical_pages + 1, dtype=torch.int32, device=self.device),
            host_bases=torch.tensor([rows.data_ptr() for rows in self.host], dtype=torch.int64),
            device_bases=torch.tensor([rows.data_ptr() for rows in self.kv], dtype=torch.int64),
        )
        self.members = members
        worker_class = worker_class or (LateWorker if self.device.type == "cpu" else TransferWorker)
        self.worker = worker_class(
            host_bases=self.hot.host_bases,
            device_bases=self.hot.device_bases,
            page_bytes=options.page_bytes,
            page_table=self.hot.page_table,
            hot_pages=self.hot.hot_pages,
            hot_state=self.hot,
        )
        self.rows_checked = 0
        self.rows_mismatched = torch.zeros((), dtype=torch.int64, device=self.device)
        self.entries = torch.zeros((num_profiles, len(COUNTER_NAMES)), dtype=torch.int64, device=self.device)

    # -- what a forward does ----------------------------------------------------------------------------------------

    def set_home(self, slot: int, start: int, seeds: np.ndarray) -> None:
        """Request `slot` holds, from position `start` on, the text whose position seeds these are."""
        self.home_seeds[slot, start : start + seeds.size] = torch.from_numpy(seeds).to(self.device)

    def write(self, slots: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> None:
        """Write the rows of new tokens, in every layer, as a forward does: [n] slots, positions, logical ids, int64."""
        seeds = self.home_seeds[self._put(slots), self._put(positions)]
        rows = write_rows(self._put(ids), self.hot.page_table, self.options.page_size).long()
        for layer in range(self.options.num_layers):
            self._words[layer].index_copy_(0, rows, self.home.rows(seeds, layer))

    def check_resident(self, slot: int, ids: np.ndarray) -> None:
        """Read positions [0, n) of a request that is being prefilled, in every layer: logical ids int64 [n]."""
        rows = read_rows(self._put(ids), self.hot.page_table, self.options.page_size)
        seeds = self.home_seeds[slot, : ids.size]
        for layer in range(self.options.num_layers):
            self._check(rows, seeds, layer)

    def resolve(self, batch: DecodeBatch) -> None:
        """Resolve each group's top-k and check, in each layer of the group, every row that comes back."""
        num_rows = batch.slots.size
        slots = self._put(np.concatenate([batch.slots, np.zeros(PADDING_ROWS, dtype=np.int64)]))
        seq_lens = self._put(np.concatenate([batch.seq_lens, np.ones(PADDING_ROWS, dtype=np.int32)]))
        page_rows = self._put(np.concatenate([batch.page_rows, np.zeros_like(batch.page_rows[:PADDING_ROWS])]))
        self.hot.num_real_rows.fill_(num_rows)
        for group, layers in enumerate(self.members):
            positions = batch.top_k[group]
            top_k = self._put(np.concatenate([positions, np.zeros_like(positions[:PADDING_ROWS])]))
            counters = self.hot.state[group].header[:, FIRST_COUNTER : FIRST_COUNTER + len(COUNTER_NAMES)]
            self.hot.rows(num_rows + PADDING_ROWS).fill_(POISON_ROW)
            before = counters[slots[:num_rows]]
            rows = self.hot.resolve(layers[0], top_k, page_rows, seq_lens, slots)
            counted = (counters[slots[:num_rows]] - before).long()
            self.entries.index_add_(0, self._put(batch.profiles[group]), counted)
            self._check_group(layers, slots[:num_rows], top_k[:num_rows], rows[:num_rows], bool((positions < 0).any()))
            self.rows_mismatched += (rows[num_rows:] != -1).sum()

    def _check_group(
        self, layers: Sequence[int], slots: torch.Tensor, top_k: torch.Tensor, rows: torch.Tensor, has_holes: bool
    ) -> None:
        if has_holes:
            wanted = top_k >= 0
            self.rows_mismatched += (~wanted & (rows != -1)).sum()
            slots_of = slots.unsqueeze(1).expand_as(top_k)[wanted]
            seeds, rows = self.home_seeds[slots_of, top_k[wanted].long()], rows[wanted]
        else:
            seeds = self.home_seeds[slots.unsqueeze(1), top_k.long()].flatten()
        for layer in layers:
            self._check(rows.flatten(), seeds, layer)

    def _check(self, rows: torch.Tensor, seeds: torch.Tensor, layer: int) -> None:
        """Compare device rows int [n] of one layer with their home content; a row outside the pool never matches."""
        outside = (rows < self.options.page_size) | (rows >= self._words.shape[1])
        rows = torch.where(outside, torch.zeros_like(rows), rows)  # row 0 is a pad row: it holds no content
        self.rows_checked += rows.numel()
        self.rows_mismatched += self.home.count_mismatches(self._words[layer].index_select(0, rows), seeds, layer)

    def check_host(self, pages: Sequence[int], seeds: np.ndarray) -> None:
        """Audit host copies of whole pages: seeds int64 [pages * page_size] of their positions (I1)."""
        rows = (np.asarray(pages, dtype=np.int64)[:, None] * self.options.page_size + np.arange(self.options.page_size)).reshape(-1)
        home = HomeContent(self.options.row_bytes, torch.device("cpu"))
        for layer in range(self.options.num_layers):
            words = self.host[layer].view(torch.int64).index_select(0, torch.from_numpy(rows))
            self.rows_checked += rows.size
            self.rows_mismatched += home.count_mismatches(words, torch.from_numpy(seeds), layer).to(self.device)

    # -- around it --------------------------------------------------------------------------------------------------

    def after_forward(self) -> None:
        if isinstance(self.worker, LateWorker):
            self.worker.after_forward()

    def read_counts(self) -> tuple[int, np.ndarray]:
        """(mismatched rows, entries int64 [profiles, 4]) so far; waits for the device."""
        return int(self.rows_mismatched), self.entries.cpu().numpy().copy()

    def close(self) -> None:
        self.worker.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.host_memory.release()

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
