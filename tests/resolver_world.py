"""A small machine for kernel tests: host rows, device pages, requests that come, grow, spill and go; every step is checked.

Used by the tests of this folder and by scripts/gpu_kernel_check.py, on CPU and CUDA tensors alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from oracle import Oracle, Step

from sglang_hisparse.kernels.resolver import CopyMethod, HotGroupState, resolve, translate_pages

POISON_ROW = -77
NEVER_A_LEASE = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a world; `rows` is the batch with its padding, `max_pages` pages of one request."""

    k: int = 16
    buffer_size: int = 32
    page_size: int = 4
    rows: int = 5
    num_slots: int = 6
    max_pages: int = 24
    layers: int = 2
    row_bytes: int = 48
    host_row_bytes: int | None = None
    cluster_blocks: int = 0
    copy_method: CopyMethod = CopyMethod.LOADS
    translated_pages: bool = False
    overlap_launch: bool = False
    evicts_by_score: bool = False


@dataclass(slots=True)
class Request:
    pages: list[int]
    seq_len: int
    leased: bool


def home_rows(version: np.ndarray, layer: int, rows: np.ndarray, row_bytes: int) -> np.ndarray:
    """Content uint8 [n, row_bytes] of host rows: differs by row, layer and the version of the page's text."""
    seed = (version * 1_000_003 + rows * 7_919 + layer * 104_729).astype(np.uint64)
    words = (
        seed[:, None] * np.uint64(2_654_435_761) + np.arange(row_bytes // 4, dtype=np.uint64) * np.uint64(40_503)
    ) >> np.uint64(7)
    return words.astype(np.uint32).view(np.uint8).reshape(len(rows), row_bytes)


class World:
    """Memory of one index group on `device`, and the requests that use it."""

    def __init__(self, shape: Shape, device: str, seed: int) -> None:
        self.shape, self.device, self.random = shape, device, np.random.default_rng(seed)
        pages = shape.num_slots * shape.max_pages
        self.num_logical_pages, lease = pages, shape.buffer_size // shape.page_size
        self.num_device_pages = pages + shape.num_slots * lease
        self.pitch = shape.host_row_bytes or shape.row_bytes
        host_shape = (shape.layers, (pages + 1) * shape.page_size, self.pitch)
        self.host = torch.full(host_shape, 0xEE, dtype=torch.uint8, pin_memory=device == "cuda")
        device_rows = (self.num_device_pages + 1) * shape.page_size
        self.kv = torch.full((shape.layers, device_rows, shape.row_bytes), 0xDD, dtype=torch.uint8, device=device)
        self.version = np.zeros(pages + 1, dtype=np.int64)
        self.page_table = torch.zeros(pages + 1, dtype=torch.int32, device=device)
        self.hot_pages = torch.zeros((shape.num_slots, lease), dtype=torch.int32, device=device)
        self.num_real_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.state = HotGroupState.allocate(
            shape.num_slots, shape.buffer_size, device, evicts_by_score=shape.evicts_by_score
        )
        self.oracle = Oracle(shape.num_slots, shape.buffer_size)
        self.host_bases = torch.tensor([layer.data_ptr() for layer in self.host], device=device)
        self.device_bases = torch.tensor([layer.data_ptr() for layer in self.kv], device=device)
        self.free_logical = list(self.random.permutation(np.arange(1, pages + 1)))
        self.free_device = list(self.random.permutation(np.arange(1, self.num_device_pages + 1)))
        self.requests: dict[int, Request] = {}
        self.selected: dict[int, np.ndarray] = {}  # by decode_step
        self.wide = bool(seed % 2)  # int64 or int32 lengths and slots

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self, slot: int, *, num_pages: int, resident: float, leased: bool = True) -> None:
        """A request of `num_pages` pages, the last one partly filled, of which a share is resident."""
        pages = [int(self.free_logical.pop()) for _ in range(num_pages)]
        seq_len = (num_pages - 1) * self.shape.page_size + int(self.random.integers(1, self.shape.page_size + 1))
        self.requests[slot] = Request(pages, seq_len, leased)
        for page in pages:
            self._write_home(page)
            if self.random.random() < resident:
                self.promote(page)
        if leased:
            lease = [int(self.free_device.pop()) for _ in range(self.hot_pages.shape[1])]
            self.hot_pages[slot] = torch.tensor(lease, dtype=torch.int32)
        slots = torch.tensor([slot, slot], device=self.device)
        self.state.reset(slots)
        self.oracle.reset([slot])

    def leave(self, slot: int) -> None:
        request = self.requests.pop(slot)
        for page in request.pages:
            self.spill(page)
        self.free_logical += self.random.permutation(request.pages).tolist()
        if request.leased:
            self.free_device += self.hot_pages[slot].tolist()
            self.hot_pages[slot] = NEVER_A_LEASE

    def promote(self, page: int) -> None:
        if self.page_table[page]:
            return
        target = int(self.free_device.pop())
        rows = np.arange(page * self.shape.page_size, (page + 1) * self.shape.page_size)
        first = target * self.shape.page_size
        for layer in range(self.shape.layers):
            home = torch.from_numpy(home_rows(self.version[page].repeat(len(rows)), layer, rows, self.shape.row_bytes))
            self.kv[layer, first : first + len(rows)] = home.to(self.device)
        self.page_table[page] = target

    def spill(self, page: int) -> None:
        target = int(self.page_table[page])
        if target:
            self.page_table[page] = 0
            self.kv[:, target * self.shape.page_size : (target + 1) * self.shape.page_size] = 0xDD
            self.free_device.append(target)

    def _write_home(self, page: int) -> None:
        self.version[page] += 1
        rows = np.arange(page * self.shape.page_size, (page + 1) * self.shape.page_size)
        for layer in range(self.shape.layers):
            home = home_rows(self.version[page].repeat(len(rows)), layer, rows, self.shape.row_bytes)
            self.host[layer, rows[0] : rows[-1] + 1, : self.shape.row_bytes] = torch.from_numpy(home)

    # -- one step -----------------------------------------------------------------------------------------------------

    def launch_arguments(
        self,
        top_k: dict[int, np.ndarray],
        *,
        seq_len_of: Callable[[Request], int] = lambda request: request.seq_len,
        strange_slot: int | None = None,
    ) -> dict[str, Any]:
        """Arguments of `resolve` for {request slot: positions [k]} as one batch with padding; outputs are poisoned."""
        shape = self.shape
        positions = np.full((shape.rows, shape.k), 3, dtype=np.int32)  # padded rows hold plausible positions
        pages = np.ones((shape.rows, 2 * shape.max_pages + 1), dtype=np.int32)
        lens, req_slots = np.full(shape.rows, 9), np.zeros(shape.rows, dtype=np.int64)
        for row, slot in enumerate(top_k):
            request = self.requests[slot]
            positions[row] = top_k[slot]
            pages[row] = 0
            pages[row, : len(request.pages)] = request.pages
            lens[row], req_slots[row] = seq_len_of(request), slot if strange_slot is None else strange_slot
        self.num_real_rows.fill_(len(top_k))
        width = torch.int64 if self.wide else torch.int32
        return {
            "top_k": torch.from_numpy(positions).to(self.device),
            # Rows are further apart than they are long.
            "page_rows": torch.from_numpy(pages).to(self.device)[:, : shape.max_pages],
            "seq_lens": torch.from_numpy(lens).to(self.device, width),
            "req_slots": torch.from_numpy(req_slots).to(self.device, width),
            "num_real_rows": self.num_real_rows,
            "page_table": self.page_table,
            "hot_pages": self.hot_pages,
            "group": self.state,
            "host_bases": self.host_bases,
            "device_bases": self.device_bases,
            "row_bytes": shape.row_bytes,
            "page_size": shape.page_size,
            "out": torch.full((shape.rows, shape.k), POISON_ROW, dtype=torch.int32, device=self.device),
            "host_row_bytes": shape.host_row_bytes,
            "cluster_blocks": shape.cluster_blocks,
            "copy_method": shape.copy_method,
            "overlap_launch": shape.overlap_launch,
            "scores": self.random_scores() if shape.evicts_by_score else None,
        }

    def random_scores(self) -> torch.Tensor | None:
        """What an indexer may leave behind: values that drift, ties, no numbers, rows and columns too few or too many."""
        random, shape = self.random, self.shape
        rows, columns = shape.rows + int(random.integers(-1, 2)), shape.max_pages * shape.page_size
        if random.random() < 0.1 or rows == 0:
            return None  # SGLang computes none where every position is selected
        scores = random.normal(random.choice([0.0, 50.0]), 2.0, (rows, columns + 8)).astype(np.float32)
        if random.random() < 0.5:
            scores = np.round(scores)  # ties, and zeros of both signs
        for odd in (np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-42, 3e38):
            scores[random.random(scores.shape) < 0.02] = odd
        return torch.from_numpy(scores).to(self.device)[:, : columns - int(random.integers(0, shape.page_size + 1))]

    def step(
        self, top_k: dict[int, np.ndarray], *, launch: Callable[..., None] = resolve, **options: Any
    ) -> torch.Tensor:
        """Resolve as `launch_arguments` says, check everything, return out."""
        arguments = self.launch_arguments(top_k, **options)
        before = self.state.header[:, 4:8].cpu().clone()
        kv_before = self.kv.cpu().clone()
        if self.shape.translated_pages:
            translated = torch.full_like(arguments["page_rows"], POISON_ROW)
            translate_pages(arguments["page_rows"], self.page_table, translated)
            launch(**{**arguments, "page_rows": translated, "translated_pages": True})
        else:
            launch(**arguments)
        step = Step(
            **{name: arguments[name].tolist() for name in ("top_k", "page_rows", "seq_lens", "req_slots")},
            num_real_rows=len(top_k),
            page_table=self.page_table.tolist(),
            hot_pages=self.hot_pages.tolist(),
            page_size=self.shape.page_size,
            scores=None if arguments["scores"] is None else arguments["scores"].tolist(),
        )
        answers, tags = arguments["out"].tolist(), self.state.tags.tolist()
        grown = (self.state.header[:, 4:8].cpu() - before).tolist()
        fetched = self.oracle.check(step, answers, tags.__getitem__, grown.__getitem__)
        self._check_bytes(step, answers, fetched, kv_before)
        return arguments["out"]

    def _check_bytes(
        self, step: Step, answers: list[list[int]], fetched: dict[int, list[tuple[int, int]]], kv_before: torch.Tensor
    ) -> None:
        """Every returned row equals its home in every layer; nothing but fetched rows was written."""
        kv = self.kv.cpu()
        pairs = [
            (step.page_rows[row][position // step.page_size] * step.page_size + position % step.page_size, answer)
            for row in range(step.num_real_rows)
            for position, answer in zip(step.top_k[row], answers[row], strict=True)
            if answer >= 0
        ]
        if pairs:
            home, got = np.array(pairs).T
            for layer in range(self.shape.layers):
                want = home_rows(self.version[home // step.page_size], layer, home, self.shape.row_bytes)
                assert np.array_equal(kv[layer].numpy()[got], want), "a returned row differs from its home"
        written = {row for copies in fetched.values() for _, row in copies}
        untouched = np.setdiff1d(np.arange(kv.shape[1]), np.array(sorted(written), dtype=np.int64))
        assert torch.equal(kv[:, untouched], kv_before[:, untouched]), "a row was written that nobody fetched"

    # -- random lives -------------------------------------------------------------------------------------------------

    def random_positions(self, request: Request, *, absurd: bool = True) -> np.ndarray:
        """Positions [k]: a window that drifts, some far ones, holes, repeats and impossible ones."""
        random, k, seq_len = self.random, self.shape.k, request.seq_len
        start = int(random.integers(0, seq_len))
        near = (start + random.integers(0, max(1, k // 2 + 1), size=k)) % seq_len
        far = random.integers(0, seq_len, size=k)
        chosen = np.where(random.random(k) < 0.7, near, far)
        if random.random() < 0.5 and seq_len >= k:
            chosen = random.permutation(seq_len)[:k]  # as an indexer gives them: no repeats
        chosen[random.random(k) < random.choice([0.0, 0.1, 0.9])] = -1
        if absurd and random.random() < 0.3:
            odd = np.array(
                [seq_len, seq_len + 1, 10**6, 2**31 - 1, -2, -(2**31), self.shape.max_pages * self.shape.page_size]
            )
            chosen[int(random.integers(0, k))] = random.choice(odd)
        return chosen.astype(np.int32)

    def decode_step(self, *, resident: float = 0.2, change: float = 0.15, **options: Any) -> None:
        """All rows decode: long requests, selections without repeats of which a share changes from step to step."""
        for slot in range(min(self.shape.rows, self.shape.num_slots)):
            if slot not in self.requests:
                self.admit(slot, num_pages=self.shape.max_pages, resident=resident)
            seq_len, k = self.requests[slot].seq_len, min(self.shape.k, self.requests[slot].seq_len)
            last = self.selected.get(slot, self.random.permutation(seq_len)[:k])
            kept = last[self.random.random(len(last)) >= change]
            others = np.setdiff1d(np.arange(seq_len), kept)
            fresh = self.random.permutation(others)[: k - len(kept)]
            self.selected[slot] = self.random.permutation(np.concatenate([kept, fresh]))
        positions = {slot: np.full(self.shape.k, -1, dtype=np.int32) for slot in self.selected}
        for slot, selected in self.selected.items():
            positions[slot][: len(selected)] = selected
        self.step(positions, **options)

    def random_step(self, **options: Any) -> None:
        """Requests enter and leave, pages move, then one checked resolve."""
        random, shape = self.random, self.shape
        for slot in range(shape.num_slots):
            if slot in self.requests and random.random() < 0.08:
                self.leave(slot)
            if slot not in self.requests and random.random() < 0.4:
                leased = random.random() < 0.85
                share = random.choice([0.0, 0.3, 0.9, 1.0])
                self.admit(slot, num_pages=int(random.integers(1, shape.max_pages + 1)), resident=share, leased=leased)
        for request in self.requests.values():
            for page in request.pages:
                chance = random.random()
                if chance < 0.02:
                    self.spill(page)
                elif chance < 0.04:
                    self.promote(page)
        ready = list(self.requests)
        chosen = random.permutation(ready)[: int(random.integers(0, min(len(ready), shape.rows) + 1))] if ready else []
        self.step({int(slot): self.random_positions(self.requests[int(slot)]) for slot in chosen}, **options)
