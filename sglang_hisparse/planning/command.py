"""The body of `sglang-hisparse plan`: options, tables, JSON, plot.

Registered by cli.py. Heavy modules are imported when the command runs, so that `--help` needs none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_hisparse.config import GIB, Eviction
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.planning.model_shapes import BUILT_IN, CacheType, ModelShape, built_in, shape_from_file
from sglang_hisparse.planning.planner import Choices, Deployment, Load, make_plan

_D, _L, _C = Deployment(), Load(), Choices()


def plan(
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(BUILT_IN)}.")] = None,
    config_json: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Any other model's config.json.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs in all.")] = _D.gpus,
    gpu_memory_gib: Annotated[float, typer.Option(min=1, help="Memory of one GPU; the default is an H200's.")] = 139.8,
    gpus_per_host: Annotated[int, typer.Option(min=1, help="GPUs of one machine.")] = _D.gpus_per_host,
    host_memory_gib: Annotated[float, typer.Option(min=1, help="Host memory that is free on one machine.")] = 1024,
    dtype: Annotated[CacheType, typer.Option(help="Type of the KV cache.")] = _C.cache_type,
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks of one server. Default: all GPUs.")] = None,
    dp: Annotated[int, typer.Option(min=1, help="Of these, ranks with an attention of their own (--attn-dp-size).")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")] = _L.prompt_tokens,
    output: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = _L.output_tokens,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests wanted at once. Default: as many as fit.")] = None,
    max_running_requests: Annotated[int | None, typer.Option(min=1, help="The server's flag. Default: chosen for the load.")] = None,
    mem_fraction: Annotated[float, typer.Option(min=0.1, max=0.99, help="--mem-fraction-static.")] = _D.mem_fraction,
    weights_gib: Annotated[float | None, typer.Option(min=0, help="Weights of one rank as a server logged them. Default: an estimate.")] = None,
    overhead_gib: Annotated[float, typer.Option(min=0, help="CUDA context and communicators on each GPU.")] = 1.5,
    ratio: Annotated[float | None, typer.Option(min=1, help="host_to_device_ratio. Default: chosen for the load.")] = None,
    buffer: Annotated[int | None, typer.Option(min=1, help="device_buffer_size. Default: 2 x top-k, less for requests that are hardly longer.")] = None,
    eviction: Annotated[Eviction, typer.Option(help="Which rows leave a hot buffer; index_score takes memory for the scores.")] = _C.eviction,
    elastic_border: Annotated[bool | None, typer.Option(help="Memory moves from KV to index-K as tokens are cached. Default: where that gains tokens.")] = _C.elastic,
    host_pool_gib: Annotated[float | None, typer.Option(min=0.01, help="host_pool_gib, a bound on pinned memory per rank.")] = None,
    link_gbps: Annotated[float | None, typer.Option(min=0.1, help="Scattered rows from the host, GB/s. Default: PCIe Gen5 x16 as measured.")] = None,
    miss_rate: Annotated[list[float] | None, typer.Option(min=0, max=1, help="Share of selected rows fetched; may be repeated.")] = None,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Write all figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Write requests at once against context to this PNG.")] = None,
) -> None:  # fmt: skip
    """Say how many requests fit a deployment, plain and with HiSparse, and which settings to use.

    Exit status 2 if the deployment cannot work; the message names the figure that would.
    """
    deployment = Deployment(
        gpus=gpus,
        tp=tp or gpus,
        dp=dp,
        gpu_bytes=int(gpu_memory_gib * GIB),
        gpus_per_host=gpus_per_host,
        host_bytes=int(host_memory_gib * GIB),
        mem_fraction=mem_fraction,
        overhead_bytes=int(overhead_gib * GIB),
        weight_bytes=None if weights_gib is None else int(weights_gib * GIB),
        max_running_requests=max_running_requests,
    )
    choices = Choices(dtype, ratio, buffer, host_pool_gib, link_gbps, tuple(miss_rate or _C.miss_rates), eviction, elastic_border)
    planned = make_plan(_model(model, config_json), deployment, Load(context, output, requests), choices)
    from sglang_hisparse.planning.report import show, write_json

    # Tables keep their form in a log file too.
    console = Console()
    show(planned, console if console.is_terminal else Console(width=118))
    if json is not None:
        write_json(planned, json)
    if plot is not None:
        from sglang_hisparse.planning.plots import write_plot

        write_plot(planned, plot)


def _model(name: str | None, config_json: Path | None) -> ModelShape:
    if (name is None) == (config_json is None):
        raise ConfigError(f"--model, --config-json: give one of them; --model knows {', '.join(BUILT_IN)}")
    return built_in(name) if config_json is None else shape_from_file(config_json)
