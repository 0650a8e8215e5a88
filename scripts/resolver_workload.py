"""The selections that the kernel benchmarks time, and our resolver on them.

Imported by bench_resolver, resolver_peers and ncu_resolver, and by any script that times variants. Works on CPU tensors too (with
clock times that mean nothing), so that the tests can run it. Owns the one pinned block that all workloads of a process share.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_hisparse.kernels.hot_state import COUNTER_NAMES, FIRST_COUNTER, HEADER_COLUMNS
from sglang_hisparse.kernels.library import library_of
from sglang_hisparse.kernels.page_copy import gather_rows
from sglang_hisparse.kernels.resolver import CopyMethod, HotGroupState, resolve, translate_pages

PAGE = 64
STEPS = 24
FETCHED = FIRST_COUNTER + COUNTER_NAMES.index("rows_fetched")
UNANSWERED = ("NONE", "LOOKUP")  # ways to fetch that measure the rest and fetch nothing
GATHER_BLOCKS = (4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the table: `batch` requests select `top_k` rows each, of which `misses` are not in `buffer` hot rows."""

    row_bytes: int
    top_k: int
    buffer: int
    batch: int
    misses: int

    def pages(self, most_misses: int | None = None) -> int:
        """Logical pages of one request: the buffer's rows, and every row that STEPS steps miss."""
        return -(-(self.buffer + STEPS * (self.misses if most_misses is None else most_misses) + PAGE) // PAGE)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run our resolver; the default is how it is served. scored: rows leave by the scores of the step.

    overlap: each call is launched to overlap the kernel ahead of it; in a graph of calls that is the call before.

    options: further keyword arguments of `resolve`.
    """

    blocks: int = 0
    method: CopyMethod = CopyMethod.LOADS
    overlap: bool = True
    translated: bool = True
    scored: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        name = f"{self.method.name.lower()}-{self.blocks}" + "-overlap" * self.overlap + "-translated" * self.translated
        name += "-scored" * self.scored
        return "-".join([name, *(f"{key}={value}" for key, value in self.options)])


# -- clocks ---------------------------------------------------------------------------------------------------------------


def median_us(run: Callable[[], None], prepare: Callable[[], None], calls: int, replays: int = 9) -> float:
    """Microseconds per call of `run` (which makes `calls` of them): the median replay, each after `prepare`, one unmeasured."""
    times = []
    for _ in range(replays + 1):
        prepare()
        if torch.cuda.is_available():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / calls * 1e3)
        else:
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(times[1:])


def captured(call: Callable[[int], None]) -> Callable[[], None]:
    """What replays a graph of STEPS calls; the first call outside it compiles and warms up. Without a GPU: the calls themselves."""
    call(0)
    if not torch.cuda.is_available():
        return lambda: [call(step) for step in range(STEPS)] and None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(STEPS):
            call(step)
    return graph.replay


# -- workload -------------------------------------------------------------------------------------------------------------

_block = torch.empty(0, dtype=torch.uint8)


def pinned_block(size: int) -> torch.Tensor:
    """`size` bytes, the same memory at each call: pinning takes longer than measuring. Ask for the largest first."""
    global _block
    if _block.numel() < size:
        _block = torch.empty(0, dtype=torch.uint8)
        _block = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return _block[:size]


def home_words(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Content int32 [n, row_bytes / 4] of the host rows int32 [n]: every word tells row and column apart."""
    return rows[:, None] * 7919 + torch.arange(row_bytes // 4, dtype=torch.int32, device=rows.device)


class Workload:
    """Host rows, selections and addresses of one case. Position p of request b is host row `base[b] + p`.

    spread: misses of each request where they differ. pitch: bytes from one host row to the next. Workloads of one pitch may
    live side by side, since a row's content depends on its number alone; making one of another pitch ends them.
    """

    def __init__(
        self, case: Case, spread: Sequence[int] | None = None, *, pitch: int | None = None, device: str = "cuda"
    ) -> None:
        self.case, self.on, self.pitch = case, device, pitch or case.row_bytes
        misses = torch.tensor(spread or [case.misses] * case.batch)
        self.misses_per_step = int(misses.sum())
        self.pages = case.pages(int(misses.max()))
        self.context = self.pages * PAGE
        self.top_k = self._selections(misses.to(device))
        pages = torch.arange(1, case.batch * self.pages + 1, dtype=torch.int32, device=device)
        self.logical_pages = pages.view(case.batch, self.pages)
        self.base = (PAGE + torch.arange(case.batch) * self.context).to(device)
        rows = (case.batch * self.pages + 1) * PAGE
        self.host = pinned_block(rows * self.pitch).view(rows, self.pitch)
        for some in torch.arange(rows, dtype=torch.int32, device=device).split(1 << 17):
            self.host[int(some[0]) : int(some[-1]) + 1].view(torch.int32).copy_(home_words(some, self.pitch))
        self.device = torch.zeros((PAGE + case.batch * case.buffer, case.row_bytes), dtype=torch.uint8, device=device)
        self.host_bases = torch.tensor([self.host.data_ptr()], device=device)
        self.device_bases = torch.tensor([self.device.data_ptr()], device=device)

    def _selections(self, misses: torch.Tensor) -> torch.Tensor:
        """Positions int32 [STEPS, batch, k]: hits are what the step before selected, misses were never seen."""
        k, device = self.case.top_k, self.on
        generator = torch.Generator(device=device).manual_seed(0)
        fresh = torch.full((self.case.batch, 1), self.case.buffer, device=device)
        columns = torch.arange(k, device=device)

        def shuffled(rows: torch.Tensor) -> torch.Tensor:
            return rows.gather(1, torch.rand(rows.shape, generator=generator, device=device).argsort(dim=1))

        recent, out = fresh - k + columns, []
        for _ in range(STEPS):
            recent = shuffled(torch.where(columns < misses[:, None], fresh + columns, shuffled(recent)))
            fresh = fresh + misses[:, None]
            out.append(recent.int())
        return torch.stack(out)

    def hot_rows(self) -> torch.Tensor:
        """Host rows int32 [batch, buffer] that the hot buffers hold at the start, by slot."""
        return (self.base[:, None] + torch.arange(self.case.buffer, device=self.on)).int()

    def fill_hot(self) -> None:
        """Device rows as `hot_rows` says, the row of slot s of request b at PAGE + b * buffer + s."""
        targets = torch.arange(PAGE, self.device.shape[0], dtype=torch.int32, device=self.on)
        self._gather(self.hot_rows().flatten(), targets, self.device_bases, 32)

    def _gather(self, host_rows: torch.Tensor, device_rows: torch.Tensor, bases: torch.Tensor, blocks: int) -> None:
        gather_rows(
            host_bases=self.host_bases,
            device_bases=bases,
            host_rows=host_rows,
            device_rows=device_rows,
            row_bytes=self.case.row_bytes,
            host_row_bytes=self.pitch,
            max_blocks=blocks,
        )

    def correct(self, step: int, out: torch.Tensor) -> bool:
        """Whether the rows answered to the selection of `step` hold what their positions hold on the host."""
        inside = bool(((out >= 0) & (out < self.device.shape[0])).all())
        return inside and torch.equal(self.device[out.flatten().long()], self.home_of(step))

    def home_of(self, step: int) -> torch.Tensor:
        """Host bytes uint8 [batch * k, row_bytes] of the selection of `step`; computed, not read through the link."""
        home = (self.base[:, None] + self.top_k[step]).flatten().int()
        return home_words(home, self.case.row_bytes).view(torch.uint8)

    def gather_us(self, count: int | None = None) -> float:
        """The misses of a step (or `count` rows) as one plain gather: the least over the number of blocks, no resolving."""
        count = self.misses_per_step if count is None else count
        if count == 0:
            return 0.0
        shape, last = (STEPS, count), self.host.shape[0]
        generator = torch.Generator(device=self.on).manual_seed(1)
        host_rows = torch.randint(PAGE, last, shape, generator=generator, dtype=torch.int32, device=self.on)
        slots = torch.randperm(self.device.shape[0] - PAGE, generator=generator, device=self.on)[:count]
        slots = slots if len(slots) == count else torch.arange(count, device=self.on) % (self.device.shape[0] - PAGE)
        device_rows, best = (PAGE + slots).int(), float("inf")
        for blocks in GATHER_BLOCKS:
            run = captured(
                lambda step, blocks=blocks: self._gather(host_rows[step], device_rows, self.device_bases, blocks)
            )
            best = min(best, median_us(run, lambda: None, STEPS, 5))
        return best


def ceiling_gbs(row_bytes: int, pitch: int | None = None, rows: int = 6528, device: str = "cuda") -> float:
    """GB/s of useful bytes at which the link gives up scattered rows, best number of blocks."""
    work = Workload(Case(row_bytes, 2048, 4096, 32, 307), pitch=pitch, device=device)
    return rows * row_bytes / work.gather_us(rows) / 1e3


# -- ours -----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ours:
    """Our resolver on a workload: the one place that builds the arguments of `resolve`.

    resident: every page is on the device and no request holds a lease, so that a call only translates.
    """

    work: Workload
    variant: Variant = field(default_factory=Variant)
    resident: bool = False
    state: HotGroupState = field(init=False)
    out: torch.Tensor = field(init=False)
    arguments: dict[str, Any] = field(init=False)
    _start: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        work, case, device = self.work, self.work.case, self.work.on
        lease, pages = case.buffer // PAGE, case.batch * work.pages
        self.state = HotGroupState.allocate(case.batch, case.buffer, device, evicts_by_score=self.variant.scored)
        self.out = torch.full((case.batch, case.top_k), -7, dtype=torch.int32, device=device)
        hot_pages = 1 + torch.arange(case.batch * lease, dtype=torch.int32).view(case.batch, lease)
        page_table = torch.zeros(pages + 1, dtype=torch.int32, device=device)
        if self.resident:
            hot_pages.zero_()
            page_table[1:] = torch.arange(pages, 0, -1, dtype=torch.int32, device=device)
        page_rows = work.logical_pages
        if self.variant.translated:
            page_rows = torch.empty_like(work.logical_pages)
            translate_pages(work.logical_pages, page_table, page_rows)
        self.arguments = {
            "page_rows": page_rows,
            "seq_lens": torch.full((case.batch,), work.context, dtype=torch.int32, device=device),
            "req_slots": torch.arange(case.batch, device=device),
            "num_real_rows": torch.tensor([case.batch], dtype=torch.int32, device=device),
            "page_table": page_table,
            "hot_pages": hot_pages.to(device),
            "group": self.state[0],
            "host_bases": work.host_bases,
            "device_bases": work.device_bases,
            "row_bytes": case.row_bytes,
            "host_row_bytes": work.pitch,
            "page_size": PAGE,
            "cluster_blocks": self.variant.blocks,
            "copy_method": self.variant.method,
            "translated_pages": self.variant.translated,
            "overlap_launch": self.variant.overlap,
            **dict(self.variant.options),
        }
        if self.variant.scored:  # fewer columns than positions, as an indexer's are: the last rows have no score
            self.arguments["scores"] = torch.rand(case.batch, work.context - PAGE, device=device)
        if not self.resident:
            self._fill()

    def _fill(self) -> None:
        """Fetch the buffers' first rows through the resolver itself and remember that state: none of it is assumed."""
        case = self.work.case
        for first in range(0, case.buffer, case.top_k):
            # The last call is moved back into the buffer: its first rows are hits then.
            start = min(first, case.buffer - case.top_k)
            positions = torch.arange(start, start + case.top_k, dtype=torch.int32, device=self.work.on)
            self.resolve(positions.repeat(case.batch, 1))
        group = self.state[0]
        tensors = [getattr(group, name.name) for name in fields(group)]
        held = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        self._start = [(tensor, tensor.clone()) for tensor in [*held, self.work.device]]

    def resolve(self, top_k: torch.Tensor) -> None:
        """One call; answers are in `out`."""
        resolve(top_k=top_k, out=self.out, **self.arguments)

    def call(self, step: int) -> None:
        self.resolve(self.work.top_k[step])

    def prepare(self) -> None:
        """Back to the state before the first step."""
        for tensor, start in self._start:
            tensor.copy_(start)

    def fetched(self) -> int:
        """Rows fetched since the state was made."""
        return int(self.state.header[:, FETCHED].sum())

    def correct(self, step: int) -> bool:
        """Whether `out` answers the selection of `step`."""
        if not self.resident:
            return self.work.correct(step, self.out)
        position = self.work.top_k[step].long()
        pages = self.arguments["page_table"][self.work.logical_pages.gather(1, position // PAGE).long()]
        return torch.equal(self.out, (pages * PAGE + position % PAGE).int())


def time_ours(
    work: Workload, variant: Variant = Variant(), *, resident: bool = False, replays: int | None = None
) -> tuple[float, bool]:
    """Microseconds per resolve, and whether the last replay's and every single step's rows were right and fetched once."""
    ours = Ours(work, variant, resident)
    run = captured(ours.call)
    took = median_us(run, ours.prepare, STEPS, replays or (25 if work.case.batch <= 8 else 11))
    if variant.method.name in UNANSWERED:
        return took, True
    correct = ours.correct(STEPS - 1)
    ours.prepare()
    before = ours.fetched()
    for step in range(STEPS):
        ours.out.fill_(-7)
        ours.call(step)
        correct &= ours.correct(step)
        correct &= resident or ours.fetched() - before == work.misses_per_step * (step + 1)
    return took, bool(correct)


def floor_us(device: str = "cuda") -> float:
    """Microseconds per kernel of a graph of kernels that translate one address, launched plainly."""
    return median_us(captured(small_kernel(device)), lambda: None, STEPS)


def small_kernel(device: str) -> Callable[[int], None]:
    """What launches one block that does next to nothing, plainly."""
    ids, table = torch.ones(1, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int32, device=device)
    out, library = torch.empty_like(ids), library_of(ids)
    return lambda _: library.translate(ids, table, out, 1, -1)


def time_behind(work: Workload, variant: Variant = Variant(), *, resident: bool = False) -> tuple[float, bool]:
    """As `time_ours`, each call behind a small kernel that lets nothing start early, as in serving; that kernel's time included."""
    ours, ahead = Ours(work, variant, resident), small_kernel(work.on)

    def call(step: int) -> None:
        ahead(step)
        ours.call(step)

    return median_us(captured(call), ours.prepare, STEPS, 11), ours.correct(STEPS - 1)


def time_sample(num_groups: int, num_slots: int, device: str = "cuda") -> tuple[float, bool]:
    """Microseconds of one sample of the counters of all groups and slots, and whether it was right."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (num_groups, num_slots, HEADER_COLUMNS)
    header = torch.randint(0, 1 << 20, shape, generator=generator, dtype=torch.int32, device=device)
    layers = torch.full((num_groups,), 4, dtype=torch.int32, device=device)
    out = torch.zeros((num_slots, 5), dtype=torch.int32, pin_memory=header.is_cuda)
    took = median_us(captured(lambda _: library_of(header).sum_counters(header, layers, out)), lambda: None, STEPS, 15)
    sums = header[..., FIRST_COUNTER : FIRST_COUNTER + 4].sum(dim=0).cpu()
    return took, torch.equal(out.long(), torch.cat([sums, sums[:, 2:3] * 4], dim=1))
