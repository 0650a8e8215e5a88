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
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from resolver_workload import PAGE, STEPS, Case, Variant, Workload, captured, median_us, time_ours

from sglang_hisparse.kernels.resolver import CopyMethod


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
