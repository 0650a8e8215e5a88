"""The body of `sglang-hisparse replay`: options, progress, tables, exit status.

Registered by cli.py. Torch and the kernels are imported when the command runs, so that `--help` needs neither.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_hisparse.errors import ConfigError, InvariantError
from sglang_hisparse.replay.options import ReplayOptions
from sglang_hisparse.replay.profiles import PROFILES
from sglang_hisparse.residency import Mirroring, ResidencyMode

if TYPE_CHECKING:
    from sglang_hisparse.replay.engine import Engine
    from sglang_hisparse.replay.figures import ReplayReport
    from sglang_hisparse.replay.workload import Phase

_DEFAULTS = ReplayOptions()
ProfileName = Enum("ProfileName", {name: name for name in ("mix", *PROFILES)}, type=str)
FaultName = Enum("FaultName", {name: name for name in ("host-byte", "promotion", "table", "wait", "hot-rows")}, type=str)
_PROFILE, _RESIDENCY, _MIRRORING = (
    ProfileName(_DEFAULTS.profile), ResidencyMode(_DEFAULTS.residency), Mirroring(_DEFAULTS.mirroring),
)  # fmt: skip


def replay(
    profile: Annotated[ProfileName, typer.Option(help="Locality of the top-k streams.")] = _PROFILE,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same run.")] = _DEFAULTS.seed,
    scale: Annotated[float, typer.Option(min=0.05, help="Multiplies the steps of every phase.")] = _DEFAULTS.scale,
    device: Annotated[str, typer.Option(help="cpu, or cuda for the GPU's kernels and streams.")] = _DEFAULTS.device,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Write all figures and parameters to this file.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at once, at most.")] = _DEFAULTS.max_requests,
    device_pages: Annotated[int, typer.Option(min=1, help="Pages of the device pool.")] = _DEFAULTS.device_pages,
    ratio: Annotated[float, typer.Option(min=1, help="Logical pages per device page.")] = _DEFAULTS.host_to_device_ratio,
    top_k: Annotated[int, typer.Option(min=1, help="Positions selected per step.")] = _DEFAULTS.top_k,
    buffer: Annotated[int, typer.Option(min=1, help="Rows of one hot buffer.")] = _DEFAULTS.buffer_size,
    row_bytes: Annotated[int, typer.Option(min=16, help="Bytes of a token's row in one layer.")] = _DEFAULTS.row_bytes,
    groups: Annotated[int, typer.Option(min=1, help="Index groups.")] = _DEFAULTS.num_groups,
    layers_per_group: Annotated[int, typer.Option(min=1, help="A leader and its followers.")] = _DEFAULTS.layers_per_group,
    min_context: Annotated[int, typer.Option(min=1, help="Shortest prompt, tokens.")] = _DEFAULTS.min_context,
    max_context: Annotated[int, typer.Option(min=1, help="Longest prompt, tokens.")] = _DEFAULTS.max_context,
    max_output: Annotated[int, typer.Option(min=1, help="Longest output, tokens.")] = _DEFAULTS.max_output,
    residency: Annotated[ResidencyMode, typer.Option(help="As in --hisparse-config.")] = _RESIDENCY,
    mirroring: Annotated[Mirroring, typer.Option(help="As in --hisparse-config.")] = _MIRRORING,
    plant: Annotated[FaultName | None, typer.Option(help="Plant a fault (CPU only), to see it found.")] = None,
) -> None:
    """Drive the residency protocol with synthetic requests and compare every row that comes back with its home content.

    Exit status 1 if a row was wrong or the protocol was broken, 2 if an option cannot be accepted.
    """
    options = ReplayOptions(
        profile=profile.value, seed=seed, scale=scale, device=device, max_requests=requests, device_pages=device_pages,
        host_to_device_ratio=ratio, top_k=top_k, buffer_size=buffer, row_bytes=row_bytes, num_groups=groups,
        layers_per_group=layers_per_group, min_context=min_context, max_context=max_context, max_output=max_output,
        residency=residency.value, mirroring=mirroring.value,
    )  # fmt: skip
    try:
        report = run(options, plant=plant.value if plant else None)
    except InvariantError as error:
        typer.echo(f"FAILED: {error}", err=True)
        raise typer.Exit(1) from error
    from sglang_hisparse.replay.report import show, write_json

    # Tables keep their form in a log file too.
    console = Console()
    show(report, console if console.is_terminal else Console(width=118))
    if json is not None:
        write_json(report, json)
    if not report.ok:
        raise typer.Exit(1)


def run(options: ReplayOptions, plant: str | None = None) -> ReplayReport:
    """One replay with a progress bar on the terminal."""
    import torch

    from sglang_hisparse.kernels.build import load_cpu, load_cuda
    from sglang_hisparse.replay.engine import Engine
    from sglang_hisparse.replay.faults import FAULTS
    from sglang_hisparse.replay.workload import standard_phases

    if plant and options.device != "cpu":
        raise ConfigError(f"--plant: {plant} needs --device cpu; faults are planted in the CPU worker")
    if options.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--device: {options.device} is not there; allowed: cpu")
    # The tensors of a step are small: threads that wait for each other cost more than they bring.
    torch.set_num_threads(1)
    console = Console(stderr=True)
    with console.status("compiling the kernels (the first run only)"):
        load_cpu()
        if options.device != "cpu":
            load_cuda()
    engine = Engine(options, FAULTS[plant] if plant else None)
    return _run_with_progress(engine, standard_phases(options), console)


def _run_with_progress(engine: Engine, phases: list[Phase], console: Console) -> ReplayReport:
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TextColumn("{task.completed} steps"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {phase.name: progress.add_task(phase.name, total=phase.steps, start=False) for phase in phases}
        begun: set[str] = set()

        def on_step(phase: Phase, steps: int) -> None:
            if phase.name not in begun:
                begun.add(phase.name)
                progress.start_task(tasks[phase.name])
            progress.update(tasks[phase.name], completed=steps)

        return engine.run(phases, on_step)
