"""Time the resolver's variants side by side on one GPU, and what it costs without its parts; every answer is checked.

    python3 scripts/kernel_variants.py --json kernel_variants.json          # under a minute
    python3 scripts/kernel_variants.py --cases 1x102 32x0 --row-bytes 656

Microseconds per call in a replayed graph. `none` copies nothing and `lookup` stops once hits are known: both show where time goes
and have no answers to check. Calls overlap the one before, but for those without `overlap` in their name. `floor` is a kernel that
does next to nothing, in a graph of the same length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from resolver_workload import STEPS, Case, Ours, Variant, Workload, captured, floor_us, median_us, time_ours

from sglang_hisparse.kernels.resolver import CopyMethod

CASES = ["1x0", "1x102", "1x307", "1x614", "8x102", "8x614", "32x0", "32x102", "64x102", "64x614"]
UNCHECKED = (CopyMethod.NONE, CopyMethod.LOOKUP)
BLOCKS_ON_CHIP = 264


@dataclass(frozen=True, slots=True)
class Tried:
    """One figure. correct is None where a variant gives no answers."""

    row_bytes: int
    case: str
    variant: str
    us: float
    correct: bool | None


def variants(batch: int) -> list[Variant]:
    """Automatic choice first, then every number of blocks that fits, then one change at a time."""
    blocks = [Variant(blocks) for blocks in (1, 2, 4, 8) if blocks * batch <= BLOCKS_ON_CHIP]
    parts = [Variant(method=method, overlap=overlap) for method in UNCHECKED for overlap in (False, True)]
    return [Variant(), *blocks, Variant(translated=False), Variant(overlap=False), *parts]


def timed(work: Workload, variant: Variant, *, resident: bool = False) -> tuple[float, bool | None]:
    """Microseconds per call, and whether every answer was right."""
    if variant.method not in UNCHECKED:
        return time_ours(work, variant, resident=resident)
    ours = Ours(work, Variant(variant.blocks, options=variant.options), resident)  # filled with real copies
    ours.arguments |= {"copy_method": variant.method, "overlap_launch": variant.overlap}
    return median_us(captured(ours.call), ours.prepare, STEPS), None


def measure(row_bytes: int, cases: list[str], top_k: int, buffer: int) -> list[Tried]:
    """All variants of all cases, in order; the all-resident batch with each case without misses."""
    tried = []

    def note(case: str, name: str, result: tuple[float, bool | None]) -> None:
        tried.append(Tried(row_bytes, case, name, round(result[0], 2), result[1]))
        print(f"{row_bytes:5} {case:>9} {name:44} {result[0]:8.2f} {'' if result[1] is not False else 'WRONG'}", flush=True)

    for text in cases:
        batch, misses = map(int, text.split("x"))
        work = Workload(Case(row_bytes, top_k, buffer, batch, misses))
        for variant in variants(batch):
            note(text, str(variant), timed(work, variant))
        if misses == 0:
            for variant in (Variant(), Variant(translated=False), Variant(overlap=False), *map(Variant, (1, 2, 4, 8))):
                note(f"{batch} resident", str(variant), timed(work, variant, resident=True))
        del work
    return tried


def imbalance(row_bytes: int, top_k: int, buffer: int, batch: int = 32) -> list[Tried]:
    """One request that misses everything beside others that miss nothing, against as many misses spread evenly."""
    tried = []
    case = Case(row_bytes, top_k, buffer, batch, top_k)
    spreads = {"one cold": [top_k] + [0] * (batch - 1), "even": [top_k // batch] * batch}
    for name, spread in spreads.items():
        work = Workload(case, spread)
        for blocks in (0, 1, 2, 4, 8):
            took, correct = timed(work, Variant(blocks))
            tried.append(Tried(row_bytes, name, str(Variant(blocks)), round(took, 2), correct))
            print(f"{row_bytes:5} {name:>9} {Variant(blocks)!s:44} {took:8.2f} {'' if correct else 'WRONG'}", flush=True)
    return tried


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="BATCHxMISSES")
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[1152])
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--buffer", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device is visible", file=sys.stderr)
        return 2
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result: dict[str, object] = {"commit": commit or None, "device": torch.cuda.get_device_name(), "floor_us": round(floor_us(), 2)}
    print(f"floor {result['floor_us']} us", flush=True)
    rows: list[Tried] = []
    for row_bytes in arguments.row_bytes:
        rows += measure(row_bytes, arguments.cases, arguments.top_k, arguments.buffer)
    rows += imbalance(arguments.row_bytes[0], arguments.top_k, arguments.buffer)
    result["rows"] = [{name: getattr(row, name) for name in Tried.__slots__} for row in rows]
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row.correct is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
