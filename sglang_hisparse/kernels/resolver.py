"""The resolver: positions that an indexer selected -> device rows, fetching rows from the host tier on the way.

Called by the hot buffers in each index group's leader layer, inside decode graphs too, and by replay. Owns no memory. Also the
two plain address translations (read_rows, write_rows) and the audit that compares what attention reads with its home.
CPU tensors go to the CPU library, which gives the same numbers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch

from sglang_hisparse.kernels.hot_state import HotGroup, HotGroupState
from sglang_hisparse.kernels.library import library_of

__all__ = [
    "CopyMethod",
    "HotGroup",
    "HotGroupState",
    "apply_table_diff",
    "audit_rows",
    "read_rows",
    "resolve",
    "translate_pages",
    "write_rows",
]

MAX_TOP_K = 2048
MAX_BUFFER_SIZE = 32768


class CopyMethod(IntEnum):
    """How missing rows travel. For measurements only: NONE copies nothing, LOOKUP leaves every miss unanswered."""

    LOADS = 0
    NONE = 2
    LOOKUP = 3


class _State(Protocol):
    tags: torch.Tensor
    stamps: torch.Tensor
    header: torch.Tensor
    table: torch.Tensor
    slot_pages: torch.Tensor | None


def resolve(
    *,
    top_k: torch.Tensor,
    page_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    req_slots: torch.Tensor,
    num_real_rows: torch.Tensor,
    page_table: torch.Tensor,
    hot_pages: torch.Tensor,
    group: _State,
    host_bases: torch.Tensor,
    device_bases: torch.Tensor,
    row_bytes: int,
    page_size: int,
    out: torch.Tensor,
    host_row_bytes: int | None = None,
    cluster_blocks: int = 0,
    copy_method: CopyMethod = CopyMethod.LOADS,
    translated_pages: bool = False,
    overlap_launch: bool = False,
    scores: torch.Tensor | None = None,
) -> None:
    """Write the device row of every selected position to `out`; rows that are neither resident nor hot are fetched first.

    top_k int32 [rows, k]: positions, -1 = hole, k <= 2048. page_rows int32 [>= rows, max_pages], any row stride: logical page
    numbers of the row's request. seq_lens, req_slots int32 or int64 [>= rows]. num_real_rows int32 [1]: rows at or beyond
    it are padding. page_table int32 [num_logical_pages + 1]. hot_pages int32 [num_slots, B / page_size]: device pages of the
    lease, first entry 0 = no lease. group: a HotGroup, or a HotGroupState of one group, with B >= k, B <= 32768.
    host_bases, device_bases int64 [layers of the group]: addresses of row 0, a host row every `host_row_bytes`
    (default row_bytes), a device row every `row_bytes` (a multiple of 16). out int32 [rows, k], not top_k itself.
    All tensors are on one device. cluster_blocks: blocks per row, 0 = automatic. translated_pages: page_rows come from
    `translate_pages`. overlap_launch: let the launch overlap the end of the kernel ahead in the stream (programmatic dependent
    launch); the call still reads nothing before that kernel has ended. scores float32 [any rows, any columns], any
    row stride: what the indexer gave each position in this step; the group then has slot_pages, and max_pages is at most
    65536. With scores, of the hot rows that this step does not read those with the lowest score leave, ties the longest unused first; a
    position beyond the scores or the sequence, and a score that is no number, count as minus infinity. Without, the rows
    leave that are longest unused.

    An entry is answered with -1 if it is a hole or in a padded row; and, counted as failed, if its position is not below the
    sequence length, its page is no logical page, or it is host-only while the slot has no lease. Failed entries of a slot
    number outside the state count at slot 0. Equal entries get equal answers. No row read in this step is evicted by
    it. Deterministic. One launch, no sync; all counts and tables are read on the device, so a captured call stays valid.
    Two rows of one call must not name the same leased slot: their hot rows would be undefined (in bounds).
    Raises ValueError or TypeError naming the argument, KernelBuildError.
    """
    library_of(top_k).resolve(
        top_k,
        page_rows,
        seq_lens,
        req_slots,
        num_real_rows,
        page_table,
        hot_pages,
        group.tags,
        group.stamps,
        group.header,
        host_bases,
        device_bases,
        out,
        row_bytes,
        row_bytes if host_row_bytes is None else host_row_bytes,
        page_size,
        cluster_blocks,
        int(copy_method),
        translated_pages,
        overlap_launch,
        group.table,
        group.slot_pages,
        scores,
    )


def translate_pages(page_rows: torch.Tensor, page_table: torch.Tensor, out: torch.Tensor) -> None:
    """Translate a step's logical pages once for all its resolves: pass `out` as their page_rows with translated_pages=True.

    page_rows int32 [rows, max_pages], any row stride. out int32, at least as large: the device page, minus the logical page
    of a host-only one, 0 for what is no logical page. Must run again whenever page_table or page_rows change.
    """
    library_of(page_rows).translate_pages(page_rows, page_table, out)


def write_rows(loc: torch.Tensor, page_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Device rows to write to, of loc's dtype and shape (int32 or int64), a new tensor.

    A logical id without a device page gives its row of pad page 0, a negative or unknown one row 0.
    """
    out = torch.empty_like(loc, memory_format=torch.contiguous_format)
    library_of(loc).translate(loc.reshape(-1), page_table, out.view(-1), page_size, 0)
    return out


def read_rows(ids: torch.Tensor, page_table: torch.Tensor, page_size: int = 64) -> torch.Tensor:
    """Device rows to read, int32 of ids' shape, a new tensor: -1 for a negative or unknown id and for one not resident.

    ids int32 or int64: logical ids. Never in place: follower layers read the same index tensor again.
    """
    out = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    library_of(ids).translate(ids.reshape(-1), page_table, out.view(-1), page_size, -1)
    return out


def apply_table_diff(page_table: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
    """page_table[index] = value on the current stream: index int64 (int32 costs a launch) [n], value int32 [n], on the table's
    device, indices distinct."""
    page_table.index_copy_(0, index.long(), value)


def audit_rows(
    *,
    rows: torch.Tensor,
    top_k: torch.Tensor,
    page_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    num_real_rows: torch.Tensor,
    page_table: torch.Tensor,
    host_bases: torch.Tensor,
    device_bases: torch.Tensor,
    row_bytes: int,
    page_size: int,
    counts: torch.Tensor,
) -> None:
    """Compare resolved rows with their homes: counts int64 [2] grows by (rows audited, rows that differ).

    rows int32 [n, k]: answers of `resolve`, for the same other arguments. Audited is every valid entry of a host-only page, in
    all layers given; an answer of -1 differs. Resident rows have no other home and are passed over. No sync.
    """
    library_of(top_k).audit(
        rows,
        top_k,
        page_rows,
        seq_lens,
        num_real_rows,
        page_table,
        host_bases,
        device_bases,
        row_bytes,
        page_size,
        counts,
    )
