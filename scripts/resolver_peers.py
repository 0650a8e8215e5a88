"""The kernels that ours is measured against, on the same workloads: SGLang's built-in swap-in, vLLM's resolver and gather.

Imported by bench_resolver. Either is left out where it cannot be loaded; neither is a dependency.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from resolver_workload import PAGE, STEPS, Case, Workload, captured, median_us

Timed = tuple[float, bool] | None


def _time(name: str, case: Case, prepare: Callable[[], None], call: Callable[[int], None]) -> float | None:
    """Median us a call, replayed from a graph; None, and a line that says so, where it refuses the size."""
    try:
        prepare()
        run = captured(call)
    except RuntimeError as error:
        print(f"{name} left out at {case}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return median_us(run, prepare, STEPS)


def time_builtin(work: Workload) -> Timed:
    """SGLang's built-in swap-in, or None where it is not installed or cannot be compiled for the size."""
    try:
        from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_mla
    except ImportError:
        return None
    case, rows = work.case, torch.arange(work.case.batch, device="cuda")
    host_locs = work.base[:, None] + torch.arange(work.context, device="cuda")
    spare = torch.zeros((case.batch * PAGE, case.row_bytes), dtype=torch.uint8, device="cuda")  # its newest-token page
    device = torch.cat([work.device, spare])
    slots = torch.arange(case.buffer, device="cuda")
    newest = work.device.shape[0] + rows[:, None] * PAGE + torch.arange(PAGE, device="cuda")
    locs = torch.cat([PAGE + rows[:, None] * case.buffer + slots, newest], dim=1).int()
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

    if (took := _time("built-in", case, prepare, call)) is None:
        return None
    return took, torch.equal(device[out.flatten().long()], work.home_of(STEPS - 1))


def load_vllm(library: Path | None) -> str | None:
    """Load vLLM's stable-ABI library; why it cannot be used, or None if it can."""
    if library is None:
        return "no library given"
    try:
        torch.ops.load_library(str(library))
        torch.ops._C_cache_ops.hisparse_resolve_residency  # noqa: B018 - asks whether the operator exists
        torch.ops._C_cache_ops.hisparse_gather_compact  # noqa: B018
    except (OSError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"[:600]
    return None


def time_vllm(work: Workload, most_rows: int) -> Timed:
    """vLLM's resolver and its gather, or None where they refuse the size; `load_vllm` must have succeeded.

    most_rows: bound on a request's distinct rows, from which it sizes its hash table; vLLM passes top_k per verification row.
    """
    ops = torch.ops._C_cache_ops
    case, lease = work.case, work.case.buffer // PAGE
    dtype = torch.bfloat16 if case.row_bytes == 1152 else torch.uint8  # the row formats that it knows
    host = work.host.view(dtype)
    hot = work.device.view(dtype).view(-1, PAGE, host.shape[1])
    hot_table = (1 + torch.arange(case.batch * lease, dtype=torch.int32).view(case.batch, lease)).cuda()
    order0 = torch.arange(case.buffer, dtype=torch.int16, device="cuda").repeat(case.batch, 1)
    held, order = work.hot_rows(), order0.clone()
    states = torch.arange(case.batch, dtype=torch.int32, device="cuda")
    out = torch.full((case.batch, case.top_k), -7, dtype=torch.int32, device="cuda")
    attention, swap_host, swap_device = (torch.empty_like(out) for _ in range(3))
    counts = torch.zeros(case.batch, dtype=torch.int32, device="cuda")

    def call(step: int) -> None:
        ops.hisparse_resolve_residency(
            host, hot, hot_table, work.top_k[step], out, held, order, states, case.buffer, most_rows, None, None,
            attention, PAGE, states, work.logical_pages, PAGE, None, None, swap_host, swap_device, counts, None, 0, 0,
        )  # fmt: skip
        ops.hisparse_gather_compact(host, hot, swap_host, swap_device, counts)

    def prepare() -> None:
        held.copy_(work.hot_rows())
        order.copy_(order0)
        work.fill_hot()

    if (took := _time("vLLM", case, prepare, call)) is None:
        return None
    return took, work.correct(STEPS - 1, out)
