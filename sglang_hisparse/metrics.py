"""What a running server tells: Prometheus metrics through SGLang's own endpoint, and a line beside each decode line.

Owned by the runtime, which calls `tick` before each forward and while idle. Metrics appear where SGLang's scheduler metrics
do (`--enable-metrics`), under its prefix and with its labels; without that flag none is made and none is gathered. It reads
CPU state and counts that the device has copied earlier; it must never wait for the device or change a decision.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from sglang_hisparse.stats import CopyTimes, FetchedBytes, Sample, gather, shares
from sglang_hisparse.storage.counters import STORAGE_OUTCOMES

if TYPE_CHECKING:
    from sglang_hisparse.residency.types import PageTransfer
    from sglang_hisparse.runtime import HiSparseRuntime

logger = logging.getLogger(__name__)

PREFIX = "sglang:hisparse_"
PERIOD_SECONDS = 1.0
GB = 1e9


class Kind(Enum):
    """How Prometheus treats a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `name` is also its key in a Sample. label: its own label beside SGLang's, with all values it can have."""

    name: str
    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


_SOURCES = ("resident", "hot", "host")

METRICS: tuple[Metric, ...] = (
    # What the resolver found.
    Metric(
        "rows_total",
        Kind.COUNTER,
        "Selected tokens resolved, summed over index groups, by where the KV row was: a resident page, the request's hot "
        "buffer, or the host tier (a miss, fetched). failed: impossible inputs, answered with no row.",
        "source",
        (*_SOURCES, "failed"),
    ),
    Metric(
        "row_share",
        Kind.GAUGE,
        "Share of the selected tokens by where the KV row was, since the last report; NaN when none was selected.",
        "source",
        _SOURCES,
    ),
    # Bytes over the link, all layers of this rank.
    Metric("to_host_bytes_total", Kind.COUNTER, "Bytes copied from the GPU to the host tier by mirroring."),
    Metric(
        "to_device_bytes_total",
        Kind.COUNTER,
        "Bytes copied from the host tier to the GPU: whole pages promoted, rows fetched by the resolver, or pages that a streamed "
        "prefill has read layer by layer.",
        "reason",
        ("promote", "fetch", "stream"),
    ),
    # Pages on the move.
    Metric("mirrored_pages_total", Kind.COUNTER, "Sealed pages whose copy to the host was planned."),
    Metric("spilled_pages_total", Kind.COUNTER, "Pages whose device page was given up; their KV stays on the host."),
    Metric("promoted_pages_total", Kind.COUNTER, "Host-only pages brought back to the GPU."),
    Metric("failed_copies_total", Kind.COUNTER, "Pages whose copy to the host failed and was planned anew."),
    Metric(
        "rehomed_pages_total", Kind.COUNTER, "Device pages taken over from a resident duplicate of a host-only page."
    ),
    Metric(
        "mirror_backlog_pages",
        Kind.GAUGE,
        "Sealed pages without a complete host copy: waiting for one, or with one in flight.",
        "stage",
        ("waiting", "in_flight"),
    ),
    Metric(
        "spill_latency_seconds",
        Kind.HISTOGRAM,
        "Time from planning host copies until they were enqueued behind the last forward, and until they were seen to be "
        "complete (looked at before each forward and while idle). One observation for all pages of one launch.",
        "stage",
        ("enqueued", "completed"),
    ),
    # The pools as they are.
    Metric(
        "pages",
        Kind.GAUGE,
        "Logical pages by state; host: the only copy is in the host tier; unbacked: not to be had before memory has moved to "
        "index-K (elastic_border).",
        "state",
        ("free", "open", "dirty", "mirroring", "clean", "host", "unbacked"),
    ),
    Metric("device_pages", Kind.GAUGE, "Device pages by owner.", "owner", ("free", "resident", "hot", "withheld")),
    Metric(
        "border_steps",
        Kind.GAUGE,
        "Steps of the border between KV and index-K, those taken and those left; both 0 without elastic_border.",
        "stage",
        ("taken", "left"),
    ),
    Metric(
        "prefixes_return_rarely",
        Kind.GAUGE,
        "1 while prompts seldom return to what is cached: cached prefixes are given up before memory moves to index-K for them, and the "
        "border goes back under load; else 0, and without elastic_border.",
    ),
    Metric("device_usage", Kind.GAUGE, "Share of the device pages in use."),
    Metric("host_usage", Kind.GAUGE, "Share of the host tier's pages in use (every logical page has a home there)."),
    Metric("host_tier_bytes", Kind.GAUGE, "Pinned host memory of the host tier, used and free."),
    Metric(
        "device_demand",
        Kind.GAUGE,
        "Pages that running requests use over device pages: above 1 they would not fit the GPU without the host tier.",
    ),
    # Requests.
    Metric(
        "requests",
        Kind.GAUGE,
        "Requests that hold KV, by residency: all pages on the GPU, some, or none beyond the newest.",
        "residency",
        ("full", "mixed", "none"),
    ),
    Metric("hot_leases", Kind.GAUGE, "Requests that hold a hot buffer."),
    Metric(
        "kept_requests",
        Kind.GAUGE,
        "Requests that admission counts on the GPU as a whole until they end, pages that several of them share once.",
    ),
    Metric("hot_leases_acquired_total", Kind.COUNTER, "Hot buffers handed out."),
    Metric(
        "retractions_avoided_total",
        Kind.COUNTER,
        "Times that the pages of running requests exceeded the device, or were about to by the low watermark, and spilling "
        "made room: without a host tier a request would have been retracted.",
    ),
    Metric("refusals_total", Kind.COUNTER, "Times that spilling could not make the device pages asked for."),
    Metric(
        "admission_waits_total",
        Kind.COUNTER,
        "Times that a request that fits was left in the queue because fetching for it would cost throughput, or until it is "
        "known what it would cost.",
    ),
    Metric("admission_closed", Kind.GAUGE, "1 while requests wait for that reason, else 0."),
    # Storage (storage_backend).
    Metric(
        "storage_pages_total",
        Kind.COUNTER,
        "Pages by what became of them: published to storage, loaded from it, missed there, dropped before they were "
        "published, or found corrupt (torn, damaged, of another model) and not used.",
        "outcome",
        STORAGE_OUTCOMES,
    ),
    Metric(
        "storage_failures_total",
        Kind.COUNTER,
        "Calls of the storage backend that failed, and waits for it that were given up.",
        "kind",
        ("backend", "wait"),
    ),
    Metric(
        "storage_backlog_pages",
        Kind.GAUGE,
        "Pages that wait to be published, and logical pages that are being filled from storage.",
        "stage",
        ("publish", "load"),
    ),
    # The audit (SGLANG_HISPARSE_AUDIT=1).
    Metric(
        "audited_rows_total",
        Kind.COUNTER,
        "Rows given to attention that were compared with their home on the host, or with the checksum taken when their page "
        "was sealed; 0 unless the audit is on.",
    ),
    Metric(
        "audit_mismatches_total",
        Kind.COUNTER,
        "Audited rows that differed, and rows that were memory of an ended request: each one is a bug.",
    ),
)

# From a launch that takes microseconds to a link that is blocked.
LATENCY_BUCKETS = tuple(digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5)) + (10.0,)


class Exporter:
    """The metrics of one scheduler process. Every series exists from the start, so that a rate over it has a beginning."""

    def __init__(self, labels: dict[str, Any], collector: Any = None) -> None:
        """labels: names and values of SGLang's labels. collector: SGLang's scheduler collector, which may bring classes of
        its own (Ray) in place of prometheus_client's."""
        # Here and not above: the library looks for its multiprocess folder when it is imported, and SGLang sets that late.
        import prometheus_client

        counter = getattr(collector, "_counter_cls", None) or prometheus_client.Counter
        gauge = getattr(collector, "_gauge_cls", None) or prometheus_client.Gauge
        histogram = getattr(collector, "_histogram_cls", None) or prometheus_client.Histogram
        make: dict[Kind, Callable[..., Any]] = {
            Kind.COUNTER: counter,
            # As SGLang's gauges: one process writes a series, and what it wrote last counts.
            Kind.GAUGE: lambda **kwargs: gauge(multiprocess_mode="mostrecent", **kwargs),
            Kind.HISTOGRAM: lambda **kwargs: histogram(buckets=LATENCY_BUCKETS, **kwargs),
        }
        self._series: dict[tuple[str, str], Any] = {}
        self._counted: dict[tuple[str, str], float] = {}
        for metric in METRICS:
            own = [metric.label] if metric.label else []
            family = make[metric.kind](name=metric.full_name, documentation=metric.help, labelnames=[*labels, *own])
            for value in metric.values:
                self._series[metric.name, value] = family.labels(**labels, **dict.fromkeys(own, value))

    def publish(self, sample: Sample, times: CopyTimes) -> None:
        """Write a sample, and the latencies measured since the last call."""
        for metric in METRICS:
            for value in metric.values:
                series = self._series[metric.name, value]
                if metric.kind is Kind.HISTOGRAM:
                    for seconds in times.take(value):
                        series.observe(seconds)
                elif metric.kind is Kind.GAUGE:
                    series.set(sample[metric.name][value])
                else:
                    self._count((metric.name, value), series, sample[metric.name][value])

    def _count(self, key: tuple[str, str], series: Any, total: float) -> None:
        grown = total - self._counted.get(key, 0)
        if grown > 0:
            series.inc(grown)
            self._counted[key] = total


class Reporter:
    """Decides when to look, and tells what it saw. Silent until it is bound to a scheduler whose rank reports."""

    def __init__(self, runtime: HiSparseRuntime, clock: Callable[[], float] = time.monotonic) -> None:
        self._runtime = runtime
        self._clock = clock
        self._sglang: Any = None
        self._exporter: Exporter | None = None
        self._times: CopyTimes | None = None
        self._fetched: FetchedBytes | None = None
        self._refreshed = False
        self._logged_interval = 0
        self._next_export = 0.0
        self._exported_rows: dict[str, float] = {}
        self._logged: tuple[float, Sample] | None = None

    def bind(self, scheduler: Any) -> None:
        """Follow the scheduler's SchedulerMetricsReporter: its flags say whether this rank logs and whether it exports.
        A stand-in for a scheduler without one is not reported on."""
        sglang = getattr(scheduler, "metrics_reporter", None)
        if sglang is None or not (sglang.current_scheduler_metrics_enabled or sglang.is_stats_logging_rank):
            return
        self._sglang = sglang
        self._fetched = FetchedBytes(self._runtime.hot)
        if sglang.current_scheduler_metrics_enabled:
            collector = sglang.metrics_collector
            self._times = CopyTimes()
            self._exporter = Exporter(dict(collector.labels), collector)
        self._logged = (self._clock(), gather(self._runtime, self._fetched))

    # -- around host copies -----------------------------------------------------------------------------------------

    def mirror(self, transfers: list[PageTransfer]) -> Iterable[int]:
        """The transfer worker's `mirror`, its time taken where metrics are exported."""
        mirror = self._runtime.worker.mirror
        return mirror(transfers) if self._times is None else self._times.measure(mirror, transfers)

    def note_completed(self, transfer_ids: list[int]) -> None:
        if self._times is not None:
            self._times.note_completed(transfer_ids)

    def forget_copies(self) -> None:
        """After a flush: copies under way will not be acknowledged."""
        if self._times is not None:
            self._times.forget()

    # -- cadence ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look when a second has passed or a decode interval has ended. The device counts of one tick are read in the next,
        when their copy has arrived, so that a report does not show those of the report before."""
        if self._sglang is None:
            return
        if self._refreshed:
            self._refreshed = False
            self._report()
        elif self._is_due():
            self._runtime.counters()
            self._refreshed = True

    def _interval(self) -> int:
        """Decode intervals that SGLang has reported."""
        return self._sglang.forward_ct_decode // self._sglang.decode_log_interval

    def _line_is_due(self) -> bool:
        interval = self._interval()
        self._logged_interval = min(self._logged_interval, interval)  # a flush makes SGLang count anew
        return self._sglang.is_stats_logging_rank and interval > self._logged_interval and logger.isEnabledFor(logging.INFO)

    def _is_due(self) -> bool:
        return self._line_is_due() or (self._exporter is not None and self._clock() >= self._next_export)

    def _report(self) -> None:
        now, sample = self._clock(), gather(self._runtime, self._fetched)
        if self._exporter is not None:
            self._next_export = now + PERIOD_SECONDS
            sample["row_share"] = shares(sample["rows_total"], self._exported_rows)
            self._exported_rows = sample["rows_total"]
            self._exporter.publish(sample, self._times)
        if self._line_is_due():
            self._logged_interval = self._interval()
            since, before = self._logged
            logger.info(decode_line(sample, before, now - since))
            self._logged = (now, sample)


def decode_line(sample: Sample, before: Sample, seconds: float) -> str:
    """One line in the manner of SGLang's decode line; rates, moves and speeds are those of the last `seconds`."""

    def grown(name: str) -> float:
        return sum(sample[name].values()) - sum(before[name].values())

    share = shares(sample["rows_total"], before["rows_total"])
    rates = [f"{name} rate: {'-' if math.isnan(share[key]) else f'{share[key]:.3f}'}" for key, name in _RATE_NAMES]
    backlog = sample["mirror_backlog_pages"]
    return ", ".join(
        [
            "HiSparse",
            *(f"#{residency}-req: {count:.0f}" for residency, count in sample["requests"].items()),
            *rates,
            f"#spilled-page: {grown('spilled_pages_total'):.0f}",
            f"#promoted-page: {grown('promoted_pages_total'):.0f}",
            f"#unmirrored-page: {backlog['waiting']:.0f}",
            f"#copying-page: {backlog['in_flight']:.0f}",
            f"to host (GB/s): {grown('to_host_bytes_total') / seconds / GB:.2f}",
            f"from host (GB/s): {grown('to_device_bytes_total') / seconds / GB:.2f}",
        ]
    )


_RATE_NAMES = (("resident", "resident"), ("hot", "hot"), ("host", "miss"))
