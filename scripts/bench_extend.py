#!/usr/bin/env python3
"""When is a union cheaper than the whole prefix: one layer of a short extend whose prefix lies on the host, both ways.

pages   all host pages of the prefix into the scratch, as the side stream copies them: the time of the link, which a forward
        hides behind its computation as far as that lasts
union   the rows that the tokens select, each once, with the marks cleared: time that attention always waits for

Positions are made up: a token shares 85 % of its top-k with the token before it. Prints the last number of tokens at which
the union is faster, and writes every point. Needs one GPU, no server; about twenty seconds.

python3 scripts/bench_extend.py --json extend.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from resolver_workload import median_us
from serving.results import current_commit, versions, write_json

from sglang_hisparse.kernels.page_copy import Direction, copy_pages, fetch_union

PAGE, TOP_K, KEPT_SHARE = 64, 2048, 0.85
PREFIXES = (18_000, 74_000, 200_000)
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
ROW_BYTES = (656, 1152)
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Row:
    """One point. union_rows: rows that are fetched; correct: every selected row equals its host row."""

    row_bytes: int
    prefix: int
    new_tokens: int
    union_rows: int
    pages_us: float
    union_us: float
    correct: bool

    @property
    def union_gb_s(self) -> float:
        return self.union_rows * self.row_bytes / self.union_us / 1e3


def selections(prefix: int, tokens: int, top_k: int, seed: int = 1) -> np.ndarray:
    """Positions int32 [tokens, top_k], none twice a token; a token drops 15 % of the last one's and takes as many others."""
    random = np.random.default_rng(seed)
    top_k = min(top_k, prefix)
    num_new = min(round(top_k * (1 - KEPT_SHARE)), prefix - top_k)
    now, is_in = random.permutation(prefix)[:top_k].astype(np.int32), np.zeros(prefix, dtype=bool)
    is_in[now] = True
    chosen = np.empty((tokens, top_k), dtype=np.int32)
    for token in range(tokens):
        if token and num_new:
            fresh = np.unique(random.integers(0, prefix, 4 * num_new + 64))
            fresh = random.permutation(fresh[~is_in[fresh]])[:num_new]
            places = random.permutation(top_k)[: len(fresh)]
            is_in[now[places]], is_in[fresh] = False, True
            now[places] = fresh
        chosen[token] = now
    return chosen


class Layer:
    """One layer's rows of a prefix on the host, at pages in random order, and half a scratch for them."""

    def __init__(self, prefix: int, row_bytes: int, device: str) -> None:
        self.num_pages, self.row_bytes, self.device = -(-prefix // PAGE), row_bytes, device
        on_gpu = device != "cpu"
        size = ((self.num_pages + 1) * PAGE, row_bytes)
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu).random_(0, 256)
        self.scratch = torch.zeros(size, dtype=torch.uint8, device=device)
        logical = np.random.default_rng(2).permutation(self.num_pages) + 1
        self.logical = torch.from_numpy(logical).int().to(device)
        self.places = torch.arange(1, self.num_pages + 1, dtype=torch.int32, device=device)
        self.table = torch.zeros(self.num_pages + 1, dtype=torch.int32, device=device)
        self.table[self.logical.long()] = self.places
        self.host_base = torch.tensor([self.host.data_ptr()], device=device)
        self.scratch_base = torch.tensor([self.scratch.data_ptr()], device=device)
        self.marks = torch.zeros(-(-size[0] // 32), dtype=torch.int32, device=device)
        self.fetched = torch.zeros(1, dtype=torch.int64, device=device)

    def ids(self, positions: np.ndarray) -> torch.Tensor:
        places = torch.from_numpy(positions).to(self.device).long()
        return (self.logical[places // PAGE] * PAGE + places % PAGE).int().view(-1)

    def copy_all(self) -> None:
        copy_pages(
            direction=Direction.TO_DEVICE,
            host_bases=self.host_base,
            device_bases=self.scratch_base,
            host_pages=self.logical,
            device_pages=self.places,
            page_bytes=PAGE * self.row_bytes,
        )

    def fetch(self, ids: torch.Tensor) -> None:
        self.marks.zero_()
        fetch_union(
            ids=ids,
            table=self.table,
            host_base=self.host_base,
            scratch_base=self.scratch_base,
            marks=self.marks,
            fetched=self.fetched,
            host_places=self.num_pages,
            row_bytes=self.row_bytes,
            page_size=PAGE,
        )

    def check(self, ids: torch.Tensor) -> tuple[int, bool]:
        """Rows of the union, and whether they alone arrive, each as it lies on the host."""
        self.scratch.zero_()
        self.fetched.zero_()
        self.fetch(ids)
        rows = torch.unique(ids).long()
        found = self.scratch[self.table[rows // PAGE].long() * PAGE + rows % PAGE].cpu()
        return len(rows), torch.equal(found, self.host[rows.cpu()]) and int(self.fetched) == len(rows)


def time_us(call: Callable[[], None], device: str) -> float:
    """Median time of a call on the GPU; on the CPU, where only the script itself is tried, 0."""
    if device == "cpu":
        call()
        return 0.0
    return median_us(call, lambda: None, calls=1, replays=REPEATS)


def measure(
    device: str, prefixes: tuple[int, ...] = PREFIXES, tokens: tuple[int, ...] = TOKENS, top_k: int = TOP_K
) -> list[Row]:
    """Every point, in the order of row size, prefix and number of tokens."""
    rows = []
    chosen = {prefix: selections(prefix, max(tokens), top_k) for prefix in prefixes}
    for row_bytes in ROW_BYTES:
        for prefix in prefixes:
            layer = Layer(prefix, row_bytes, device)
            pages_us = time_us(layer.copy_all, device)
            for count in tokens:
                ids = layer.ids(chosen[prefix][:count])
                num_rows, correct = layer.check(ids)
                union_us = time_us(lambda layer=layer, ids=ids: layer.fetch(ids), device)
                rows.append(Row(row_bytes, prefix, count, num_rows, pages_us, union_us, correct))
    return rows


def crossovers(rows: list[Row]) -> dict[tuple[int, int], int]:
    """(row bytes, prefix) -> most tokens up to which the union is always faster; 0: never."""
    found: dict[tuple[int, int], int] = {}
    is_over = set()
    for row in rows:
        key = row.row_bytes, row.prefix
        found.setdefault(key, 0)
        if row.union_us < row.pages_us and key not in is_over:
            found[key] = row.new_tokens
        else:
            is_over.add(key)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--commit", default=current_commit(), help="default: HEAD of this repository")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU is visible to torch")
        return 2
    rows = measure("cuda")
    for row in rows:
        print(
            f"{row.row_bytes:5} B  prefix {row.prefix:7}  new {row.new_tokens:5}  union {row.union_rows:7} rows "
            f"{row.union_us:8.0f} us ({row.union_gb_s:4.1f} GB/s)  pages {row.pages_us:8.0f} us  "
            f"{'ok' if row.correct else 'WRONG ROWS'}"
        )
    for (row_bytes, prefix), tokens in crossovers(rows).items():
        print(f"rows of {row_bytes} B, prefix of {prefix}: a union is faster up to {tokens} new tokens")
    if arguments.json:
        head = {"commit": arguments.commit, "versions": versions(str(Path(torch.__file__).parents[1]))}
        head["command"] = shlex.join(["python3", "scripts/bench_extend.py", *sys.argv[1:]])
        write_json(arguments.json, head | {"rows": [asdict(row) for row in rows]})
    return int(not all(row.correct for row in rows))


if __name__ == "__main__":
    sys.exit(main())
