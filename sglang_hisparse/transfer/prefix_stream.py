"""Streamed extends: a prefix that is not all on the device is read from the host tier layer by layer.

A pool page holds a row of every layer, so a prompt longer than the pool cannot be brought back to it. Attention of one layer reads
one layer: a scratch of two layers' rows takes all pages that an extend reads, host-only ones from pinned memory on a side
stream, resident ones (the extend's own new rows among them) from the pool, while the layer before is being computed.

    side stream      host pages of layer l+1 -> half (l+1) % 2     behind the attention of layer l-1, which read that half
    forward stream   wait for layer l's host pages; resident pages of layer l -> half l % 2; attention of layer l

A short extend reads few of those rows, so that the link would carry the rest for nothing. With `union` in its plan host pages are
not fetched; when attention translates the ids that a layer selected, the rows of them that lie on host pages are fetched, each
once a layer. Every other row of a host page in the scratch is then stale, and read by nobody: of SGLang's prefill backends those
that gather the selected rows are accepted alone, and its dense prefill of short contexts is off with HiSparse. For an entry
without a row FlashMLA reads page 0 with the weight 0, so that page must hold no NaN; it is never written and stays zero.

    forward stream   resident pages of layer l -> half l % 2; top-k of layer l; its union -> half l % 2; attention of layer l

A batch that reads more pages than a half holds is read in windows, requests by requests: attention of a layer runs window after
window (attention_windows.py), so that what all requests share, from weights to launches, is paid once. Windows of all layers in
turn, W a layer, are numbered s = 0, 1, ...; window s is in half s % 2.

    side stream      host pages of window s+2 -> half s % 2        behind the attention of window s
    forward stream   wait for window s's host pages; table and resident pages of window s; attention of window s

Owned by the runtime, which calls `begin` before the forward and `finish` after it; the pool calls `stage` where attention asks
for its rows, so in the order of layers and after the layer's new rows were written. It decides nothing, never waits for the
device and never writes the pool. Host rows that it reads are not rewritten under it (R7): a copy to the host is ordered behind
the last launched forward, and a launched forward has waited for every copy of its own stream.

On a CPU pool the same code runs without streams, at the earliest moments that the order above allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.kernels.page_copy import Direction, copy_pages, fetch_union
from sglang_hisparse.kernels.resolver import apply_table_diff
from sglang_hisparse.residency.types import StreamPlan, StreamWindow

# From the device to the device: enough blocks for the memory's bandwidth. From the host, copy_pages' own default saturates the link.
RESIDENT_COPY_BLOCKS = 264


@dataclass(frozen=True, slots=True)
class _Pages:
    """Page lists of one window, int32 on the device: logical pages, where they go, device pages of the resident ones."""

    index: torch.Tensor  #: those on the host first
    places: torch.Tensor  #: the same as int64, which a table is written by
    value: torch.Tensor
    device_pages: torch.Tensor
    num_host: int
    union: bool  #: rows of host pages come as attention selects them

    @property
    def host_pages(self) -> torch.Tensor:
        return self.index[: self.num_host]

    @property
    def host_targets(self) -> torch.Tensor:
        return self.value[: self.num_host]

    @property
    def resident_targets(self) -> torch.Tensor:
        return self.value[self.num_host :]


@dataclass(slots=True)
class _Extend:
    """The extend that is being streamed: its windows, one where the scratch holds them all, and how far it is."""

    windows: list[_Pages | None]  #: None: reads the pool
    spans: list[tuple[int, int]]  #: new tokens of each window
    layer: int = -1  #: whose rows attention has asked for
    staged: int = -1  #: number of the window that was staged last
    fetched: int = -1  #: number of the window whose union was fetched last
    times: _Times | None = None
    kept: dict[int, Any] = field(default_factory=dict)

    @property
    def pages(self) -> _Pages | None:
        """Of the window that was staged last, None before the first."""
        return self.windows[self.staged % len(self.windows)] if self.staged >= 0 else None

    @property
    def lacks_union(self) -> bool:
        """Whether rows of the window that was staged last are still to be selected."""
        pages = self.pages
        return pages is not None and pages.union and self.fetched != self.staged


@dataclass(slots=True)
class _Times:
    """Events around one extend, on the forward stream, and around each copy of one layer's host pages or rows."""

    begun: Any
    ended: Any
    fetches: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def have_passed(self) -> bool:
        return self.ended.query() and all(stop.query() for _, stop in self.fetches)


class PrefixStream:
    """Scratch and page table of the streamed extend. `table` int32 [logical pages + 1]: logical page -> scratch page, 0: not
    read by this extend; `scratch` [2, (num_pages + 1) * page_size, 1, dim], page 0 of either half is never written.

    like: one layer's buffer of the pool. host_bases, device_bases: int64 [layers] on its device, addresses of row 0.
    """

    def __init__(
        self,
        *,
        like: torch.Tensor,
        host_bases: torch.Tensor,
        device_bases: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        num_pages: int,
    ) -> None:
        self.num_pages = num_pages
        self.num_layers = int(host_bases.numel())
        self.scratch = like.new_zeros((2, (num_pages + 1) * page_size, *like.shape[1:]))
        self.table = torch.zeros_like(page_table)
        self.page_bytes = self.scratch[0, :page_size].nbytes
        self._page_size, self._row_bytes = page_size, self.page_bytes // page_size
        self._marks = torch.zeros(-(-self.scratch.shape[1] // 32), dtype=torch.int32, device=page_table.device)
        self._rows_fetched = torch.zeros(1, dtype=torch.int64, device=page_table.device)
        self._host_bases, self._device_bases = host_bases, device_bases
        halves = torch.tensor([half.data_ptr() for half in self.scratch], dtype=torch.int64)
        self._half_bases = halves.to(page_table.device)
        self._on_gpu = page_table.is_cuda
        # As of the last union whose forward has run; on the CPU the count itself.
        self._rows_seen = torch.zeros(1, dtype=torch.int64).pin_memory() if self._on_gpu else self._rows_fetched
        self._extend: _Extend | None = None
        self._measured: deque[_Times] = deque()
        self._counts = dict.fromkeys(("extends", "windows", "unions", "host_bytes", "resident_bytes", "link_us", "forward_us"), 0)
        if self._on_gpu:
            self._side = torch.cuda.Stream(device=page_table.device)
            self._ready = [torch.cuda.Event() for _ in range(2)]  # the half's host pages have arrived
            self._free = torch.cuda.Event()  # the half's last reader has been launched

    @property
    def active(self) -> bool:
        """Whether the extend that runs now reads from the scratch."""
        return self._extend is not None

    @property
    def windows(self) -> list[tuple[int, int]]:
        """New tokens first..last-1 of each window, where the extend that runs now has several; else empty."""
        extend = self._extend
        return extend.spans if extend is not None and len(extend.windows) > 1 else []

    @property
    def kept(self) -> dict[int, Any]:
        """What attention keeps from layer to layer of this extend, by the first token of a window."""
        return self._extend.kept

    @property
    def layer(self) -> int:
        """The layer whose rows attention has asked for, -1 before the first."""
        return -1 if self._extend is None else self._extend.layer

    # -- around a forward -------------------------------------------------------------------------------------------

    def begin(self, plan: StreamPlan) -> None:
        """On the forward stream, after the step's plan was applied: the coming extend reads exactly the pages of `plan`."""
        pages = self._pages_of(plan)
        self._show(pages)
        self._begin(_Extend([pages], []))

    def begin_windows(self, windows: Sequence[StreamWindow]) -> None:
        """The same for an extend that reads more pages than the scratch holds; its attention asks window by window."""
        pages = [None if window.plan is None else self._pages_of(window.plan) for window in windows]
        self._begin(_Extend(pages, [(window.first, window.last) for window in windows]))
        self._counts["windows"] += len(windows)

    def _pages_of(self, plan: StreamPlan) -> _Pages:
        if plan.num_pages > self.num_pages:
            raise InvariantError(
                f"I7: an extend of {plan.num_pages} pages was admitted for {self.num_pages} pages of scratch"
            )
        targets = np.arange(1, plan.num_pages + 1)
        logical = np.concatenate([plan.host_pages, plan.resident_pages])
        lists = self._to_device(np.concatenate([logical, targets, plan.device_pages]))
        if self._on_gpu:
            lists.record_stream(self._side)
        index, value, device_pages = lists.split([plan.num_pages, plan.num_pages, len(plan.device_pages)])
        return _Pages(index, index.long(), value, device_pages, len(plan.host_pages), plan.union)

    def _show(self, pages: _Pages) -> None:
        """The table names these pages and no others, for what is launched next on this stream."""
        self.table.zero_()
        apply_table_diff(self.table, pages.places, pages.value)

    def _begin(self, extend: _Extend) -> None:
        self._extend = extend
        self._counts["extends"] += 1
        self._counts["unions"] += sum(pages is not None and pages.union for pages in extend.windows)
        self._measure()
        if self._on_gpu:
            extend.times = _Times(_timed_event(), _timed_event())
            extend.times.begun.record()
        for number in range(2):
            self._fetch(number)

    def finish(self) -> None:
        """The forward has been launched. Raises InvariantError if its attention did not ask for every layer's rows (I6)."""
        extend = self._extend
        if extend is not None and extend.staged != self._last(extend):
            asked = (extend.staged + 1) // len(extend.windows)
            raise InvariantError(f"I6: attention asked for {asked} of {self.num_layers} layers of a streamed extend")
        if extend is not None and extend.lacks_union:
            raise InvariantError(f"I6: attention of layer {extend.layer} read rows of a union without asking for them")

    def end(self) -> None:
        """Before the next forward: attention reads the pool again."""
        self._extend = None

    def _last(self, extend: _Extend) -> int:
        """Number of the last window of the last layer."""
        return self.num_layers * len(extend.windows) - 1

    # -- inside a forward -------------------------------------------------------------------------------------------

    def note_write(self, layer: int) -> None:
        """New rows of `layer` (counted from 0 on this rank) are written to the pool; raises InvariantError if too late."""
        if layer <= self._extend.layer:
            raise InvariantError(f"I6: rows of layer {layer} are written after its attention has asked for them")

    def stage(self, layer: int) -> torch.Tensor:
        """The half that holds `layer`'s rows for what is launched next on this stream, [(num_pages + 1) * page_size, 1, dim].

        With several windows nothing is there yet: `enter` gives the rows of each.
        """
        extend = self._extend
        if layer not in (extend.layer, extend.layer + 1) or layer < 0:
            raise InvariantError(f"I6: layer {layer} of a streamed extend is read after layer {extend.layer}")
        if layer == extend.layer:
            return self.scratch[layer % 2]
        if extend.staged != layer * len(extend.windows) - 1:
            raise InvariantError(f"I6: layer {layer} is read before all windows of layer {extend.layer} were")
        if extend.lacks_union:
            raise InvariantError(f"I6: layer {layer} is staged before the union of layer {extend.layer} was fetched")
        extend.layer = layer
        if len(extend.windows) == 1:
            if layer:
                self._fetch(layer + 1)
            self._stage_next()
        return self.scratch[layer % 2]

    def enter(self, window: int) -> torch.Tensor | None:
        """Rows of a window of the layer that attention has asked for, and the table for them; None: it reads the pool."""
        extend = self._extend
        if extend.staged + 1 != extend.layer * len(extend.windows) + window:
            raise InvariantError(f"I6: window {window} of layer {extend.layer} is read after number {extend.staged}")
        if extend.lacks_union:
            raise InvariantError(f"I6: a window of layer {extend.layer} is staged before the union of number {extend.staged} was fetched")
        pages = extend.windows[window]
        if pages is not None:
            self._show(pages)
        self._stage_next()
        return None if pages is None else self.scratch[extend.staged % 2]

    def leave(self) -> None:
        """Attention of the window entered last has been launched: its half is fetched into behind it."""
        self._fetch(self._extend.staged + 2)

    def _stage_next(self) -> None:
        """The rows of the next window are in its half for what is launched next on this stream."""
        extend = self._extend
        number = extend.staged = extend.staged + 1
        layer, window = divmod(number, len(extend.windows))
        pages = extend.windows[window]
        if pages is not None:
            if pages.union:
                self._marks.zero_()
            elif self._on_gpu and pages.num_host:
                torch.cuda.current_stream().wait_event(self._ready[number % 2])
            self._copy(number, layer, self._device_bases, pages.device_pages, pages.resident_targets, RESIDENT_COPY_BLOCKS)
            self._counts["resident_bytes"] += len(pages.device_pages) * self.page_bytes
        if self._on_gpu and number == self._last(extend):
            extend.times.ended.record()
            self._measured.append(extend.times)

    def select(self, ids: torch.Tensor) -> None:
        """Attention of the window staged last, or layer where there is one window, reads the rows of `ids`, int [...], -1 for none;
        may be called several times. Raises InvariantError when nothing was staged."""
        extend = self._extend
        if extend.staged < 0 and any(pages is not None and pages.union for pages in extend.windows):
            raise InvariantError("I6: rows of a union were selected before its first layer was staged")
        pages, layer, half = extend.pages, extend.layer, extend.staged % 2
        if pages is None or not pages.union:
            return
        times = self._start_timing()
        fetch_union(
            ids=ids.to(torch.int32).reshape(-1),
            table=self.table,
            host_base=self._host_bases[layer : layer + 1],
            scratch_base=self._half_bases[half : half + 1],
            marks=self._marks,
            fetched=self._rows_fetched,
            host_places=pages.num_host,
            row_bytes=self._row_bytes,
            page_size=self._page_size,
        )
        extend.fetched = extend.staged
        if times is not None:
            times[1].record()
            extend.times.fetches.append(times)
            if layer == self.num_layers - 1:
                self._rows_seen.copy_(self._rows_fetched, non_blocking=True)

    def _start_timing(self) -> tuple[Any, Any] | None:
        if not self._on_gpu:
            return None
        times = _timed_event(), _timed_event()
        times[0].record()
        return times

    def _let_fetch(self) -> None:
        """What the side stream does next comes after everything launched so far: the last reader of the half among it."""
        if self._on_gpu:
            self._free.record()
            self._side.wait_event(self._free)

    def _fetch(self, number: int) -> None:
        """Host pages of a window, where there is such a window, behind everything launched so far."""
        extend = self._extend
        layer, window = divmod(number, len(extend.windows))
        pages = extend.windows[window]
        if number > self._last(extend) or pages is None or pages.union or not pages.num_host:
            return
        self._let_fetch()
        self._counts["host_bytes"] += pages.num_host * self.page_bytes
        if not self._on_gpu:
            self._copy(number, layer, self._host_bases, pages.host_pages, pages.host_targets)
            return
        with torch.cuda.stream(self._side):
            times = self._start_timing()
            self._copy(number, layer, self._host_bases, pages.host_pages, pages.host_targets)
            times[1].record()
            self._ready[number % 2].record()
        extend.times.fetches.append(times)

    def _copy(
        self, number: int, layer: int, bases: torch.Tensor, pages: torch.Tensor, targets: torch.Tensor, max_blocks: int = 8
    ) -> None:
        half = number % 2
        copy_pages(
            direction=Direction.TO_DEVICE,
            host_bases=bases[layer : layer + 1],
            device_bases=self._half_bases[half : half + 1],
            host_pages=pages,
            device_pages=targets,
            page_bytes=self.page_bytes,
            max_blocks=max_blocks,
        )

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        lists = torch.from_numpy(values.astype(np.int32))
        return lists.pin_memory().to(self.table.device, non_blocking=True) if self._on_gpu else lists

    # -- what it costs ----------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Since start: extends streamed, windows of those that had several, those that fetched unions and the rows of these, bytes
        copied to the scratch from the host and from the pool, microseconds in which the link was busy with them, and from
        `begin` to the last layer's attention. Times and rows lag until they have passed."""
        self._measure()
        rows = int(self._rows_seen)
        counts = self._counts | {"union_rows": rows, "host_bytes": self._counts["host_bytes"] + rows * self._row_bytes}
        return {f"streamed_{name}": count for name, count in counts.items()}

    def _measure(self) -> None:
        """Add up the times of the extends that have run; waits for none."""
        while self._measured and self._measured[0].have_passed:
            times = self._measured.popleft()
            self._counts["forward_us"] += int(times.begun.elapsed_time(times.ended) * 1000)
            self._counts["link_us"] += int(sum(start.elapsed_time(stop) for start, stop in times.fetches) * 1000)


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)
