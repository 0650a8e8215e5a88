#!/usr/bin/env python3
"""Where should the border between KV and index-K lie: what a fixed one costs, and what a movable one would take.

table   (CPU) device tokens of one GPU against plain SGLang's at equal memory: the border that ships (index-K of all
        logical tokens is paid at start), and two that move as logical tokens outgrow device tokens: 2 MiB chunks moved by
        CUDA virtual memory, and index-K that grows over the KV rows of its own allocation, without any driver call
probe   (GPU) what moving chunks costs: time of each driver call, whether it waits for kernels in flight, whether a
        captured graph reads the new chunk at the old address, and how fast mapped memory is read

python3 scripts/index_border.py table
python3 scripts/index_border.py probe --json index_border.json
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from sglang_hisparse.capacity import UNBOUNDED_BYTES, hot_shape, longest_pages
from sglang_hisparse.config import GIB, MIB, HiSparseConfig
from sglang_hisparse.layout import KVShape, plan_memory
from sglang_hisparse.planning.model_shapes import CacheType, built_in

RATIOS = (2, 4, 8, 10)
CHUNK_BYTES = 2 * MIB
TINY = KVShape(num_layers=8, num_leaders=8, row_bytes=1152)


@dataclass(frozen=True, slots=True)
class Case:
    """One rank: what its cache is made of, and GPU memory for all of it. slots: request slots with hot state."""

    name: str
    shape: KVShape
    device_bytes: int
    slots: int
    context: int


CASES = (
    Case("DeepSeek-V3.2, fp8", built_in("DeepSeek-V3.2").kv_shape(CacheType.FP8), 40 * GIB, 64, 131_072),
    Case("DeepSeek-V3.2, bf16", built_in("DeepSeek-V3.2").kv_shape(CacheType.BF16), 40 * GIB, 64, 131_072),
    Case("GLM-5.2, fp8", built_in("GLM-5.2").kv_shape(CacheType.FP8), 40 * GIB, 64, 131_072),
    Case("GLM-5.2, bf16", built_in("GLM-5.2").kv_shape(CacheType.BF16), 40 * GIB, 64, 131_072),
    Case("tiny-dsa, bf16", TINY, 2 * GIB, 64, 32_768),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Device tokens as shares of plain SGLang's. `fixed`: today, with this ratio; the others hold as many logical tokens when
    all are in use. `*_start`: before logical tokens outgrow device tokens. Every one has paid its hot state and page table."""

    case: str
    ratio: float
    plain_tokens: int
    logical_tokens: int
    fixed: float
    chunks_start: float
    chunks_full: float
    overlap_start: float
    overlap_full: float
    bundle_full: float


def plain_tokens(shape: KVShape, device_bytes: int) -> int:
    """Tokens of a server without a host tier: KV of every layer and index-K of every leader."""
    return (
        (device_bytes // (shape.kv_token_bytes + shape.index_token_bytes) - shape.page_size)
        // shape.page_size
        * shape.page_size
    )


def chunked_bytes(shape: KVShape, device_tokens: int, num_logical: int) -> int:
    """Physical memory when every layer's buffers are made of whole chunks."""

    def chunks(tokens: int, row_bytes: int) -> int:
        return -(-(tokens + shape.page_size) * row_bytes // CHUNK_BYTES)

    kv = shape.num_layers * chunks(device_tokens, shape.row_bytes)
    return (kv + shape.num_leaders * chunks(num_logical, shape.index_row_bytes)) * CHUNK_BYTES


def chunked_tokens(shape: KVShape, token_bytes: int, num_logical: int | None) -> int:
    """Most device tokens, in whole pages, beside the index-K of `num_logical` tokens (None: of the device tokens alone)."""
    low, high = 0, token_bytes // shape.kv_token_bytes // shape.page_size
    while low < high:
        pages = (low + high + 1) // 2
        tokens = pages * shape.page_size
        fits = chunked_bytes(shape, tokens, tokens if num_logical is None else num_logical) <= token_bytes
        low, high = (pages, high) if fits else (low, pages - 1)
    return low * shape.page_size


def overlapped_tokens(shape: KVShape, start_tokens: int, num_logical: int, bundle: int = 1) -> int:
    """Device tokens left when index-K beyond `start_tokens` lies over the first KV pages of its leader's allocation.

    bundle: layers whose KV shares that allocation, page beside page. A device page is a row range of every layer, so a page
    that index-K has covered in some allocations is lost in those that have no leader too.
    """
    beyond = max(num_logical - start_tokens, 0) * shape.index_row_bytes
    pages = -(-beyond // (bundle * shape.page_bytes))
    return max(start_tokens - pages * shape.page_size, 0)


def rows(cases: tuple[Case, ...] = CASES, ratios: tuple[float, ...] = RATIOS) -> Iterator[Row]:
    """Every case at every ratio."""
    for case in cases:
        shape = case.shape
        resolved = HiSparseConfig().resolve(built_in("DeepSeek-V3.2").facts)
        hot = hot_shape(case.slots, shape.num_leaders, resolved, longest_pages(case.context, shape))
        plain = plain_tokens(shape, case.device_bytes)
        for ratio in ratios:
            plan = plan_memory(
                shape, hot, device_bytes=case.device_bytes, available_host_bytes=UNBOUNDED_BYTES, ratio=ratio
            )
            paid = hot.fixed_bytes(shape.page_size) + shape.page_table_bytes(plan.logical_tokens)
            left = case.device_bytes - paid
            start = plain_tokens(shape, left)
            yield Row(
                case=case.name,
                ratio=ratio,
                plain_tokens=plain,
                logical_tokens=plan.logical_tokens,
                fixed=plan.device_tokens / plain,
                chunks_start=chunked_tokens(shape, left, None) / plain,
                chunks_full=chunked_tokens(shape, left, plan.logical_tokens) / plain,
                overlap_start=start / plain,
                overlap_full=overlapped_tokens(shape, start, plan.logical_tokens) / plain,
                bundle_full=overlapped_tokens(shape, start, plan.logical_tokens, shape.num_layers // shape.num_leaders)
                / plain,
            )


def table_markdown() -> str:
    """The comparison as a Markdown table; every figure is a share of plain SGLang's tokens."""
    lines = [
        "| model, cache | ratio | fixed | chunks, no host use | all in use | overlap, no host use | all in use | bundles, all in use |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        shares = (row.fixed, row.chunks_start, row.chunks_full, row.overlap_start, row.overlap_full, row.bundle_full)
        lines.append(f"| {row.case} | {row.ratio:g} | " + " | ".join(f"{100 * share:.1f} %" for share in shares) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 where the probe finds that a border could not be moved under a running server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "probe"))
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--chunks", type=int, default=122, help="probe: chunks moved at once; 61 layers give, 61 take")
    args = parser.parse_args(argv)
    if args.what == "table":
        print(table_markdown())
        found: dict[str, object] = {"rows": [asdict(row) for row in rows()]}
        holds = True
    else:
        from border_probe import probe

        found = probe(args.chunks)
        print(json.dumps(found, indent=1))
        holds = bool(found["graph_reads_new_chunk"]) and bool(found["contents_kept_while_moved"])
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
