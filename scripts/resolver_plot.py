"""Draw resolver_h200.json: bars of ours, the built-in, vLLM's and the plain gather at every point, one panel a row size.

python scripts/resolver_plot.py resolver_h200.json resolver_h200.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = {
    "builtin_us": ("SGLang built-in", "#b0b0b0"),
    "vllm_us": ("vLLM, as it sizes its table", "#c9dbe6"),
    "vllm_roomy_us": ("vLLM, table of twice the size", "#7aa6c2"),
    "ours_us": ("sglang-hisparse", "#d1495b"),
    "gather_us": ("gather alone", "#2e4057"),
}


def panels(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Title -> rows: the main table by row size, then every other size together."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        main = (row["top_k"], row["buffer"]) == (2048, 4096)
        title = f"rows of {row['row_bytes']:,} B, k 2,048, buffer 4,096" if main else "other sizes, rows of 1,152 B"
        found.setdefault(title, []).append(row)
    return dict(sorted(found.items(), key=lambda item: item[0].startswith("other")))


def label(row: dict[str, Any]) -> str:
    """What a group of bars is called: batch x misses, and its size where that is not the usual one."""
    size = "" if (row["top_k"], row["buffer"]) == (2048, 4096) else f"\nk {row['top_k']}\n{row['buffer'] // 1024} Ki"
    return f"{row['batch']}x{row['misses']}{size}"


def draw(rows: list[dict[str, Any]], title: str, target: Path) -> None:
    """Write a PNG; microseconds on a logarithmic scale, a column that nobody measured is left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = panels(rows)
    figure, axes = pyplot.subplots(len(shown), 1, figsize=(13, 4.2 * len(shown)), squeeze=False, layout="constrained")
    for axis, (name, points) in zip(axes[:, 0], shown.items(), strict=True):
        columns = {key: value for key, value in COLUMNS.items() if any(row.get(key) for row in points)}
        width = 0.8 / max(1, len(columns))
        for place, (key, (text, colour)) in enumerate(columns.items()):
            heights = [row.get(key) or float("nan") for row in points]
            at = [i + (place - (len(columns) - 1) / 2) * width for i in range(len(points))]
            axis.bar(at, heights, width, label=text, color=colour)
        for i, row in enumerate(points):
            if row.get("builtin_us"):
                text, at = f"{row['builtin_us'] / row['ours_us']:.1f}x", i - (len(columns) - 1) / 2 * width
                axis.text(at, row["builtin_us"] * 1.08, text, ha="center", fontsize=7)
        axis.set_yscale("log")
        axis.set_xticks(range(len(points)), [label(row) for row in points], fontsize=8)
        axis.set_ylabel("us per call (above: built-in over ours)")
        axis.set_title(name, fontsize=10)
        axis.legend(fontsize=8, loc="upper left", ncols=2)
    figure.suptitle(title, fontsize=11)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    result = json.loads(source.read_text(encoding="utf-8"))
    device = result["versions"].get("device", "")
    draw(
        result["rows"],
        f"Resolve and fetch, batch x misses per request ({device}, commit {str(result['commit'])[:7]})",
        target,
    )


if __name__ == "__main__":
    main()
