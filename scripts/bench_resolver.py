"""Time the resolver against SGLang's built-in swap-in, vLLM's resolver and the gather ceiling of the link, in one process.

Each step selects `top_k` positions per request, of which exactly `misses` are not in the hot buffer. Calls are replayed from a
CUDA graph; a figure is the median over replays, in microseconds per call. Every timed output is checked. The built-in needs
`sglang` importable, vLLM's needs --vllm-library (the wheel's _C_stable_libtorch shared object); either is left out otherwise. vLLM is
timed twice: with the bound on distinct rows that it passes itself, which fills its hash table to the last slot, and with twice that.

    python scripts/bench_resolver.py --json resolver_h200.json     # everything, about 90 seconds
    python scripts/bench_resolver.py --quick                       # the main table only
    python scripts/bench_resolver.py --parts imbalance pitch       # some parts only
    python scripts/bench_resolver.py --option cluster_blocks=2     # ours with a keyword argument of `resolve`
    python scripts/resolver_plot.py resolver_h200.json resolver_h200.png
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from resolver_peers import load_vllm, time_builtin, time_vllm
from resolver_workload import (
    PAGE,
    STEPS,
    Case,
    Variant,
    Workload,
    ceiling_gbs,
    floor_us,
    pinned_block,
    time_behind,
    time_ours,
    time_sample,
)

from sglang_hisparse.transfer.hot_buffer import SAMPLE_PERIOD

Row = dict[str, object]

# Batch, misses per request: the points of the design's table.
POINTS = ((1, 0), (1, 102), (1, 307), (1, 614), (8, 102), (8, 614), (32, 0), (32, 102), (64, 102), (64, 614))
# top_k, buffer: the other sizes, each at batch 1 and 32, without misses and with 5 % of them.
SIZES = ((2048, 8192), (2048, 16384), (2048, 32768), (1024, 4096), (1024, 8192), (512, 4096), (512, 8192))
# Written into the result, so that it says what its figures are.
LAUNCHED = (
    "ours_us as served: each call may start before the kernel ahead, here the call before, has ended, and waits for it inside; "
    "ours_plain_us without that"
)
PITCHES = (656, 704, 768)
PITCH_POINTS = ((1, 102), (1, 614), (8, 614), (32, 102))
SCORE_POINTS = ((1, 0), (1, 102), (1, 614), (8, 102), (32, 102))
BATCHES = (1, 8, 32, 64)
# And whether all pages are resident.
LAUNCH_POINTS = ((1, 0, False), (1, 102, False), (32, 0, False), (32, 102, False), (32, 0, True))


@dataclass(frozen=True, slots=True)
class Bench:
    """What to time: our variant, whether vLLM's library is loaded, row sizes."""

    variant: Variant
    has_vllm: bool
    row_bytes: tuple[int, ...]

    def table(self) -> list[Row]:
        """The points of the design's table at k 2048, 4,096 hot rows."""
        cases = [Case(row, 2048, 4096, batch, misses) for row in self.row_bytes for batch, misses in POINTS]
        return shown("table", (self.compare(case) for case in cases))

    def sizes(self) -> list[Row]:
        """Other buffers and other k, rows of the first size."""
        cases = [
            Case(self.row_bytes[0], top_k, buffer, batch, misses)
            for top_k, buffer in SIZES
            for batch in (1, 32)
            for misses in (0, top_k // 20)
        ]
        return shown("sizes", (self.compare(case) for case in cases))

    def compare(self, case: Case) -> Row:
        """One row of resolver_h200.json."""
        work = Workload(case)
        ours, correct = time_ours(work, self.variant)
        plain, plain_correct = time_ours(work, replace(self.variant, overlap=False))
        builtin = time_builtin(work)
        vllm = time_vllm(work, case.top_k) if self.has_vllm else None
        roomy = time_vllm(work, min(2 * case.top_k, case.buffer)) if self.has_vllm else None
        gather = work.gather_us()
        return {
            **asdict(case),
            "ours_us": round(ours, 2),
            "ours_plain_us": round(plain, 2),
            "builtin_us": round(builtin[0], 2) if builtin else None,
            "vllm_us": round(vllm[0], 2) if vllm else None,
            "vllm_roomy_us": round(roomy[0], 2) if roomy else None,
            "gather_us": round(gather, 2),
            "ours_gbs": round(work.misses_per_step * case.row_bytes / ours / 1e3, 1),
            "correct": correct and plain_correct,
            "builtin_correct": builtin[1] if builtin else None,
            "vllm_correct": vllm[1] and (roomy is None or roomy[1]) if vllm else None,
        }

    def resident(self) -> list[Row]:
        """All pages resident: a translation only."""

        def rows() -> Iterator[Row]:
            for batch in BATCHES:
                case = Case(self.row_bytes[0], 2048, 4096, batch, 0)
                work = Workload(case)
                row: Row = {"batch": batch, "top_k": case.top_k}
                for name, variant in (("ours", self.variant), ("ours_plain", replace(self.variant, overlap=False))):
                    took, correct = time_ours(work, variant, resident=True)
                    row |= {f"{name}_us": round(took, 2), f"{name}_correct": correct}
                yield row

        return shown("all resident", rows())

    def launches(self) -> list[Row]:
        """What an overlapped launch saves behind another kernel, which lets nothing start early: the small one of `floor_us`."""

        def rows() -> Iterator[Row]:
            floor = floor_us()
            for batch, misses, resident in LAUNCH_POINTS:
                work = Workload(Case(self.row_bytes[0], 2048, 4096, batch, misses))
                row: Row = {"batch": batch, "misses": misses, "resident": int(resident), "floor_us": round(floor, 2)}
                for name, overlap in (("overlapped", True), ("plain", False)):
                    took, correct = time_behind(work, replace(self.variant, overlap=overlap), resident=resident)
                    row |= {f"{name}_us": round(took, 2), f"{name}_correct": correct}
                yield row

        return shown("behind a small kernel", rows())

    def imbalance(self) -> list[Row]:
        """One request with 2,048 misses beside 31 with none, against the same number of misses spread evenly."""

        def rows() -> Iterator[Row]:
            for row_bytes in self.row_bytes:
                case = Case(row_bytes, 2048, 4096, 32, 64)
                one, one_right = time_ours(Workload(case, [2048] + [0] * 31), self.variant)
                even, even_right = time_ours(Workload(case), self.variant)
                yield {
                    "row_bytes": row_bytes,
                    "batch": 32,
                    "misses_in_all": 2048,
                    "one_us": round(one, 2),
                    "even_us": round(even, 2),
                    "one_over_even": round(one / even, 3),
                    "correct": one_right and even_right,
                }

        return shown("imbalance", rows())

    def pitch(self) -> list[Row]:
        """Rows of 656 B that lie further apart on the host: ceiling first, then what a plain gather and the resolver take."""

        def rows() -> Iterator[Row]:
            for pitch in PITCHES:
                ceiling = round(ceiling_gbs(656, pitch), 1)
                for batch, misses in PITCH_POINTS:
                    work = Workload(Case(656, 2048, 4096, batch, misses), pitch=pitch)
                    ours, correct = time_ours(work, self.variant)
                    yield {
                        "host_row_bytes": pitch,
                        "batch": batch,
                        "misses": misses,
                        "ceiling_gbs": ceiling,
                        "gather_us": round(work.gather_us(), 2),
                        "ours_us": round(ours, 2),
                        "correct": correct,
                    }

        return shown("host row pitch", rows())

    def scores(self) -> list[Row]:
        """What it costs to choose victims by the scores of the step instead of by age, with equal misses."""

        def rows() -> Iterator[Row]:
            for batch, misses in SCORE_POINTS:
                case = Case(self.row_bytes[0], 2048, 4096, batch, misses)
                age, age_right = time_ours(Workload(case), self.variant)
                score, score_right = time_ours(Workload(case), replace(self.variant, scored=True))
                yield {
                    "batch": batch,
                    "misses": misses,
                    "by_age_us": round(age, 2),
                    "by_score_us": round(score, 2),
                    "correct": age_right and score_right,
                }

        return shown("victims by score", rows())

    def counters(self) -> list[Row]:
        """One sample of the device's counters, which is taken once in SAMPLE_PERIOD decode steps, beside what it samples."""

        def rows() -> Iterator[Row]:
            step_us, _ = time_ours(Workload(Case(self.row_bytes[0], 2048, 4096, 32, 0)), self.variant)
            for groups, slots in ((20, 64), (61, 64), (61, 512)):
                took, correct = time_sample(groups, slots)
                share = took / SAMPLE_PERIOD / (groups * step_us)
                yield {
                    "groups": groups,
                    "slots": slots,
                    "sample_us": round(took, 2),
                    "period": SAMPLE_PERIOD,
                    "share_of_resolving_pct": round(100 * share, 3),
                    "correct": correct,
                }

        return shown("counters", rows())

    def ceilings(self) -> list[Row]:
        """GB/s of scattered rows, all sizes that the other parts have."""
        return shown(
            "ceiling of the link", ({"row_bytes": row, "gbs": round(ceiling_gbs(row), 1)} for row in self.row_bytes)
        )


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "ceilings": Bench.ceilings,
    "table": Bench.table,
    "resident": Bench.resident,
    "launches": Bench.launches,
    "imbalance": Bench.imbalance,
    "pitch": Bench.pitch,
    "sizes": Bench.sizes,
    "scores": Bench.scores,
    "counters": Bench.counters,
}


def shown(title: str, rows: Iterator[Row]) -> list[Row]:
    """Print rows as they come, under one heading; returns them."""
    print(f"\n-- {title}")
    kept: list[Row] = []
    for row in rows:
        if not kept:
            print("  ".join(f"{name:>13}" for name in row))
        print("  ".join(f"{value!s:>13}" for value in row.values()), flush=True)
        kept.append(row)
    return kept


def environment(commit: str | None = None) -> Row:
    """What a result file says of its origin."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    versions: Row = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        versions["device"] = torch.cuda.get_device_name()
    for package in ("apache-tvm-ffi", "sglang", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    command = " ".join(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)
    return {"commit": commit or head or None, "versions": versions, "command": command}


def option(text: str) -> tuple[str, int]:
    """`name=number`: a keyword argument of `resolve`."""
    name, _, value = text.partition("=")
    return name, int(value)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="the main table only")
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[1152, 656])
    parser.add_argument("--option", type=option, action="append", default=[], help="name=number, passed to `resolve`")
    parser.add_argument("--vllm-library", type=Path, help="stable-ABI library of a vLLM wheel")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further part after this time")
    parser.add_argument("--commit", help="recorded as the commit, where there is no repository")
    parser.add_argument("--json", type=Path, help="write the rows here, after every part")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    began = time.perf_counter()
    without_vllm = load_vllm(arguments.vllm_library)
    if without_vllm:
        print(f"vLLM left out: {without_vllm}", file=sys.stderr)
    widest = max(arguments.row_bytes)
    # The largest workload first: one request of a batch of 32 that misses 2,048 rows a step.
    pinned_block((32 * Case(widest, 2048, 4096, 32, 0).pages(2048) + 1) * PAGE * widest)
    bench = Bench(Variant(options=tuple(arguments.option)), without_vllm is None, tuple(arguments.row_bytes))
    result: dict[str, Any] = {
        **environment(arguments.commit),
        "steps": STEPS,
        "ours_launched": LAUNCHED,
        "vllm_left_out": without_vllm,
        "rows": [],
    }
    failed: list[str] = []
    for part in ["table"] if arguments.quick else arguments.parts:
        if time.perf_counter() - began > arguments.seconds:
            print(f"{part}: left out, {arguments.seconds:.0f} s are over", file=sys.stderr)
            continue
        try:
            rows = PARTS[part](bench)
        except (RuntimeError, ValueError, TypeError) as error:  # the other parts are worth having
            print(f"{part} failed: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(part)
            continue
        if part in ("table", "sizes"):  # of the same columns
            result["rows"] = [*result["rows"], *rows]
        else:
            result[part] = rows
        result["seconds"] = round(time.perf_counter() - began, 1)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{time.perf_counter() - began:.1f} s, failed parts: {failed or 'none'}")
    wrong = [
        row
        for rows in result.values()
        if isinstance(rows, list)
        for row in rows
        if any(value is False for value in row.values())
    ]
    for row in wrong:
        print(f"WRONG: {row}", file=sys.stderr)
    return int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main())
