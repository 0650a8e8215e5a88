"""Requests at once against context length, as a PNG.

Called by the command `plan`. The pools are those of the plan; only the length of the requests changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sglang_hisparse.planning.planner import Planned, fits

_POINTS = 60
_SHORTEST_TOKENS = 2048
_STYLES = {"plain": "--", "full": "-", "mixed": "-", "none": ":"}


@dataclass(frozen=True, slots=True)
class Curve:
    """Requests in all, one value for each of `prompt_tokens`."""

    mode: str
    prompt_tokens: tuple[int, ...]
    requests: tuple[int, ...]


def curves(planned: Planned) -> tuple[Curve, ...]:
    """One curve for plain and each residency mode, from 2,048 tokens to the longest prompt, evenly on a log scale."""
    last = max(
        planned.longest_request_tokens - planned.load.output_tokens, planned.load.prompt_tokens, 2 * _SHORTEST_TOKENS
    )
    factor = (last / _SHORTEST_TOKENS) ** (1 / (_POINTS - 1))
    prompts = [int(_SHORTEST_TOKENS * factor**point) for point in range(_POINTS)]
    rows = [
        fits(planned.memory, replace(planned.load, prompt_tokens=prompt), planned.deployment.caches)
        for prompt in prompts
    ]
    return tuple(
        Curve(mode[0].mode, tuple(prompts), tuple(fit.total for fit in mode)) for mode in zip(*rows, strict=True)
    )


def write_plot(planned: Planned, path: Path) -> None:
    """Write the PNG."""
    # A canvas of its own: no display is needed and pyplot's global state is left alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves(planned):
        axes.plot(
            curve.prompt_tokens, [value or None for value in curve.requests], _STYLES[curve.mode], label=curve.mode
        )
    axes.axvline(planned.load.prompt_tokens, color="grey", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="prompt tokens",
        ylabel="requests at once",
        title=f"{planned.model.name}, {planned.deployment.gpus} GPUs, {planned.choices.cache_type.value} cache, "
        f"ratio {planned.memory.ratio:.4g}, hot buffer {planned.memory.hot.buffer_rows}, "
        f"{planned.load.output_tokens} tokens out",
    )
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
