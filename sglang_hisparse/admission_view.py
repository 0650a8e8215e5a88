"""What the admission gate sees of a running server: the books, the link, the other ranks.

Called by the runtime once, when the scheduler is built and no request exists: `gate_for` times the link by copying free pages,
the only wait for the device. Afterwards it reads CPU books and counts that the device has copied earlier. The gate itself
(admission.py) knows neither torch nor SGLang.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_hisparse import settings
from sglang_hisparse.admission import PRIOR_MISSES, ROUND_STEPS, AdmissionGate, Pool, StepFigures, StepModel
from sglang_hisparse.config import Admission
from sglang_hisparse.kernels.page_copy import Direction, copy_pages
from sglang_hisparse.kernels.row_counts import COLUMNS
from sglang_hisparse.ranks import is_first, is_one_of_several
from sglang_hisparse.residency import PageState, ResidencyCoordinator
from sglang_hisparse.residency.misses import MissMeter, MissRounds

if TYPE_CHECKING:
    from sglang_hisparse.runtime import HiSparseRuntime

logger = logging.getLogger(__name__)

_HOST = int(PageState.HOST)
_TRIAL_BYTES = 64 << 20


def pool_of(residency: ResidencyCoordinator) -> Pool:
    """The books as every rank has them; some 0.1 ms for a hundred thousand logical pages."""
    book, limits = residency.book, residency.limits
    used = book.users > 0
    to_come = np.maximum(book.prompt_pages - book.num_pages, 0)[book.live & book.prefilling]
    return Pool(
        num_running=int(np.count_nonzero(book.live)),
        device_pages=residency.device_pages.num_usable,
        hot_pages=limits.hot_pages,
        demand_pages=int(np.count_nonzero(used)) + int(to_come.sum()),
        host_pages=int(np.count_nonzero(used & (book.state == _HOST))),
    )


class HotLink:
    """The link as the resolver uses it: its speed by a trial, its bytes by the device's own counts (admission.Link)."""

    def __init__(self, runtime: HiSparseRuntime, bytes_per_second: float) -> None:
        self._hot = hot = runtime.hot
        self.bytes_per_second = bytes_per_second
        self.request_bytes = PRIOR_MISSES * runtime.top_k * hot.row_bytes * runtime.pool.layer_num

    def fetched(self) -> tuple[int, float]:
        counts = self._hot.latest_counts()
        return counts.step, float(counts.total("layer_rows_fetched") * self._hot.row_bytes)


def time_link(runtime: HiSparseRuntime) -> float:
    """Bytes per second from the host tier to the device, by a page copy of 64 MiB. No page may be in use; waits."""
    worker, limits = runtime.worker, runtime.residency.limits
    page_bytes = worker.page_bytes * worker.num_layers
    num_pages = max(1, min(_TRIAL_BYTES // page_bytes, limits.num_device_pages, limits.num_logical_pages))
    pages = torch.arange(1, num_pages + 1, dtype=torch.int32, device=worker.device)

    def copy() -> None:
        copy_pages(
            direction=Direction.TO_DEVICE,
            host_bases=runtime.hot.host_bases,
            device_bases=runtime.hot.device_bases,
            host_pages=pages,
            device_pages=pages,
            page_bytes=worker.page_bytes,
        )
        worker.synchronize()

    copy()
    started = time.perf_counter()
    copy()
    return num_pages * page_bytes / (time.perf_counter() - started)


def share_of(
    group: torch.distributed.ProcessGroup | None, count: int = len(fields(StepFigures))
) -> Callable[[Sequence[float] | None], Sequence[float]]:
    """How the ranks of a CPU group get the `count` figures that the first passes in; all of them call it at the same step."""
    if not is_one_of_several(group):
        return lambda figures: figures
    first = torch.distributed.get_global_rank(group, 0)

    def share(figures: Sequence[float] | None) -> Sequence[float]:
        sent = torch.tensor([0.0] * count if figures is None else figures, dtype=torch.float64)
        torch.distributed.broadcast(sent, src=first, group=group)
        return sent.tolist()

    return share


def misses_of(runtime: HiSparseRuntime) -> MissRounds:
    """How this rank's book gets the misses that the first rank's resolver has counted."""
    book, meter = runtime.residency.book, None
    if is_first(runtime.tp_group):
        column = COLUMNS.index("layer_rows_fetched")

        def fetched() -> tuple[int, np.ndarray]:
            counts = runtime.hot.latest_counts()
            return counts.step, counts.by_slot[:, column]

        meter = MissMeter(book, fetched, ROUND_STEPS)
    return MissRounds(book, meter, share_of(runtime.tp_group, len(book.misses)))


def gate_for(runtime: HiSparseRuntime) -> AdmissionGate | None:
    """The gate of this rank; None where the settings want none, and on a CPU pool, which has no link."""
    if settings.resolved().admission is Admission.LATENCY or runtime.worker.device.type != "cuda":
        return None
    speed = time_link(runtime)
    model = None
    if is_first(runtime.tp_group):
        model = StepModel(HotLink(runtime, speed))
        logger.info("HiSparse admission: the link to the host tier gives %.1f GB/s", speed / 1e9)
    misses, share = misses_of(runtime), share_of(runtime.tp_group)
    return AdmissionGate(
        lambda: pool_of(runtime.residency),
        model,
        share,
        time.perf_counter,
        lambda pool: misses.end_round(pool.host_pages > 0),
    )
