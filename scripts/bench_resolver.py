"""Time the resolver against SGLang's built-in swap-in, vLLM's resolver and the gather ceiling of the link, in one process.

Each step selects `top_k` positions per request, of which exactly `misses` are not in the hot buffer. Calls are replayed from a
CUDA graph; a figure is the median over replays, in microseconds per call. Every timed output is checked. The built-in needs
`sglang` importable, vLLM's needs --vllm-library (the wheel's _C_stable_libtorch shared object); either is left out otherwise.

    python scripts/bench_resolver.py --json resolver_h200.json
    python scripts/bench_resolver.py --variants --batches 1 8 --misses 0 102 614      # our own variants, side by side
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_hisparse.kernels.page_copy import gather_rows  # noqa: E402
from sglang_hisparse.kernels.resolver import CopyMethod, HotGroupState, resolve, translate_pages  # noqa: E402

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
        self.top_k = torch.stack([self._stream(count, generator) for count in misses], dim=1).cuda()  # [STEPS, batch, k]
        self.logical_pages = 1 + torch.arange(case.batch * self.pages, dtype=torch.int32).view(case.batch, self.pages)
        self.base = (PAGE + torch.arange(case.batch) * self.context).cuda()
        rows = (case.batch * self.pages + 1) * PAGE
        self.host = torch.empty((rows, case.row_bytes), dtype=torch.uint8, pin_memory=True)
        words = self.host.view(torch.int32)
        words.copy_(torch.arange(rows, dtype=torch.int32)[:, None] * 7919 + torch.arange(words.shape[1], dtype=torch.int32))
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
        self._gather(self.hot_rows().flatten(), torch.arange(PAGE, self.device.shape[0], dtype=torch.int32, device="cuda"))

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
        host_rows = torch.randint(PAGE, self.host.shape[0], (STEPS, count), generator=generator, dtype=torch.int32).cuda()
        slots = torch.randperm(self.device.shape[0] - PAGE, generator=generator)[:count]
        device_rows = (PAGE + slots).int().cuda()
        bases = torch.tensor([self.host.data_ptr()], device="cuda"), torch.tensor([self.device.data_ptr()], device="cuda")
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


def time_ours(work: Workload, variant: Variant = Variant()) -> tuple[float, bool]:  # noqa: B008 (frozen)
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
    req_slots, real = torch.arange(case.batch, device="cuda"), torch.tensor([case.batch], dtype=torch.int32, device="cuda")

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


def time_builtin(work: Workload) -> tuple[float, bool] | None:
    """SGLang's built-in swap-in on the same selections, or None where SGLang is not installed."""
    try:
        from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_mla
    except ImportError:
        return None
    case, rows = work.case, torch.arange(work.case.batch, device="cuda")
    host_locs = work.base[:, None] + torch.arange(work.context, device="cuda")
    spare = torch.zeros((case.batch * PAGE, case.row_bytes), dtype=torch.uint8, device="cuda")  # its newest-token page
    device = torch.cat([work.device, spare])
    slots = torch.arange(case.buffer, device="cuda")
    locs = torch.cat(
        [
            PAGE + rows[:, None] * case.buffer + slots,
            work.device.shape[0] + rows[:, None] * PAGE + torch.arange(PAGE, device="cuda"),
        ],
        dim=1,
    ).int()
    tokens0 = torch.cat([slots, torch.full((PAGE,), -1, device="cuda")]).int().repeat(case.batch, 1)
    order0 = slots.short().repeat(case.batch, 1)
    tokens, order = tokens0.clone(), order0.clone()
    out = torch.full((case.batch, case.top_k), -7, dtype=torch.int32, device="cuda")
    seq_lens = torch.full((case.batch,), work.context, device="cuda")
    real = torch.tensor([case.batch], dtype=torch.int32, device="cuda")

    def call(step: int) -> None:
        load_cache_to_device_buffer_mla(
            top_k_tokens=work.top_k[step],
            device_buffer_tokens=tokens,
            host_cache_locs=host_locs,
            device_buffer_locs=locs,
            host_cache=work.host,
            device_buffer=device,
            top_k_device_locs=out,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            lru_slots=order,
            item_size_bytes=case.row_bytes,
            num_top_k=case.top_k,
            hot_buffer_size=case.buffer,
            page_size=1,
            block_size=960,
            num_real_reqs=real,
        )

    def prepare() -> None:
        tokens.copy_(tokens0)
        order.copy_(order0)
        work.fill_hot()
        device[: work.device.shape[0]] = work.device

    prepare()
    graph = captured(call)
    took = median_us(graph.replay, prepare, STEPS)
    return took, torch.equal(device[out.flatten().long()], work.home_of(STEPS - 1))


def time_vllm(work: Workload) -> tuple[float, bool]:
    """vLLM's resolver and its gather on the same selections; the library must be loaded."""
    ops = torch.ops._C_cache_ops
    case, lease = work.case, work.case.buffer // PAGE
    hot = work.device.view(-1, PAGE, case.row_bytes)
    hot_table = (1 + torch.arange(case.batch * lease, dtype=torch.int32).view(case.batch, lease)).cuda()
    page_rows = work.logical_pages.cuda()
    order0 = torch.arange(case.buffer, dtype=torch.int16, device="cuda").repeat(case.batch, 1)
    held, order = work.hot_rows(), order0.clone()
    states = torch.arange(case.batch, dtype=torch.int32, device="cuda")
    out = torch.full((case.batch, case.top_k), -7, dtype=torch.int32, device="cuda")
    attention, swap_host, swap_device = (torch.empty_like(out) for _ in range(3))
    counts = torch.zeros(case.batch, dtype=torch.int32, device="cuda")

    def call(step: int) -> None:
        ops.hisparse_resolve_residency(
            work.host, hot, hot_table, work.top_k[step], out, held, order, states, case.buffer, case.top_k, None, None,
            attention, PAGE, states, page_rows, PAGE, None, None, swap_host, swap_device, counts, None, 0, 0,
        )  # fmt: skip
        ops.hisparse_gather_compact(work.host, hot, swap_host, swap_device, counts)

    def prepare() -> None:
        held.copy_(work.hot_rows())
        order.copy_(order0)
        work.fill_hot()

    prepare()
    graph = captured(call)
    took = median_us(graph.replay, prepare, STEPS)
    return took, work.correct(STEPS - 1, out)


def compare(case: Case, has_vllm: bool) -> dict[str, object]:
    """One row of resolver_h200.json."""
    work = Workload(case)
    ours, correct = time_ours(work)
    try:
        builtin = time_builtin(work)
    except RuntimeError as error:  # a size that its kernel cannot be compiled for
        print(f"built-in left out: {str(error).splitlines()[0]}", file=sys.stderr)
        builtin = None
    vllm = time_vllm(work) if has_vllm else None
    return {
        **asdict(case),
        "ours_us": round(ours, 2),
        "builtin_us": round(builtin[0], 2) if builtin else None,
        "vllm_us": round(vllm[0], 2) if vllm else None,
        "gather_us": round(work.gather_us(), 2),
        "correct": correct,
        "builtin_correct": builtin[1] if builtin else None,
        "vllm_correct": vllm[1] if vllm else None,
    }


def imbalance(case: Case) -> dict[str, object]:
    """One request with `top_k` misses beside others with none, against the same number of misses spread evenly."""
    one = Workload(case, [case.top_k] + [0] * (case.batch - 1))
    even = Workload(case, [case.top_k // case.batch] * case.batch)
    (one_us, one_ok), (even_us, even_ok) = time_ours(one), time_ours(even)
    return {**asdict(case), "one_us": round(one_us, 2), "even_us": round(even_us, 2), "correct": one_ok and even_ok}


def variants(case: Case) -> list[dict[str, object]]:
    """Every way to fetch, on one case; `none` is the time of everything else. The best is timed again with each option."""
    work, rows, best = Workload(case), [], (float("inf"), Variant())

    def time(variant: Variant) -> float:
        took, correct = time_ours(work, variant)
        rows.append({**asdict(case), "variant": str(variant), "us": round(took, 2), "correct": correct})
        return took if correct and variant.method is not CopyMethod.NONE else float("inf")

    for method in CopyMethod:
        for blocks in (1, 2, 4, 8):
            if blocks * case.batch <= 264:
                variant = Variant(blocks, method)
                best = min(best, (time(variant), variant), key=lambda pair: pair[0])
    for options in ({"overlap": True}, {"translated": True}, {"overlap": True, "translated": True}):
        time(replace(best[1], **options))
    time(Variant(best[1].blocks, CopyMethod.NONE, overlap=True, translated=True))
    return rows


def print_table(rows: list[dict[str, object]]) -> None:
    if rows:
        columns = list(rows[0])
        print("  ".join(f"{name:>13}" for name in columns))
        for row in rows:
            print("  ".join(f"{row[name]!s:>13}" for name in columns), flush=True)


def environment() -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or None,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "device": torch.cuda.get_device_name()},
        "command": " ".join(sys.argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[1152, 656])
    parser.add_argument("--top-k", type=int, nargs="+", default=[2048])
    parser.add_argument("--buffers", type=int, nargs="+", default=[4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--misses", type=int, nargs="+", default=[0, 102, 307, 614])
    parser.add_argument("--variants", action="store_true", help="time our own ways to fetch instead")
    parser.add_argument("--vllm-library", type=Path, help="stable-ABI library of a vLLM wheel")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    if arguments.vllm_library:
        torch.ops.load_library(str(arguments.vllm_library))
    cases = [
        Case(row_bytes, top_k, buffer, batch, misses)
        for row_bytes in arguments.row_bytes
        for top_k in arguments.top_k
        for buffer in arguments.buffers
        for batch in arguments.batches
        for misses in arguments.misses
        if misses <= top_k <= buffer
    ]
    rows: list[dict[str, object]] = []
    for case in cases:
        new = variants(case) if arguments.variants else [compare(case, bool(arguments.vllm_library))]
        print_table(new)
        rows += new
    if arguments.json:
        arguments.json.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
