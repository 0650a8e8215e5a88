"""Page-wise copies between the host tier and the device pool: all layers of all pages in one launch.

Called by the transfer worker (mirror and promote), on its copy stream. Decides nothing and waits for nothing.
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
