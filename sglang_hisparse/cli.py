"""The command `sglang-hisparse`: plan, check, replay, config, build.

Owns argument parsing and what is printed; the work is done by the modules that each command imports when it runs, so
that `--help` needs neither torch nor SGLang. It holds no setting of its own and never starts a server.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sglang_hisparse import __version__
from sglang_hisparse.config import HiSparseConfig, ModelFacts, describe, parse_config, reference_markdown
from sglang_hisparse.doctor.command import check
from sglang_hisparse.errors import ConfigError, HiSparseError
from sglang_hisparse.planning.command import plan
from sglang_hisparse.replay.command import replay

console = Console()
errors = Console(stderr=True)
app = typer.Typer(
    name="sglang-hisparse",
    help="Hierarchical sparse-attention KV cache for SGLang.",
    no_args_is_help=True,
    add_completion=False,
    # Errors that a person can act on are printed by `main` in one line; anything else is a bug and keeps its traceback.
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script; exit status 2 for what the caller can put right."""
    try:
        app()
    except HiSparseError as error:
        errors.print(f"[bold red]error:[/] {type(error).__name__}:", end=" ")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Hierarchical sparse-attention KV cache for SGLang."""


@app.command()
def config(
    settings: Annotated[
        str | None, typer.Argument(help="JSON text as for --hisparse-config, or a file that holds it.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="config.json of the model, to check the settings against it."),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page of the server.")] = 64,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print README's tables and leave.")] = False,
) -> None:
    """Show every setting with its range and default; given SETTINGS, check them and show what they amount to."""
    if markdown:
        from sglang_hisparse.validation import refusals_markdown

        typer.echo(f"{reference_markdown()}\n\n{refusals_markdown()}")
    elif settings is None and model is None:
        console.print(_reference_table())
    else:
        console.print(_settings_table(_text_of(settings), model, page_size))


def _text_of(settings: str | None) -> str | None:
    if settings is None or settings.lstrip().startswith("{"):
        return settings
    path = Path(settings)
    if not path.is_file():
        raise ConfigError(f"{settings}: is neither a file nor a JSON object; allowed: a path, or text such as '{{}}'")
    return path.read_text(encoding="utf-8")


def _reference_table() -> Table:
    table = Table(title="--hisparse-config")
    for name in ("key", "allowed", "unit", "default", "meaning"):
        table.add_column(name, no_wrap=name == "key")
    for doc in describe():
        table.add_row(doc.key, doc.allowed, doc.unit, doc.default, doc.meaning)
    return table


def _settings_table(text: str | None, model: Path | None, page_size: int) -> Table:
    parsed = parse_config(text)
    values = {doc.key: value if (value := getattr(parsed, doc.key)) is not None else doc.default for doc in describe()}
    if model is not None:
        values |= _model_values(parsed, model, page_size)
    table = Table("setting", "value", title="accepted")
    for key, value in values.items():
        table.add_row(key, str(getattr(value, "value", value)))
    table.caption = "\n".join(parsed.notes()) or None
    return table


def _model_values(parsed: HiSparseConfig, model: Path, page_size: int) -> dict[str, Any]:
    from sglang_hisparse.index_groups import index_groups

    try:
        model_config = json.loads(model.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--model: {model} is not JSON ({error}); allowed: the config.json of a model") from None
    model_config = model_config.get("text_config", model_config)
    resolved = parsed.resolve(ModelFacts.from_text_config(model_config, page_size=page_size))
    groups = index_groups(model_config)
    return {
        "top_k": resolved.top_k,
        "device_buffer_size": resolved.device_buffer_size,
        "pages of one hot buffer": resolved.hot_pages,
        "layers with an indexer": f"{len(groups)} of {sum(len(group.layers) for group in groups)}",
    }


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="CUDA architecture such as sm_90a; may be repeated. Default: that of the GPU here."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Put the libraries there too, for machines without a compiler."),
    ] = None,
    cpu_only: Annotated[bool, typer.Option("--cpu-only", help="Build the CPU library alone.")] = False,
) -> None:
    """Compile the kernels ahead of the first start, so that no server waits for the compiler or needs one."""
    from sglang_hisparse.kernels import build as kernels
    from sglang_hisparse.kernels.prebuilt import PREBUILT_VARIABLE, Library, publish

    def report(what: str, library: Library, built: Path) -> None:
        kernels.load(built)
        where = built if out is None else publish(built, library, out)
        console.print(f"{what}: ready, {where}", highlight=False, soft_wrap=True)

    architectures = [kernels.parse_architecture(text) for text in arch or ()]
    with console.status("compiling the CPU library"):
        built = kernels.build_cpu()
    report("CPU library", kernels.cpu_library(), built)
    for architecture in () if cpu_only else architectures or (kernels.device_architecture(),):
        with console.status(f"compiling the CUDA library for {architecture}"):
            built = kernels.build_cuda(architecture)
        report(f"CUDA library for {architecture}", kernels.cuda_library(architecture), built)
    if out is not None:
        console.print(f"to use them: {PREBUILT_VARIABLE}={out.resolve()}", highlight=False, soft_wrap=True)


app.command()(replay)
app.command()(plan)
app.command()(check)


if __name__ == "__main__":
    main()
