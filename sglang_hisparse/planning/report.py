"""What a plan says to people: tables on the terminal, the settings to use with their reasons, one JSON object.

Called by the command `plan`. Computes nothing but shares of figures that the planner has made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from sglang_hisparse import __version__
from sglang_hisparse.config import GIB, MIB, Eviction
from sglang_hisparse.layout import MemoryPlan
from sglang_hisparse.layout_table import plan_table
from sglang_hisparse.planning.planner import Planned

_MISSES = {2048: "30 %", 4096: "13.4 %", 8192: "6.7 %"}
"""Share of a step's rows that LRU misses on the one published trace (GLM-5.1, 100k tokens, top-k 2,048)."""


def settings_of(planned: Planned) -> dict[str, Any]:
    """The object for --hisparse-config."""
    settings = {
        "top_k": planned.model.facts.index_topk,
        "device_buffer_size": planned.memory.hot.buffer_rows,
        "host_to_device_ratio": planned.memory.requested_ratio,
    }
    if planned.choices.host_pool_gib is not None:
        settings["host_pool_gib"] = planned.choices.host_pool_gib
    if planned.choices.eviction is not Eviction.LRU:
        settings["eviction"] = planned.choices.eviction.value
    if planned.choices.elastic is not None:
        settings["elastic_border"] = planned.choices.elastic
    return settings


def flags_of(planned: Planned) -> str:
    """The server arguments that the plan stands for, without the model's path."""
    deployment = planned.deployment
    flags = [f"--tp-size {deployment.tp}"]
    if deployment.dp > 1:
        flags.append(f"--attn-dp-size {deployment.dp}")
    flags.append(f"--mem-fraction-static {deployment.mem_fraction:g}")
    flags.append(f"--max-running-requests {deployment.max_running_requests}")
    flags.append(f"--kv-cache-dtype {'bfloat16' if planned.choices.cache_type.value == 'bf16' else 'fp8_e4m3'}")
    return f"{' '.join(flags)} --enable-hisparse --hisparse-config '{json.dumps(settings_of(planned))}'"


def reasons_of(planned: Planned) -> dict[str, str]:
    """Why each number of the settings is what it is."""
    memory, load = planned.memory, planned.load
    shape, hot = memory.shape, memory.hot
    lease = hot.lease_pages(shape.page_size) * shape.page_size * shape.kv_token_bytes / GIB
    misses = ", ".join(f"{share} at {rows}" for rows, share in _MISSES.items())
    reasons = {
        "top_k": "the model's index_topk; no other value is accepted",
        "device_buffer_size": (
            f"{hot.buffer_rows / planned.model.facts.index_topk:g} x top_k; {lease:.2f} GiB of GPU memory for each request "
            f"that has given up pages; rows missed on the published trace: {misses}"
            + (f"; the default would be nearly as large as a request of {load.total_tokens} tokens" if planned.narrowed else "")
        ),
    }
    share = memory.least_device_tokens / max(memory.plain_tokens, 1)
    wanted = "" if load.wanted is None else f", {load.wanted} wanted"
    reasons["host_to_device_ratio"] = (
        f"{memory.logical_tokens} tokens hold {planned.mixed.per_cache} requests of {load.total_tokens} tokens per cache"
        f"{wanted}; index-K of all of them stays on the GPU, which leaves {share:.0%} of plain SGLang's tokens there, and "
        f"{memory.host_bytes / GIB:.1f} of {planned.host_bytes_per_rank / GIB:.1f} GiB are pinned per GPU"
    )
    reasons["--max-running-requests"] = (
        f"{hot.num_slots - 1} per cache; each slot takes {memory.hot_state_bytes / hot.num_slots / MIB:.2f} MiB of hot state on "
        "the GPU, and SGLang's own choice is 2,048 or more"
    )
    if planned.choices.host_pool_gib is not None:
        reasons["host_pool_gib"] = "as given; shrinks the ratio where it would pin more"
    if planned.choices.eviction is not Eviction.LRU:
        reasons["eviction"] = "as given; hot state holds the scores of a step"
    if planned.choices.elastic is not None:
        reasons["elastic_border"] = f"as given; {_border_of(memory)}"
    return reasons


def _border_of(memory: MemoryPlan) -> str:
    if not memory.border:
        return "index-K of all logical tokens has memory from the start"
    at_start = memory.device_tokens / max(memory.plain_tokens, 1)
    return (
        f"the server begins with {memory.device_tokens} tokens on the GPU, {at_start:.0%} of plain SGLang's, and comes down to "
        f"{memory.least_device_tokens} as {memory.logical_tokens} are cached; as long as index-K of all of them has no memory, "
        "more of what runs stays on the GPU"
    )


def notes_of(planned: Planned) -> Iterator[str]:
    """When it pays, and what a reader may miss in the tables."""
    plain, full, mixed = planned.plain, planned.full, planned.mixed
    if mixed.total <= plain.total:
        yield f"HiSparse brings nothing here: plain SGLang runs {plain.total} requests, HiSparse {mixed.total}"
    else:
        share = f"index-K of {planned.memory.ratio_at_end:.4g} tokens per GPU token takes its room"
        between = f"; up to {plain.total} plain SGLang is ahead, since {share}" if full.total < plain.total else ""
        yield (
            f"break-even: up to {full.total} requests run from the GPU alone with either{between}; above {plain.total} "
            f"HiSparse runs up to {mixed.total}"
        )
    yield (
        f"requests shorter than {planned.shortest_gain_tokens} tokens give nothing back by leaving the GPU; the longest that "
        f"is accepted has {planned.longest_request_tokens} tokens"
    )
    if planned.choices.elastic is None:
        why = planned.memory.fixed_because
        yield f"elastic_border, left open, is {'on: ' + _border_of(planned.memory) if why is None else 'off, since ' + why}"
    shape = planned.memory.shape
    yield (
        f"host memory: {shape.kv_token_bytes} bytes per token, on each GPU's rank; as much goes to the host for every token "
        "once, when its page is full"
    )
    if planned.deployment.dp == 1 < planned.deployment.tp:
        yield (
            f"--dp 1: all {planned.deployment.tp} GPUs of a server hold the same cache; with attention data parallelism "
            "(--dp) they hold different requests"
        )
    if planned.model.note:
        yield f"{planned.model.name}: {planned.model.note}"


def show(planned: Planned, console: Console) -> None:
    """Print everything."""
    console.print(
        _device_table(planned), plan_table(planned.memory), _fit_table(planned), _link_table(planned), sep="\n"
    )
    for note in notes_of(planned):
        console.print(f"- {note}", highlight=False)
    console.print("\n[bold]settings[/]")
    values = {**settings_of(planned), "--max-running-requests": planned.deployment.max_running_requests}
    for key, reason in reasons_of(planned).items():
        console.print(f"- {key} {values[key]}: {reason}", highlight=False)
    console.print("\n[bold]server arguments[/]")
    # One line as it is, so that it can be copied.
    console.print(flags_of(planned), markup=False, highlight=False, soft_wrap=True)


def _device_table(planned: Planned) -> Table:
    device, deployment, model = planned.device, planned.deployment, planned.model
    size = (
        "" if model.parameters is None else f", {model.parameters.total / 1e9:.0f} B parameters counted from its config"
    )
    table = Table(
        title=f"{model.name}{size}: {deployment.gpus} GPUs, tp {deployment.tp}, dp {deployment.dp}, "
        f"{deployment.host_bytes / GIB:.0f} GiB of host memory a machine"
    )
    table.add_column("GPU memory of one rank")
    table.add_column("GiB", justify="right")
    weights = f"weights ({model.weight_type.value}, estimate)" if device.weights_estimated else "weights (as given)"
    rows = (
        ("CUDA context and communicators (estimate)", device.overhead),
        (f"outside memory fraction {deployment.mem_fraction:g}: activations, graphs", device.slack),
        (weights, device.weights),
        ("cache: the table below", device.cache),
    )
    for what, num_bytes in rows:
        table.add_row(what, f"{num_bytes / GIB:.2f}")
    table.add_section()
    table.add_row("total", f"{device.total / GIB:.2f}")
    return table


def _fit_table(planned: Planned) -> Table:
    load = planned.load
    table = Table(
        title=f"requests at once, {load.prompt_tokens} tokens in, {load.output_tokens} out, each at its full length"
    )
    for name, justify in (("", "left"), ("per cache", "right"), ("in all", "right"), ("bound by", "left")):
        table.add_column(name, justify=justify)
    meaning = {
        "plain": "plain: without HiSparse, in the same GPU memory",
        "full": "full: every page on the GPU",
        "mixed": "mixed: one prompt being prefilled, the others on hot buffers and tails",
        "none": "none: every request on hot buffer and tail",
    }
    for fit in (planned.plain, *planned.hisparse):
        table.add_row(meaning[fit.mode], str(fit.per_cache), str(fit.total), fit.bound)
    return table


def _link_table(planned: Planned) -> Table:
    table = Table(
        title="rows from the host in one decode step, per GPU; all selected rows counted as off the resident pages"
    )
    names = (
        "missed",
        "requests",
        "MB",
        "ms, nothing overlaps (as now)",
        "ms, followers hidden (bound)",
        "ahead of plain from ms a step",
    )
    for name in names:
        table.add_column(name, justify="right")
    for time in planned.link:
        ahead = "-" if time.ahead_above_ms is None else f"{time.ahead_above_ms:.1f}"
        cells = (f"{time.step_bytes / 1e6:.1f}", f"{time.exposed_ms:.2f}", f"{time.followers_hidden_ms:.2f}", ahead)
        table.add_row(f"{time.miss_rate:.1%}", str(time.requests), *cells)
    return table


def as_json(planned: Planned) -> dict[str, Any]:
    """All inputs and figures as plain values."""
    memory = planned.memory
    return {
        "version": __version__,
        "hisparse_config": settings_of(planned),
        "server_arguments": flags_of(planned),
        "reasons": reasons_of(planned),
        "notes": list(notes_of(planned)),
        "host_bytes_per_token": memory.shape.kv_token_bytes,
        "index_bytes_per_token": memory.shape.index_token_bytes,
        "device_share_of_plain": memory.device_tokens / max(memory.plain_tokens, 1),
        "least_device_tokens": memory.least_device_tokens,
        "plain_tokens": memory.plain_tokens,
        **msgspec.to_builtins(planned),
    }


def write_json(planned: Planned, path: Path) -> None:
    """Write `as_json` to a file."""
    path.write_text(json.dumps(as_json(planned), indent=1) + "\n", encoding="utf-8")
