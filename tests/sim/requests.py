"""Requests and batches of the simulator: what its scheduler knows, in SGLang's words. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.radix_model import Node


@dataclass(slots=True, eq=False)
class Request:
    """`seq_len` rows are written by launched forwards, `num_known` tokens are known (prompt and processed outputs)."""

    uid: int
    tokens: list[int]
    prompt_len: int
    target_len: int
    num_known: int
    seq_len: int = 0
    slot: int = 0
    chunk_pages: int = 0  # its longest chunk, where its prefill is streamed
    pages: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)  # tree pages that it uses and locks
    epoch: int = 0  # counts lives: results of an earlier one are dropped
    num_retracted: int = 0
    aborted: bool = False


@dataclass(slots=True)
class Batch:
    """A launched forward and what its result concerns."""

    forward: int
    is_prefill: bool
    rows: list[tuple[Request, int]]  # (request, its epoch)
