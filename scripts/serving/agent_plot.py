"""Draws the result of `bench_agent`: TTFT turn by turn, and throughput per number of conversations."""

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {
    "plain": "plain SGLang",
    "plain_hicache": "plain with HiCache",
    "builtin": "built-in HiSparse",
    "ours": "ours",
    "ours_elastic": "ours, elastic border",
}


def draw(document: dict[str, Any], path: pathlib.Path) -> None:
    """Write a PNG: one panel of TTFT per number of conversations, a last one of throughput. Raises ValueError without rows."""
    rows = document["rows"]
    if not rows:
        raise ValueError("no rows to draw")
    counts = sorted({row["conversations"] for row in rows})
    systems = [name for name in LABELS if any(row["system"] == name for row in rows)]
    figure, panels = plt.subplots(1, len(counts) + 1, figsize=(3.6 * (len(counts) + 1), 3.6), layout="constrained")
    for panel, count in zip(panels, counts, strict=False):
        for place, system in enumerate(systems):
            mine = sorted(
                (row["turn"], row["ttft_s"]) for row in rows if (row["conversations"], row["system"]) == (count, system)
            )
            if mine:
                panel.plot(*zip(*mine, strict=True), marker=".", color=f"C{place}", label=LABELS[system])
        panel.set(title=f"{count} at once", xlabel="turn", yscale="log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("TTFT, s (median)")
    panels[0].legend(fontsize="small")
    table = {(one["conversations"], one["system"]): one["output_tok_s"] for one in document["totals"]}
    for place, system in enumerate(systems):
        at = [index + 0.2 * (place - len(systems) / 2 + 0.5) for index in range(len(counts))]
        panels[-1].bar(at, [table.get((count, system), 0.0) for count in counts], 0.2, color=f"C{place}")
    panels[-1].set_xticks(range(len(counts)), [str(count) for count in counts])
    panels[-1].set(title="output tok/s", xlabel="conversations at once")
    panels[-1].grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
