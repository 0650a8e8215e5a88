"""The body of `sglang-hisparse replay`: options, progress, tables, exit status.

Registered by cli.py. Torch and the kernels are imported when the command runs, so that `--help` needs neither.
"""

from __future__ import annotations

import dataclasses
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
    from sglang_hisparse.recording.reader import Recording
    from sglang_hisparse.replay.engine import Engine
    from sglang_hisparse.replay.figures import ReplayReport
    from sglang_hisparse.replay.history import History
    from sglang_hisparse.replay.workload import Phase

_DEFAULTS = ReplayOptions()
ProfileName = Enum("ProfileName", {name: name for name in ("mix", *PROFILES)}, type=str)
FaultName = Enum(
    "FaultName", {name: name for name in ("host-byte", "promotion", "table", "wait", "hot-rows")}, type=str
)
_PROFILE, _RESIDENCY, _MIRRORING = (
    ProfileName(_DEFAULTS.profile), ResidencyMode(_DEFAULTS.residency), Mirroring(_DEFAULTS.mirroring),
)  # fmt: skip
_COLUMNS = (
    TextColumn("{task.description:<12}"),
    BarColumn(),
    TextColumn("{task.completed} steps"),
    TimeElapsedColumn(),
)


def replay(
    profile: Annotated[ProfileName, typer.Option(help="Locality of the top-k streams.")] = _PROFILE,
    stream: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Replay this recording (record_file of a server) instead."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Take the whole steps of a recording that was not closed.")
    ] = False,
    policies: Annotated[
        bool, typer.Option("--policies", help="Compare replacement policies on the streams; nothing else is replayed.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Write plots of misses, residency and bytes to this folder, as PNG."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same run.")] = _DEFAULTS.seed,
    scale: Annotated[float, typer.Option(min=0.05, help="Multiplies the steps of every phase.")] = _DEFAULTS.scale,
    device: Annotated[str, typer.Option(help="cpu, or cuda for the GPU's kernels and streams.")] = _DEFAULTS.device,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write all figures and parameters to this file.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at once, at most.")] = _DEFAULTS.max_requests,
    device_pages: Annotated[
        int | None,
        typer.Option(min=1, help=f"Pages of the device pool ({_DEFAULTS.device_pages}; recording: 40 % of its need)."),
    ] = None,
    ratio: Annotated[
        float, typer.Option(min=1, help="Logical pages per device page.")
    ] = _DEFAULTS.host_to_device_ratio,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help=f"Positions selected per step ({_DEFAULTS.top_k}; a recording has its own)."),
    ] = None,
    buffer: Annotated[
        int | None, typer.Option(min=1, help=f"Rows of one hot buffer ({_DEFAULTS.buffer_size}; recording: 2 x top_k).")
    ] = None,
    row_bytes: Annotated[int, typer.Option(min=16, help="Bytes of a token's row in one layer.")] = _DEFAULTS.row_bytes,
    groups: Annotated[int, typer.Option(min=1, help="Index groups.")] = _DEFAULTS.num_groups,
    layers_per_group: Annotated[
        int, typer.Option(min=1, help="A leader and its followers.")
    ] = _DEFAULTS.layers_per_group,
    min_context: Annotated[int, typer.Option(min=1, help="Shortest prompt, tokens.")] = _DEFAULTS.min_context,
    max_context: Annotated[int, typer.Option(min=1, help="Longest prompt, tokens.")] = _DEFAULTS.max_context,
    max_output: Annotated[int, typer.Option(min=1, help="Longest output, tokens.")] = _DEFAULTS.max_output,
    residency: Annotated[ResidencyMode, typer.Option(help="As in --hisparse-config.")] = _RESIDENCY,
    mirroring: Annotated[Mirroring, typer.Option(help="As in --hisparse-config.")] = _MIRRORING,
    plant: Annotated[FaultName | None, typer.Option(help="Plant a fault (CPU only), to see it found.")] = None,
) -> None:
    """Drive the residency protocol with synthetic requests and compare every row that comes back with its home content.

    Exit status 1 if a row was wrong or the protocol was broken, 2 if an option or a recording cannot be accepted.
    """
    given = {"top_k": top_k, "buffer_size": buffer, "device_pages": device_pages}
    sizes = {name: value for name, value in given.items() if value is not None and stream is None}
    options = ReplayOptions(
        profile=profile.value, seed=seed, scale=scale, device=device, max_requests=requests, host_to_device_ratio=ratio,
        row_bytes=row_bytes, num_groups=groups, layers_per_group=layers_per_group, min_context=min_context,
        max_context=max_context, max_output=max_output, residency=residency.value, mirroring=mirroring.value, **sizes,
    )  # fmt: skip
    recording = None
    if stream is not None:
        options, recording = _recorded(options, stream, partial, **given)
    if policies:
        _compare(options, recording, json, plot)
    else:
        _replay(options, recording, json, plot, plant.value if plant else None)


def _recorded(
    options: ReplayOptions,
    path: Path,
    partial: bool,
    *,
    top_k: int | None,
    buffer_size: int | None,
    device_pages: int | None,
) -> tuple[ReplayOptions, Recording]:
    from sglang_hisparse.recording.reader import read_recording
    from sglang_hisparse.replay.recorded import recorded_options

    recording = read_recording(path, partial=partial)
    if top_k not in (None, recording.header.top_k):
        raise ConfigError(f"--top-k: {top_k}, but {path} has {recording.header.top_k}; allowed: leave it out")
    options = recorded_options(options, recording, buffer_size=buffer_size, device_pages=device_pages)
    return dataclasses.replace(options, stream=path.name), recording


def _replay(
    options: ReplayOptions, recording: Recording | None, json: Path | None, plot: Path | None, plant: str | None
) -> None:
    history = None
    if plot is not None:
        from sglang_hisparse.replay.history import History

        history = History()
    try:
        report = run(options, plant=plant, recording=recording, history=history)
    except InvariantError as error:
        typer.echo(f"FAILED: {error}", err=True)
        raise typer.Exit(1) from error
    from sglang_hisparse.replay.report import show, write_json

    console = _console()
    show(report, console)
    if json is not None:
        write_json(report, json)
    if plot is not None and history is not None:
        from sglang_hisparse.replay.plots import plot_replay

        title = options.stream or f"profile {options.profile}"
        _name_files(plot_replay(history, options.device_pages, title, plot), console)
    if not report.ok:
        raise typer.Exit(1)


def _compare(options: ReplayOptions, recording: Recording | None, json: Path | None, plot: Path | None) -> None:
    from sglang_hisparse.kernels.build import load_cpu
    from sglang_hisparse.replay.policy_table import policy_table, run_policies, write_json

    errors, console = Console(stderr=True), _console()
    with errors.status("compiling the kernels (the first run only)"):
        load_cpu()
    with Progress(*_COLUMNS, console=errors, transient=True) as progress:
        task = progress.add_task("comparing", total=None)
        report, outcomes = run_policies(
            options, recording, lambda total: progress.update(task, total=total), lambda: progress.advance(task)
        )
    console.print(policy_table(report))
    if json is not None:
        write_json(report, json)
    if plot is not None:
        from sglang_hisparse.replay.plots import plot_policies

        _name_files(plot_policies(outcomes, plot), console)


def _console() -> Console:
    """Tables keep their form in a log file too."""
    console = Console()
    return console if console.is_terminal else Console(width=118)


def _name_files(paths: list[Path], console: Console) -> None:
    console.print("plots: " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)


def run(
    options: ReplayOptions,
    plant: str | None = None,
    recording: Recording | None = None,
    history: History | None = None,
) -> ReplayReport:
    """One replay with a progress bar on the terminal; `history` is filled step by step."""
    import torch

    from sglang_hisparse.kernels.build import load_cpu, load_cuda
    from sglang_hisparse.replay.engine import Engine
    from sglang_hisparse.replay.faults import FAULTS
    from sglang_hisparse.replay.recorded import RecordedWorkload, recorded_phases
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
    workload = None if recording is None else RecordedWorkload(options, recording)
    engine = Engine(options, FAULTS[plant] if plant else None, workload)
    phases = standard_phases(options) if recording is None else recorded_phases(options)
    return _run_with_progress(engine, phases, console, history)


def _run_with_progress(engine: Engine, phases: list[Phase], console: Console, history: History | None) -> ReplayReport:
    with Progress(*_COLUMNS, console=console, transient=True) as progress:
        tasks = {phase.name: progress.add_task(phase.name, total=phase.steps, start=False) for phase in phases}
        begun: set[str] = set()

        def on_step(phase: Phase, steps: int) -> None:
            if phase.name not in begun:
                begun.add(phase.name)
                progress.start_task(tasks[phase.name])
            progress.update(tasks[phase.name], completed=steps)
            if history is not None:
                history.observe(engine, phase.name)

        return engine.run(phases, on_step)
