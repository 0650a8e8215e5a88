"""The selections that bench_resolver times, and our resolver on them; imported by bench_resolver and gpu_kernel_check."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_hisparse.kernels.page_copy import gather_rows
from sglang_hisparse.kernels.resolver import CopyMethod, HotGroupState, resolve, translate_pages

PAGE = 64
STEPS = 24
REPLAYS = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the table."""

    row_bytes: int
    top_k: int
    buffer: int
    batch: int
    misses: int


def median_us(run: Callable[[], None], prepare: Callable[[], None], calls: int) -> float:
    """Microseconds per call of `run` (which makes `calls` of them), replays separated by `prepare`."""
    times = []
    for _ in range(REPLAYS):
        prepare()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return statistics.median(times)


def captured(call: Callable[[int], None]) -> torch.cuda.CUDAGraph:
    """A graph of STEPS calls; the first call outside it compiles and warms up."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(STEPS):
            call(step)
    return graph


class Workload:
    """Host rows, selections and addresses of one case. Position p of request b is host row `base[b] + p`."""

    def __init__(self, case: Case, spread: list[int] | None = None) -> None:
        self.case = case
        misses = spread or [case.misses] * case.batch
        self.misses_per_step = sum(misses)
        context = case.buffer + STEPS * max(misses) + PAGE
        self.pages = -(-context // PAGE)
        self.context = self.pages * PAGE
        generator = torch.Generator().manual_seed(0)
        self.top_k = torch.stack(
            [self._stream(count, generator) for count in misses], dim=1
        ).cuda()  # [STEPS, batch, k]
        self.logical_pages = 1 + torch.arange(case.batch * self.pages, dtype=torch.int32).view(case.batch, self.pages)
        self.base = (PAGE + torch.arange(case.batch) * self.context).cuda()
        rows = (case.batch * self.pages + 1) * PAGE
        self.host = torch.empty((rows, case.row_bytes), dtype=torch.uint8, pin_memory=True)
        words = self.host.view(torch.int32)
        words.copy_(
            torch.arange(rows, dtype=torch.int32)[:, None] * 7919 + torch.arange(words.shape[1], dtype=torch.int32)
        )
        self.device = torch.zeros((PAGE + case.batch * case.buffer, case.row_bytes), dtype=torch.uint8, device="cuda")

    def _stream(self, misses: int, generator: torch.Generator) -> torch.Tensor:
        """Positions int32 [STEPS, k]: hits are what the step before selected, misses were never seen."""
        k, fresh, out = self.case.top_k, self.case.buffer, []
        recent = torch.arange(fresh - k, fresh)
        for _ in range(STEPS):
            keep = recent[torch.randperm(k, generator=generator)[: k - misses]]
            recent = torch.cat([keep, torch.arange(fresh, fresh + misses)])[torch.randperm(k, generator=generator)]
            fresh += misses
            out.append(recent.int())
        return torch.stack(out)

    def hot_rows(self) -> torch.Tensor:
        """Host rows int32 [batch, buffer] that the hot buffers hold at the start."""
        return (self.base[:, None] + torch.arange(self.case.buffer, device="cuda")).int()

    def fill_hot(self) -> None:
        self._gather(
            self.hot_rows().flatten(), torch.arange(PAGE, self.device.shape[0], dtype=torch.int32, device="cuda")
        )

    def _gather(self, host_rows: torch.Tensor, device_rows: torch.Tensor, max_blocks: int = 32) -> None:
        gather_rows(
            host_bases=torch.tensor([self.host.data_ptr()], device="cuda"),
            device_bases=torch.tensor([self.device.data_ptr()], device="cuda"),
            host_rows=host_rows,
            device_rows=device_rows,
            row_bytes=self.case.row_bytes,
            max_blocks=max_blocks,
        )

    def correct(self, step: int, out: torch.Tensor) -> bool:
        """Whether the rows answered to the selection of `step` hold what their positions hold on the host."""
        inside = bool(((out >= 0) & (out < self.device.shape[0])).all())
        return inside and torch.equal(self.device[out.flatten().long()], self.home_of(step))

    def home_of(self, step: int) -> torch.Tensor:
        """Host bytes uint8 [batch * k, row_bytes] of the selection of `step`, brought over by a plain gather."""
        home = (self.base[:, None] + self.top_k[step]).flatten().int()
        rows = torch.empty((home.numel(), self.case.row_bytes), dtype=torch.uint8, device="cuda")
        gather_rows(
            host_bases=torch.tensor([self.host.data_ptr()], device="cuda"),
            device_bases=torch.tensor([rows.data_ptr()], device="cuda"),
            host_rows=home,
            device_rows=torch.arange(home.numel(), dtype=torch.int32, device="cuda"),
            row_bytes=self.case.row_bytes,
            max_blocks=64,
        )
        return rows

    def gather_us(self) -> float:
        """The misses of a step as one plain gather: the least over the number of blocks, no resolving at all."""
        count = self.case.batch * self.case.misses
        if count == 0:
            return 0.0
        generator = torch.Generator().manual_seed(1)
        host_rows = torch.randint(
            PAGE, self.host.shape[0], (STEPS, count), generator=generator, dtype=torch.int32
        ).cuda()
        slots = torch.randperm(self.device.shape[0] - PAGE, generator=generator)[:count]
        device_rows = (PAGE + slots).int().cuda()
        bases = (
            torch.tensor([self.host.data_ptr()], device="cuda"),
            torch.tensor([self.device.data_ptr()], device="cuda"),
        )
        best = float("inf")
        for blocks in (4, 8, 16, 32, 64, 128):

            def call(step: int, blocks: int = blocks) -> None:
                gather_rows(
                    host_bases=bases[0],
                    device_bases=bases[1],
                    host_rows=host_rows[step],
                    device_rows=device_rows,
                    row_bytes=self.case.row_bytes,
                    max_blocks=blocks,
                )

            graph = captured(call)
            best = min(best, median_us(graph.replay, lambda: None, STEPS))
        return best


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run our resolver."""

    blocks: int = 0
    method: CopyMethod = CopyMethod.LOADS
    overlap: bool = False
    translated: bool = False

    def __str__(self) -> str:
        return f"{self.method.name.lower()}-{self.blocks}" + "-overlap" * self.overlap + "-translated" * self.translated


def time_ours(work: Workload, variant: Variant = Variant()) -> tuple[float, bool]:
    """Microseconds per resolve, and whether every step's rows and the last replay's rows were right."""
    case, fetches = work.case, variant.method is not CopyMethod.NONE
    state = HotGroupState.allocate(case.batch, case.buffer, "cuda")
    lease = case.buffer // PAGE
    hot_pages = (1 + torch.arange(case.batch * lease, dtype=torch.int32).view(case.batch, lease)).cuda()
    page_table = torch.zeros(case.batch * work.pages + 1, dtype=torch.int32, device="cuda")
    page_rows = work.logical_pages.cuda()
    if variant.translated:
        translated = torch.empty_like(page_rows)
        translate_pages(page_rows, page_table, translated)
        page_rows = translated
    seq_lens = torch.full((case.batch,), work.context, dtype=torch.int32, device="cuda")
    req_slots = torch.arange(case.batch, device="cuda")
    real = torch.tensor([case.batch], dtype=torch.int32, device="cuda")
    host_bases = torch.tensor([work.host.data_ptr()], device="cuda")
    device_bases = torch.tensor([work.device.data_ptr()], device="cuda")
    out = torch.full((case.batch, case.top_k), -7, dtype=torch.int32, device="cuda")

    def call(step: int) -> None:
        resolve(
            top_k=work.top_k[step],
            page_rows=page_rows,
            seq_lens=seq_lens,
            req_slots=req_slots,
            num_real_rows=real,
            page_table=page_table,
            hot_pages=hot_pages,
            group=state,
            host_bases=host_bases,
            device_bases=device_bases,
            row_bytes=case.row_bytes,
            page_size=PAGE,
            out=out,
            cluster_blocks=variant.blocks,
            copy_method=variant.method,
            translated_pages=variant.translated,
            overlap_launch=variant.overlap,
        )

    def prepare() -> None:
        state.tags.copy_(work.hot_rows())
        state.stamps.zero_()
        state.header.zero_()
        work.fill_hot()

    prepare()
    graph = captured(call)
    took = median_us(graph.replay, prepare, STEPS)
    correct = not fetches or work.correct(STEPS - 1, out)
    prepare()
    for step in range(STEPS if fetches else 0):
        out.fill_(-7)
        call(step)
        correct &= work.correct(step, out)
        correct &= int(state.header[:, 6].sum()) == work.misses_per_step * (step + 1)  # fetched nothing twice
    return took, correct


def time_resident(work: Workload, overlap: bool = False) -> tuple[float, bool]:
    """As `time_ours`, with every page resident and no lease: a translation only."""
    case = work.case
    state = HotGroupState.allocate(case.batch, case.buffer, "cuda")
    hot_pages = torch.zeros((case.batch, case.buffer // PAGE), dtype=torch.int32, device="cuda")
    page_table = torch.arange(case.batch * work.pages + 1, dtype=torch.int32, device="cuda").flip(0).contiguous() + 1
    page_table[0] = 0
    page_rows = work.logical_pages.cuda()
    bases = torch.tensor([work.host.data_ptr()], device="cuda")
    out = torch.full((case.batch, case.top_k), -7, dtype=torch.int32, device="cuda")
    seq_lens = torch.full((case.batch,), work.context, dtype=torch.int32, device="cuda")
    req_slots, real = (
        torch.arange(case.batch, device="cuda"),
        torch.tensor([case.batch], dtype=torch.int32, device="cuda"),
    )

    def call(step: int) -> None:
        resolve(
            top_k=work.top_k[step],
            page_rows=page_rows,
            seq_lens=seq_lens,
            req_slots=req_slots,
            num_real_rows=real,
            page_table=page_table,
            hot_pages=hot_pages,
            group=state,
            host_bases=bases,
            device_bases=bases,
            row_bytes=case.row_bytes,
            page_size=PAGE,
            out=out,
            overlap_launch=overlap,
        )

    graph = captured(call)
    took = median_us(graph.replay, lambda: None, STEPS)
    position = work.top_k[STEPS - 1].long()
    want = page_table[page_rows.gather(1, position // PAGE).long()] * PAGE + position % PAGE
    return took, torch.equal(out, want.int())
