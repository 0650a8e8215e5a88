"""Page-wise copies between the host tier and the device pool: all layers of all pages in one launch.

Called by the transfer worker (mirror and promote), on its copy stream. Decides nothing and waits for nothing. `gather_rows` is
the same for a list of scattered rows: what the link allows the resolver at most.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from sglang_hisparse.kernels.library import library_of


class Direction(IntEnum):
    """Where the bytes go."""

    TO_HOST = 0
    TO_DEVICE = 1


def copy_pages(
    *,
    direction: Direction,
    host_bases: torch.Tensor,
    device_bases: torch.Tensor,
    host_pages: torch.Tensor,
    device_pages: torch.Tensor,
    page_bytes: int,
    max_blocks: int = 8,
) -> None:
    """Copy page i of every layer between host_pages[i] and device_pages[i], on the current stream.

    host_bases, device_bases int64 [layers]: addresses of page 0. host_pages, device_pages int32 [n]. All on one device (a GPU,
    or the CPU for the CPU library). page_bytes: a multiple of 16, of one layer's page on either side. max_blocks: thread
    blocks taken from the forward; eight already saturate the link. Raises ValueError or TypeError naming the argument.
    """
    library_of(host_pages).copy_pages(
        host_bases, device_bases, host_pages, device_pages, int(direction), page_bytes, max_blocks
    )


def gather_rows(
    *,
    host_bases: torch.Tensor,
    device_bases: torch.Tensor,
    host_rows: torch.Tensor,
    device_rows: torch.Tensor,
    row_bytes: int,
    host_row_bytes: int | None = None,
    max_blocks: int = 8,
) -> None:
    """Copy row host_rows[i] of every layer to device_rows[i], on the current stream; rows int32 [n], targets distinct.

    Bases, devices and errors as in `copy_pages`; row_bytes a multiple of 16, a host row every `host_row_bytes`.
    """
    library_of(host_rows).gather_rows(
        host_bases,
        device_bases,
        host_rows,
        device_rows,
        row_bytes,
        row_bytes if host_row_bytes is None else host_row_bytes,
        max_blocks,
    )


def fetch_union(
    *,
    ids: torch.Tensor,
    table: torch.Tensor,
    host_base: torch.Tensor,
    scratch_base: torch.Tensor,
    marks: torch.Tensor,
    fetched: torch.Tensor,
    host_places: int,
    row_bytes: int,
    page_size: int,
) -> None:
    """Copy the host row of each id whose row of the scratch is not marked, and mark it, on the current stream.

    ids int32 [n]: logical ids (= host rows) in any order, repeated or -1. table int32 [logical pages + 1]: page of the scratch;
    only ids on its pages 1..host_places are copied. host_base, scratch_base int64 [1]: addresses of row 0 of one layer. marks
    int32 [words]: a bit for each row of the scratch. fetched int64 [1]: the rows copied are added. Rows of `row_bytes`, a
    multiple of 16, on both sides. All on one device. Raises ValueError or TypeError naming the argument.
    """
    library_of(ids).union_fetch(ids, table, host_base, scratch_base, marks, fetched, host_places, row_bytes, page_size)
