"""What the audit knows of pages: checksums from the moment they are sealed, poison when they are freed, and their history.

Owned by RowAudit (audit.py), which asks for checksums inside the captured graph; the runtime passes `before_plan` and
`after_plan` in each step. It exists only while the audit is on. All its device work runs on the forward stream, between
forwards: behind every launched reader, ahead of the next plan and so of every new owner's write. It must never change a
page's state, and never touch memory that has an owner.

Seal     forward i fills a page; before forward i + 1 the checksum of each of its rows is taken, in every layer.
Poison   a logical page is freed; before the next plan its device rows, its host rows and its checksums are overwritten,
         behind every host copy that is enqueued. Until then its host rows are no landing target (R7).
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_hisparse.kernels.page_copy import Direction, copy_pages
from sglang_hisparse.residency import PageState
from sglang_hisparse.residency.types import StepPlan

if TYPE_CHECKING:
    from sglang_hisparse.runtime import HiSparseRuntime

POISON_BYTE = 0x7F
"""bf16 3.4e38, fp8 NaN: whoever computes with it shows it; no row of a model begins with eight of them."""

POISON_WORD = int.from_bytes(bytes([POISON_BYTE] * 8), "little")
HISTORY_EVENTS = 8
_PAGES_AT_ONCE = 64  # bounds the temporary memory of checksums
_FREE, _OPEN, _DIRTY, _HOST = map(int, (PageState.FREE, PageState.OPEN, PageState.DIRTY, PageState.HOST))


def row_sums(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Checksum int32 [...] of rows uint8 [..., row_bytes], never 0; weights: int32 [row_bytes / 4], odd."""
    return (rows.view(torch.int32) * weights).sum(dim=-1, dtype=torch.int32) | 1


class PageAudit:
    """sums: int32 [layers, logical rows], 0 where none is known. weights: of `row_sums`, on the device."""

    def __init__(self, runtime: HiSparseRuntime) -> None:
        self._runtime = runtime
        pool, limits, device = runtime.pool, runtime.residency.limits, runtime.worker.device
        self._page_size = runtime.page_size
        num_rows = (limits.num_logical_pages + 1) * self._page_size
        self.sums = torch.zeros((pool.layer_num, num_rows), dtype=torch.int32, device=device)
        numbers = np.random.default_rng(2026).integers(0, 1 << 30, pool.row_bytes // 4) * 2 + 1
        self.weights = torch.from_numpy(numbers.astype(np.int32)).to(device)
        self._poison_page = torch.full((pool.page_bytes,), POISON_BYTE, dtype=torch.uint8, device=device)
        address = torch.tensor([self._poison_page.data_ptr()], dtype=torch.int64, device=device)
        self._poison_bases = address.expand(pool.layer_num).contiguous()
        self._sealed: list[tuple[int, int]] = []  # (logical page, device page) that the launched forward fills
        self._unknown: list[int] = []  # took over a duplicate's device page: two versions of their bytes are right
        self._freed: list[tuple[int, int]] = []  # (logical page, its device page or 0)
        self._erasing: deque[tuple[Any, list[int]]] = deque()
        book = runtime.residency.book
        self._seen = [book.state.copy(), book.device_page.copy(), book.generation.copy()]
        self._history: dict[int, deque[str]] = {}
        self.requests: dict[int, str] = {}  # request slot -> rid, as last seen
        self._watch(runtime.residency)

    def _watch(self, residency: Any) -> None:
        """See every free and every flush before it happens."""
        free, clear = residency.free, residency.clear

        def watched_free(pages: Iterable[int]) -> None:
            pages = list(pages)
            self._note_freed(pages)
            free(pages)

        def watched_clear() -> None:
            self._note_freed(np.flatnonzero(residency.book.state != _FREE).tolist())
            clear()

        residency.free, residency.clear = watched_free, watched_clear

    def _note_freed(self, pages: Sequence[int]) -> None:
        residency, book = self._runtime.residency, self._runtime.residency.book
        pages = [page for page in pages if book.state[page] != _FREE]  # the coordinator reports the others
        for page in pages:
            self._freed.append((page, 0 if book.state[page] == _HOST else int(book.device_page[page])))
            self._note(page, f"freed as {PageState(book.state[page]).name}")
        residency.begin_erasing(pages)

    # -- once a step --------------------------------------------------------------------------------------------------

    def before_plan(self) -> None:
        """Behind the launched forward, ahead of the plan."""
        with self.on_forward_stream():
            self._take_sums()
            self._poison_freed()
        while self._erasing and (self._erasing[0][0] is None or self._erasing[0][0].query()):
            self._runtime.residency.end_erasing(self._erasing.popleft()[1])

    def after_plan(self, plan: StepPlan) -> None:
        """The plan is applied and the next forward is noted: see what has changed since the last step."""
        book = self._runtime.residency.book
        promoted = {promotion.logical_page for promotion in plan.promotions}
        state, device_page, generation = self._seen
        moved = (book.state != state) | (book.device_page != device_page) | (book.generation != generation)
        for page in np.flatnonzero(moved).tolist():
            is_new = generation[page] != book.generation[page] or state[page] in (_FREE, _OPEN)
            now, at = int(book.state[page]), int(book.device_page[page])
            self._note(page, f"{PageState(state[page]).name} -> {PageState(now).name}, device page {at}")
            if is_new and now == _DIRTY:
                self._sealed.append((page, at))
            elif not is_new and at and at != device_page[page] and page not in promoted:
                self._unknown.append(page)
        for seen, now in zip(self._seen, (book.state, book.device_page, book.generation), strict=True):
            seen[:] = now
        batch = getattr(self._runtime._scheduler, "running_batch", None)
        for req in [] if batch is None else batch.reqs:
            if req.kv.req_pool_idx is not None:
                self.requests[req.kv.req_pool_idx] = req.rid

    def on_forward_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Whatever is enqueued inside comes between two forwards."""
        stream = self._runtime.worker.forward_stream
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def _take_sums(self) -> None:
        sealed, self._sealed = self._sealed, []
        for start in range(0, len(sealed), _PAGES_AT_ONCE):
            logical, device = self._to_device(list(zip(*sealed[start : start + _PAGES_AT_ONCE], strict=True)))
            for layer, sums in enumerate(self.sums):
                rows = self._pages(self._runtime.pool.layer_rows(layer))[device]
                sums.view(-1, self._page_size)[logical] = row_sums(rows, self.weights)
        self._forget_sums(self._unknown)
        self._unknown = []

    def _forget_sums(self, pages: Sequence[int]) -> None:
        if pages:
            self.sums.view(len(self.sums), -1, self._page_size).index_fill_(1, self._to_device([pages])[0], 0)

    def _poison_freed(self) -> None:
        freed, self._freed = self._freed, []
        if not freed:
            return
        runtime, pages = self._runtime, [page for page, _ in freed]
        # Behind every host copy that is enqueued: those of the freed pages would write their rows again.
        runtime.worker.apply(StepPlan(runtime.residency.step, sys.maxsize, (), (), ()))
        self._forget_sums(pages)
        if device_pages := [device_page for _, device_page in freed if device_page]:
            index = self._to_device([device_pages])[0]
            for layer in range(runtime.pool.layer_num):
                self._pages(runtime.pool.layer_rows(layer)).index_fill_(0, index, POISON_BYTE)
        host_pages, source = self._to_device([pages, [0] * len(pages)]).to(torch.int32)
        copy_pages(
            direction=Direction.TO_HOST,
            host_bases=runtime.hot.host_bases,
            device_bases=self._poison_bases,
            host_pages=host_pages,
            device_pages=source,
            page_bytes=runtime.worker.page_bytes,
        )
        event = None
        if runtime.worker.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._erasing.append((event, pages))

    def _pages(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, self._page_size, rows.shape[-1])

    def _to_device(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Lists of equal length as int64 on the device, without waiting for it."""
        device = self._runtime.worker.device
        if device.type == "cpu":
            return torch.tensor(rows, dtype=torch.int64)
        return torch.tensor(rows, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)

    # -- history ------------------------------------------------------------------------------------------------------

    def _note(self, page: int, event: str) -> None:
        events = self._history.setdefault(page, deque(maxlen=HISTORY_EVENTS))
        events.append(f"step {self._runtime.residency.step}: {event}")

    def history(self, page: int) -> str:
        """The last changes of a logical page, oldest first."""
        return "; ".join(self._history.get(page, ["nothing is known"]))
