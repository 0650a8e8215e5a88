"""Host copies when the copy stream refuses: by the framework's own copies, waited for.

Called by the transfer worker for pages that a promise depends on, after their ordinary copies have failed. Slow on
purpose: it waits for everything on the device, so that no order between streams has to be right. A failure here is the
device's end, and is raised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hisparse.memory.host_tier import HostTier
from sglang_hisparse.memory.pool import HiSparsePool
from sglang_hisparse.residency.types import PageTransfer
from sglang_hisparse.transfer.worker import TransferWorker


def copy_to_host_now(
    worker: TransferWorker, pool: HiSparsePool, host_tier: HostTier, transfers: Sequence[PageTransfer]
) -> None:
    """Copy the pages of `transfers`, all layers, before returning. Raises RuntimeError."""
    # Copies enqueued before may still write the same host rows, for an earlier owner of the page.
    worker.drain()
    worker.synchronize()
    size = host_tier.page_size
    offsets = torch.arange(size)
    host = (torch.tensor([transfer.logical_page for transfer in transfers])[:, None] * size + offsets).reshape(-1)
    device = (torch.tensor([transfer.device_page for transfer in transfers])[:, None] * size + offsets).reshape(-1)
    for layer in range(worker.num_layers):
        rows = pool.layer_rows(layer)
        host_tier.layer_rows(layer)[host] = rows[device.to(rows.device)].cpu()
