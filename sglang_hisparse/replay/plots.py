"""PNG files of a replay and of a policy comparison.

Called by the replay command with series that are already computed; imports matplotlib when asked to draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_hisparse.replay.history import WINDOW, History, rolling_mean, rolling_ratio

if TYPE_CHECKING:
    from sglang_hisparse.replay.comparison import Outcome

MIB = 1 << 20


def _figure(rows: int, title: str) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.2 + 3.0 * rows), layout="constrained")
    panels = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    panels[0].set_title(title)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.margins(x=0)
    return figure, panels


def _mark_phases(panels: list[Any], history: History) -> None:
    for name, start in history.phases:
        for panel in panels:
            panel.axvline(start, color="grey", linewidth=0.8, linestyle=":")
        panels[0].annotate(
            name,
            (start, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, -10),
            textcoords="offset points",
            fontsize="x-small",
        )
    panels[-1].set_xlabel("step")


def _finish(figure: Any, panels: list[Any], path: Path) -> Path:
    for panel in panels:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    return path


def plot_replay(history: History, num_device_pages: int, title: str, folder: Path) -> list[Path]:
    """misses.png, residency.png and bytes.png in `folder`, which is made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _plot_misses(history, title, folder / "misses.png"),
        _plot_residency(history, num_device_pages, title, folder / "residency.png"),
        _plot_bytes(history, title, folder / "bytes.png"),
    ]


def _plot_misses(history: History, title: str, path: Path) -> Path:
    fetched = history.grown("rows_fetched")
    selected = sum(history.grown(name) for name in ("rows_resident", "rows_hot", "rows_fetched"))
    off_device = selected - history.grown("rows_resident")
    figure, (top, bottom) = _figure(2, f"{title}: misses")
    top.plot(fetched, color="tab:blue", alpha=0.25, linewidth=0.7, label="rows fetched in the step")
    top.plot(rolling_mean(fetched), color="tab:blue", label=f"mean of {WINDOW} steps")
    top.set_ylabel("rows")
    bottom.plot(100 * rolling_ratio(fetched, selected), label="of all selected rows")
    bottom.plot(100 * rolling_ratio(fetched, off_device), label="of the rows that were not resident")
    bottom.set_ylabel(f"misses, %, {WINDOW} steps")
    _mark_phases([top, bottom], history)
    return _finish(figure, [top, bottom], path)


def _plot_residency(history: History, num_device_pages: int, title: str, path: Path) -> Path:
    steps = np.arange(len(history.counts))
    resident, hot = np.array(history.pages_resident), np.array(history.pages_hot)
    figure, (top, bottom) = _figure(2, f"{title}: residency")
    labels = ("resident pages", "hot leases", "free")
    top.stackplot(
        steps,
        resident,
        hot,
        num_device_pages - resident - hot,
        labels=labels,
        colors=("tab:blue", "tab:red", "lightgrey"),
        alpha=0.7,
    )
    top.set_ylabel("device pages")
    modes = ("full", "mixed", "none")
    bottom.stackplot(steps, *(history.grown(f"request_steps_{mode}") for mode in modes), labels=modes, alpha=0.7)
    bottom.set_ylabel("decoding requests")
    _mark_phases([top, bottom], history)
    return _finish(figure, [top, bottom], path)


def _plot_bytes(history: History, title: str, path: Path) -> Path:
    figure, (panel,) = _figure(1, f"{title}: bytes over the link")
    for name, label, color in (
        ("bytes_to_host", "to the host", "tab:orange"),
        ("bytes_to_device", "to the device", "tab:blue"),
    ):
        mib = history.grown(name) / MIB
        panel.plot(mib, color=color, alpha=0.25, linewidth=0.7)
        panel.plot(rolling_mean(mib), color=color, label=f"{label}, mean of {WINDOW} steps")
    panel.set_ylabel("MiB per step")
    _mark_phases([panel], history)
    return _finish(figure, [panel], path)


def plot_policies(outcomes: dict[str, list[Outcome]], folder: Path) -> list[Path]:
    """misses-SOURCE.png for each source: misses per selection over the steps, a rolling mean, one panel a buffer."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for source, found in outcomes.items():
        buffers = sorted({outcome.buffer for outcome in found})
        figure, panels = _figure(len(buffers), f"{source}: misses by replacement policy, mean of {WINDOW} steps")
        for panel, buffer in zip(panels, buffers, strict=True):
            for outcome in found:
                if outcome.buffer == buffer:
                    percent = 100 * rolling_ratio(outcome.misses, outcome.selected)
                    # The resolver's own lies on exact LRU: a broad line below the others shows both.
                    broad = (
                        {"linewidth": 5, "alpha": 0.4, "zorder": 1}
                        if outcome.policy == "turnover"
                        else {"linewidth": 1.1}
                    )
                    panel.plot(percent, label=outcome.policy, **broad)
            panel.set_ylabel(f"misses, %, buffer {buffer}")
            panel.set_ylim(bottom=0)
        panels[-1].set_xlabel("step of a request")
        paths.append(_finish(figure, panels, folder / f"misses-{source}.png"))
    return paths
