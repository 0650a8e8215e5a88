"""Whether a request that fits only when pages leave the GPU is worth starting now.

Owns the estimate of what such a request costs (`StepModel`, measured on the first rank) and the verdict that follows from it
(`AdmissionGate`, equal on all ranks). The prefill budget asks `allows`; the runtime tells each decode step and each extend, and
calls `tick` before each forward. It must never wait for the device, never look at a clock for a decision on one rank alone,
and never keep a request from an empty system.

The model of a decode step of n requests, of whose pages H are on the host only:

    t(n, H) = compute(n) + H * page_seconds        compute(n): a line through the measured steps, less their fetches

One request more, which sends h further pages to the host, is worth it if it raises n / t, the tokens per second of all.
In a server that is always being sent requests this is the measure with prefills counted too: each request costs its own
prefill whenever it starts, and its share of the decode steps besides.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)

ROUND_STEPS = 32
"""Decode steps between two measurements; all ranks take over the new figures at the same one."""

MARGIN = 0.1
"""Hysteresis: by so much a request must be too dear for the gate to close, and worth it for the gate to open."""

PATIENCE_ROUNDS = 16
"""So many rounds a request waits that no waiting makes fit."""

STALE_ROUNDS = 64
"""So many rounds the gate stays closed on fetch figures that nothing renews; then one request is let through to renew them."""

GROWTH = 2.0
"""Figures are believed up to so many times the host-only pages that they were measured with, and one request more."""

CAUTION = 3.0
"""Beyond that a request starts only if it is worth it with pages that cost so many times as much; where nothing was measured, if
it is worth it with every selected row missed."""

UNMEASURED_ROUNDS = 2
"""So many rounds since start a request waits for the first measurement, which rounds full of prefills do not give."""

QUIET_ROUNDS = 2
"""So many rounds after the last refusal the gate is open again: nobody waits behind it."""

DECAY = 0.9  # what a round's figures weigh in the next round
FORGET = 0.99  # how fast the most pages measured are forgotten, a round with host-only pages
PRIOR_MISSES = 0.14  # share of the selected rows that a hot buffer of 2 * top_k rows misses (published traces, LRU)
SLOPE_REQUESTS = (
    32  # while only one batch size was seen: so many requests more double the compute time of a small batch
)
SLOPE_WEIGHT = 64.0  # (requests squared) of that guess against what was measured
SETTLE_STEPS = 2  # decode launches after an extend whose spacing still holds the extend's time (overlap scheduling)


def worth_admitting(num_running: int, step_seconds: float, added_seconds: float, *, margin: float = 0.0) -> bool:
    """Whether one request more, which makes each step `added_seconds` longer, raises the tokens per second of all.

    num_running: requests that decode in a step of `step_seconds`. margin: above 0 in favour of admitting. With nothing
    running the answer is yes.
    """
    return num_running == 0 or num_running * added_seconds < step_seconds * (1 + margin)


@dataclass(frozen=True, slots=True)
class Pool:
    """What the books of every rank say alike. demand: device pages with which all live requests were fully resident."""

    num_running: int
    device_pages: int
    hot_pages: int
    demand_pages: int
    host_pages: int  #: pages of live requests that are on the host only


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What the first rank has measured and all ranks decide by. Seconds; all zero: nothing yet."""

    compute: float = 0.0  #: compute time of a step of `requests` requests
    requests: float = 0.0
    per_request: float = 0.0  #: by how much one request more lengthens it
    per_host_page: float = 0.0  #: fetch time of a step for each host-only page of its requests

    @property
    def known(self) -> bool:
        return self.compute > 0

    def step(self, num_running: int, host_pages: int) -> float:
        """Seconds of a decode step."""
        compute = max(self.compute + self.per_request * (num_running - self.requests), 0.1 * self.compute)
        return compute + self.per_host_page * host_pages


class Link(Protocol):
    """What is fetched, as far as the model needs it. All without waiting for the device."""

    request_bytes: float  #: of one step of a request whose pages are all on the host, by the published miss rate

    def look(self) -> float:
        """Bytes per second that the link gives now. Called once a round, on the forward stream."""
        ...

    def fetched(self) -> tuple[int, float]:
        """(n, bytes that the first n decode steps since start have fetched), n a little behind the steps launched."""


class StepModel:
    """Turns the spacing of decode launches and the bytes fetched into StepFigures. Only the first rank has one."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._spacings: list[tuple[float, int]] = []  # seconds, requests; of the round under way
        self._sums = [0.0] * 5  # weight, n, n*n, compute, n*compute
        self._fetch_bytes = self._fetch_pages = 0.0
        self._pages_before = 0
        self._fetched_before = (0, 0.0)
        self._page_seconds = 0.0

    def note_spacing(self, seconds: float, num_running: int) -> None:
        """Two decode launches of `num_running` requests followed each other so closely, nothing between them."""
        self._spacings.append((seconds, num_running))

    def end_round(self, pool: Pool) -> StepFigures:
        """The figures after a round of decode steps."""
        self._take_fetches(pool)
        if len(self._spacings) >= 4:
            self._take_spacings(pool)
        self._spacings.clear()
        return self._figures()

    def _take_fetches(self, pool: Pool) -> None:
        bytes_per_second = self._link.look()
        step, total = self._link.fetched()
        (step_before, total_before), host_pages = self._fetched_before, (self._pages_before + pool.host_pages) / 2
        # A round without a host-only page teaches nothing, and what was learnt before it still holds.
        if step > step_before and host_pages:
            self._fetch_bytes = DECAY * self._fetch_bytes + (total - total_before) / (step - step_before)
            self._fetch_pages = DECAY * self._fetch_pages + host_pages
        self._fetched_before, self._pages_before = (step, total), pool.host_pages
        # One request at the published miss rate stands beside what was measured: it decides as long as nothing was.
        pages = max(pool.demand_pages / max(pool.num_running, 1), 1.0)
        # Bytes are kept, not seconds: what was learnt holds when the link gets faster or slower.
        self._page_seconds = (self._fetch_bytes + self._link.request_bytes) / (self._fetch_pages + pages) / bytes_per_second

    def _take_spacings(self, pool: Pool) -> None:
        seconds = statistics.median(spacing for spacing, _ in self._spacings)
        requests = statistics.fmean(count for _, count in self._spacings)
        compute = max(seconds - self._page_seconds * pool.host_pages, 0.1 * seconds)
        added = (1.0, requests, requests * requests, compute, requests * compute)
        self._sums = [DECAY * total + new for total, new in zip(self._sums, added, strict=True)]

    def _figures(self) -> StepFigures:
        weight, n, nn, c, nc = self._sums
        if not weight:
            return StepFigures(per_host_page=self._page_seconds)
        requests, compute = n / weight, c / weight
        guess = compute / (requests + SLOPE_REQUESTS)
        spread, together = max(nn - n * n / weight, 0.0), nc - n * c / weight
        slope = (together + SLOPE_WEIGHT * guess) / (spread + SLOPE_WEIGHT)
        return StepFigures(compute, requests, min(max(slope, 0.0), compute / max(requests, 1.0)), self._page_seconds)


class AdmissionGate:
    """One for each rank. Every rank asks the same questions in the same order and gets the same answers.

    pool: the books now. model: on the first rank, None on the others. share: gives every rank what the first rank passes in
    (the others pass None), once every ROUND_STEPS decode steps. clock: seconds, read on the first rank only. on_round: told the
    books on all ranks before the same forward, for what else must be taken over then.
    """

    def __init__(
        self,
        pool: Callable[[], Pool],
        model: StepModel | None,
        share: Callable[[Sequence[float] | None], Sequence[float]],
        clock: Callable[[], float],
        on_round: Callable[[Pool], None] | None = None,
    ) -> None:
        self._on_round = on_round
        self._pool, self._model, self._share, self._clock = pool, model, share, clock
        self.figures = StepFigures()
        self.closed = False  #: a request was refused, and none has been worth it since
        self.waits = 0  #: times that a request was refused
        self._steps = self._rounds = 0  # decode steps of the round under way; rounds since start
        self._since_extend = 0
        self._launched = 0.0
        self._rounds_stale = 0  # rounds without a host-only page, in which nothing was learnt about fetches
        self._rounds_waited = 0  # rounds since a request was first refused
        self._rounds_unasked = QUIET_ROUNDS + 1  # rounds since a request was last refused
        self._news = False
        self._pages_before = 0  # host-only pages of the round before, whose fetches the figures hold
        self._pages_known = 0.0  # most of them that the figures speak of

    # -- what happens -------------------------------------------------------------------------------------------------

    def note_decode(self, num_running: int) -> None:
        """A decode step of `num_running` requests is about to be launched."""
        self._steps += 1
        self._since_extend += 1
        if self._model is not None:
            now, before = self._clock(), self._launched
            self._launched = now
            if self._since_extend > SETTLE_STEPS + 1:
                self._model.note_spacing(now - before, num_running)

    def note_extend(self) -> None:
        self._since_extend = 0

    def note_pause(self) -> None:
        """The scheduler has spent time on what is no part of a decode step: the spacings around it say nothing of one."""
        self._since_extend = min(self._since_extend, SETTLE_STEPS - 1)

    def tick(self) -> None:
        """Before each forward: ends a round when it is due, on all ranks before the same forward."""
        if self._steps < ROUND_STEPS:
            return
        pool = self._pool()
        measured = None if self._model is None else astuple(self._model.end_round(pool))
        self.figures = StepFigures(*self._share(measured))
        if self._on_round is not None:
            self._on_round(pool)
        self._steps = 0
        self._rounds += 1
        self._rounds_stale = 0 if pool.host_pages else self._rounds_stale + 1
        if self._pages_before:
            self._pages_known = max(self._pages_before, FORGET * self._pages_known)
        self._pages_before = pool.host_pages
        self._rounds_waited += 1
        self._rounds_unasked += 1
        self._news = self._news or self._rounds_unasked <= QUIET_ROUNDS
        if self.closed and self._rounds_unasked > QUIET_ROUNDS:
            self._open()

    def take_news(self) -> bool:
        """Whether a refused request may be asked about again: SGLang stops asking once a batch was full."""
        news, self._news = self._news, False
        return news

    # -- the question -------------------------------------------------------------------------------------------------

    def look(self) -> Pool:
        """The books now: once for each pass of the scheduler over its queue."""
        return self._pool()

    def allows(self, pool: Pool, new_pages: int, *, promised_pages: int = 0, promised_requests: int = 0) -> bool:
        """Whether a request that takes `new_pages` device pages may start, beside those promised in the same pass."""
        running = pool.num_running + promised_requests
        room = pool.device_pages - pool.demand_pages - promised_pages
        if not running or new_pages <= room:
            return True
        if not self.figures.known:
            return self._rounds >= UNMEASURED_ROUNDS or self._wait()
        beyond = max(pool.demand_pages - pool.device_pages, 0)
        host_pages = max(pool.host_pages, beyond) + max(-room, 0) - beyond
        added_pages = new_pages - max(room, 0) + pool.hot_pages  # that leave the device, for the request and a lease
        step = self.figures.step(running, host_pages)
        added = self.figures.per_request + self.figures.per_host_page * added_pages
        worth = worth_admitting(running, step, added, margin=-MARGIN if self.closed else MARGIN)
        if worth and host_pages > GROWTH * self._pages_known:
            times = CAUTION if self._pages_known else 1 / PRIOR_MISSES
            dearer = (times - 1) * self.figures.per_host_page
            if not worth_admitting(running, step + dearer * host_pages, added + dearer * added_pages):
                return self._wait()
        if not worth and not self._patience_ends(new_pages > pool.device_pages):
            return self._refuse(running, step, added)
        self._rounds_waited = self._rounds_stale = 0
        if worth and self.closed:
            self._open()
        return True

    def _patience_ends(self, never_fits: bool) -> bool:
        """Nothing has been learnt about fetches for long, so that the estimate may be wrong; or waiting changes nothing."""
        patience = PATIENCE_ROUNDS if never_fits else STALE_ROUNDS
        return self._rounds_waited >= patience and (never_fits or self._rounds_stale >= STALE_ROUNDS)

    def _refuse(self, running: int, step: float, added: float) -> bool:
        self._wait()
        if not self.closed:
            self.closed, self._rounds_waited = True, 0
            logger.info(
                "HiSparse admission: new requests wait for room, since fetching for one more would cost throughput: %d run, "
                "a step takes %.2f ms and would take %.2f ms longer", running, 1e3 * step, 1e3 * added,
            )  # fmt: skip
        return False

    def _wait(self) -> bool:
        """The request is asked about again after the next round."""
        self.waits += 1
        self._rounds_unasked = 0
        return False

    def _open(self) -> None:
        self.closed, self._news = False, True
        logger.info("HiSparse admission: new requests start again where pages of others must leave")


class AdmissionPass:
    """One pass of the scheduler over its queue: what the candidates take, and what those before them in the pass have taken.

    tree: the radix cache, whose evictable size falls by the prefix that a candidate pins: those pages were only cached.
    """

    def __init__(self, gate: AdmissionGate | None, tree: Any, page_size: int) -> None:
        self._gate, self._tree, self._page_size = gate, tree, page_size
        self._pool: Pool | None = None
        self._evictable = 0 if gate is None else tree.evictable_size()
        self._candidate_pages = self._promised_pages = self._promised_requests = 0

    def allows(self, extend_tokens: int) -> bool:
        """Whether a request of `extend_tokens` tokens beyond its prefix may start; its prefix is pinned now."""
        if self._gate is None:
            return True
        if self._pool is None:
            self._pool = self._gate.look()
        pinned = max(self._evictable - self._tree.evictable_size(), 0)
        self._candidate_pages = -(-extend_tokens // self._page_size) + 1 + pinned // self._page_size
        return self._gate.allows(
            self._pool,
            self._candidate_pages,
            promised_pages=self._promised_pages,
            promised_requests=self._promised_requests,
        )

    def reserve(self) -> None:
        """The candidate starts."""
        if self._gate is not None:
            self._promised_pages += self._candidate_pages
            self._promised_requests += 1
            self._evictable = self._tree.evictable_size()
