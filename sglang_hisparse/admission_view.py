"""What the admission gate sees of a running server: the books, the link, the other ranks.

Called by the runtime once, when the scheduler is built and no request exists: `gate_for` times the link by copying free pages,
the only wait for the device. Afterwards it reads CPU books, counts that the device has copied earlier, and events that have
passed. The gate itself (admission.py) knows neither torch nor SGLang.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
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
_PROBE_PAGES, _PROBE_PAGE_BYTES = 16, 64 << 10  # a copy of some 21 us, once every ROUND_STEPS decode steps
_PROBE_LEAD = 4  # times as much is copied ahead of it: longer than a slow CPU takes to launch the rest
_TRIALS = 3
_PROBES = 5  # rounds whose median counts
_HIGHEST = 1.5  # no probe makes the link faster than so many times its trial


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


class LinkProbe:
    """How fast the link is by now: others may use it too, or the memory behind it.

    A small copy on the forward stream, while no resolver uses the link, between two events that are asked about a round later.
    Its time against that of the same copy at start, when the trial gave `bytes_per_second`, is what counts, so
    that its launch and its latency do not. The constructor waits for the device; nobody may use the link then.
    """

    def __init__(self, device: torch.device, bytes_per_second: float) -> None:
        num_bytes = _PROBE_PAGES * _PROBE_PAGE_BYTES
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._bases = [torch.tensor([held.data_ptr()], dtype=torch.int64, device=device) for held in (self._host, self._device)]
        self._pages = torch.arange(_PROBE_PAGES, dtype=torch.int32, device=device)
        self._lead_pages = self._pages.repeat(_PROBE_LEAD)
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._milliseconds: deque[float] = deque(maxlen=_PROBES)
        for _ in range(1 + _PROBES):  # the first warms up and falls out
            self.begin()
        torch.cuda.synchronize(device)
        self._take()
        self._trial = bytes_per_second * statistics.median(self._milliseconds)

    def begin(self) -> None:
        """One probe more, on the current stream. While a first copy runs, the second and its events are launched, so that the
        device does not wait for them between the events: neither at start, when nothing else is in the queue, nor later. A wait
        that only the probes at start held would make the link look faster ever after."""
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for pages, event in zip((self._lead_pages, self._pages), events, strict=True):
            self._copy(pages)
            event.record()
        self._under_way.append(events)

    def _copy(self, pages: torch.Tensor) -> None:
        copy_pages(
            direction=Direction.TO_DEVICE,
            host_bases=self._bases[0],
            device_bases=self._bases[1],
            host_pages=pages,
            device_pages=pages,
            page_bytes=_PROBE_PAGE_BYTES,
        )

    def _take(self) -> None:
        while self._under_way and self._under_way[0][1].query():
            started, ended = self._under_way.popleft()
            self._milliseconds.append(started.elapsed_time(ended))

    def bytes_per_second(self) -> float:
        """As the median of the last copies that have passed says."""
        self._take()
        return self._trial / max(statistics.median(self._milliseconds), 1e-6)


class HotLink:
    """The link as the resolver uses it: its speed by a trial and by probes, its bytes by the device's own counts (admission.Link)."""

    def __init__(self, runtime: HiSparseRuntime, bytes_per_second: float, probe: LinkProbe) -> None:
        self._hot = hot = runtime.hot
        self._trial, self._probe = bytes_per_second, probe
        self.request_bytes = PRIOR_MISSES * runtime.top_k * hot.row_bytes * runtime.pool.layer_num

    def look(self) -> float:
        speed = min(self._probe.bytes_per_second(), _HIGHEST * self._trial)
        self._probe.begin()
        return speed

    def fetched(self) -> tuple[int, float]:
        counts = self._hot.latest_counts()
        return counts.step, float(counts.total("layer_rows_fetched") * self._hot.row_bytes)


def time_link(runtime: HiSparseRuntime) -> float:
    """Bytes per second from the host tier to the device, by the fastest of a few page copies of 64 MiB: servers that start together
    time the same link. No page may be in use; waits."""
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
    seconds = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - started)
    return num_pages * page_bytes / min(seconds)


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
        model = StepModel(HotLink(runtime, speed, LinkProbe(runtime.worker.device, speed)))
        logger.info("HiSparse admission: the link to the host tier gives %.1f GB/s", speed / 1e9)
    misses, share = misses_of(runtime), share_of(runtime.tp_group)
    return AdmissionGate(
        lambda: pool_of(runtime.residency),
        model,
        share,
        time.perf_counter,
        lambda pool: misses.end_round(pool.host_pages > 0),
    )
