"""Goal: each figure means what its help text says, at the stated cadence, and nothing is done where nobody asks.

Method: a runtime on SGLang's classes without a scheduler (`runtime_world`), a stand-in for SGLang's metrics reporter,
hand-driven clocks, and prometheus_client registries of the tests' own.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch

pytest.importorskip("sglang")

from runtime_world import Client, Sizes, World, make_world

from sglang_hisparse import metrics
from sglang_hisparse.metrics import METRICS, Exporter, Kind, Reporter, decode_line
from sglang_hisparse.residency.types import PageTransfer
from sglang_hisparse.stats import CopyTimes, FetchedBytes, gather, shares

LABELS = {"model_name": "m", "tp_rank": 0}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Clock:
    """A clock that stands until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Collector:
    """SGLang's scheduler collector, as far as it is used, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.labels = LABELS
        self._counter_cls = functools.partial(prometheus_client.Counter, registry=self.registry)
        self._gauge_cls = functools.partial(prometheus_client.Gauge, registry=self.registry)
        self._histogram_cls = functools.partial(prometheus_client.Histogram, registry=self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            metrics.PREFIX + name, {**{key: str(value) for key, value in LABELS.items()}, **labels}
        )


def sglang_reporter(*, logs: bool = True, exports: bool = True, interval: int = 4) -> SimpleNamespace:
    """What SGLang's SchedulerMetricsReporter shows to the Reporter."""
    return SimpleNamespace(
        is_stats_logging_rank=logs,
        current_scheduler_metrics_enabled=exports,
        metrics_collector=Collector() if exports else None,
        forward_ct_decode=0,
        decode_log_interval=interval,
    )


@pytest.fixture(params=DEVICES)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Index groups of three layers and of one."""
    with make_world(Sizes(layers=4, group=3), device=request.param) as made:
        yield made


@pytest.fixture
def cpu_world() -> Iterator[World]:
    with make_world(Sizes(layers=4, group=3)) as made:
        yield made


def bound(world: World, sglang: SimpleNamespace, clock: Clock) -> Reporter:
    """A reporter in the runtime's place, following `sglang`."""
    world.runtime.reporter = Reporter(world.runtime, clock)
    world.residency._mirror_sink = world.runtime.reporter.mirror
    world.runtime.reporter.bind(SimpleNamespace(metrics_reporter=sglang))
    return world.runtime.reporter


def resolve_some(world: World, client: Client, positions: list[int]) -> None:
    """Resolve these positions in both leaders' layers; the others of the row are holes."""
    top_k = torch.full((1, world.sizes.top_k), -1, dtype=torch.int32)
    top_k[0, : len(positions)] = torch.tensor(positions)
    for leader in (0, 3):
        world.resolve([client], top_k, leader)


def settled_sample(world: World, fetched: FetchedBytes) -> dict[str, dict[str, float]]:
    """A sample whose device counts are those of now."""
    gather(world.runtime, fetched)
    if world.device == "cuda":
        torch.cuda.synchronize()
    return gather(world.runtime, fetched)


# ---- what is gathered ------------------------------------------------------------------------------------------------


def test_a_sample_has_every_metric_and_every_label_value(cpu_world: World) -> None:
    """Goal: table and figures fit. Method: names and label values of a sample against METRICS, both ways."""
    sample = gather(cpu_world.runtime, FetchedBytes(cpu_world.runtime.hot))
    sample["row_share"] = shares(sample["rows_total"], {})
    wanted = {metric.name: set(metric.values) for metric in METRICS if metric.kind is not Kind.HISTOGRAM}
    assert {name: set(values) for name, values in sample.items()} == wanted
    assert len({metric.name.removesuffix("_total") for metric in METRICS}) == len(METRICS)


def test_rows_and_bytes_are_those_resolved(world: World) -> None:
    """Goal: rows by source, fetched bytes by group. Method: known positions of a mixed request, resolved twice."""
    client = world.start(700)
    fetched = FetchedBytes(world.runtime.hot)
    on_host = world.go_mixed(client)[:10]
    resident = [client.length - 1, client.length - 2]
    before = settled_sample(world, fetched)
    for _ in range(2):
        resolve_some(world, client, on_host + resident)
    after = settled_sample(world, fetched)
    grown = {key: after["rows_total"][key] - before["rows_total"][key] for key in after["rows_total"]}
    assert grown == {"resident": 2 * 2 * 2, "hot": 2 * 10, "host": 2 * 10, "failed": 0}
    assert shares(after["rows_total"], before["rows_total"]) == {"resident": 8 / 48, "hot": 20 / 48, "host": 20 / 48}
    grown_bytes = after["to_device_bytes_total"]["fetch"] - before["to_device_bytes_total"]["fetch"]
    assert grown_bytes == 10 * world.pool.row_bytes * (3 + 1), "ten rows in three layers, ten in one"


def test_fetched_bytes_outlive_the_device_counter(cpu_world: World) -> None:
    """Goal: no jump where the device's 32 bits end. Method: a counter that grows past 2**31 and 2**32, sampled on the way."""
    hot = cpu_world.runtime.hot
    fetched = FetchedBytes(hot)
    column, rows = hot.state[0].header[:, 6], 0
    assert fetched.total() == 0
    for _ in range(9):
        rows += 2**29
        column[1] = (rows + 2**31) % 2**32 - 2**31
        before = fetched.total()
    assert before == (rows - 2**29) * 3 * cpu_world.pool.row_bytes
    assert fetched.total() == rows * 3 * cpu_world.pool.row_bytes > 2**32 * 3


def test_pools_and_requests_are_those_of_the_book(cpu_world: World) -> None:
    """Goal: states and owners add up, residency is counted. Method: one full and one mixed request, then both end."""
    world, fetched = cpu_world, FetchedBytes(cpu_world.runtime.hot)
    full, mixed = world.start(200, seed=1), world.start(700, seed=2)
    world.go_mixed(mixed)
    sample = gather(world.runtime, fetched)
    assert sample["requests"] == {"full": 1, "mixed": 1, "none": 0} and sample["hot_leases"] == {"": 1}
    assert sum(sample["pages"].values()) == world.residency.limits.num_logical_pages
    assert sample["pages"]["host"] == len(world.host_only_positions(mixed)) // 64 > 0
    assert sample["device_pages"]["hot"] == world.sizes.hot_pages
    assert sum(sample["device_pages"].values()) == world.sizes.device_pages
    assert sample["device_usage"][""] == 1 - world.num_free_device / world.sizes.device_pages
    assert sample["device_demand"][""] == (4 + 11) / world.sizes.device_pages
    assert sample["host_tier_bytes"][""] == world.runtime.mem_pool_host.num_bytes
    world.finish(full, checkpoint=False)
    world.finish(mixed, checkpoint=False)
    sample = gather(world.runtime, fetched)
    assert (
        set(sample["requests"].values()) == {0}
        and sample["hot_leases"] == {"": 0}
        and sample["device_demand"] == {"": 0}
    )
    cached = 3 + 10  # full pages of the prompts, which the radix tree keeps
    assert sample["host_usage"][""] == pytest.approx(cached / world.residency.limits.num_logical_pages)


def test_only_shortages_of_running_requests_count_as_retractions_avoided(cpu_world: World) -> None:
    """Goal: what plain SGLang gets by evicting its cache is no retraction. Method: spill cached pages, then used ones."""
    world, counters = cpu_world, cpu_world.residency.counters
    world.finish(world.start(900, seed=1))  # 14 pages stay in the tree
    client = world.start(500, seed=2)
    world.settle()
    assert world.runtime.make_room(world.num_free_device + 4) and counters.pages_spilled == 4
    assert counters.retractions_avoided == 0, "cached pages could have been evicted instead"
    assert world.runtime.make_room(world.sizes.device_pages - 7)
    assert world.book.leased[client.slot] and counters.retractions_avoided == 1
    assert not world.runtime.make_room(world.sizes.device_pages) and counters.retractions_avoided == 1
    assert counters.refusals == 1


# ---- host copies -----------------------------------------------------------------------------------------------------


def test_copy_times_are_measured_from_planning() -> None:
    """Goal: two stages from one beginning. Method: a clock that moves inside the launch and until the acknowledgement."""
    clock = Clock()
    times = CopyTimes(clock)

    def mirror(transfers: list[PageTransfer]) -> list[int]:
        clock.now += 0.25
        return [transfer.transfer_id for transfer in transfers]

    assert times.measure(mirror, [PageTransfer(1, 5, 5), PageTransfer(2, 6, 6)]) == [1, 2]
    clock.now += 0.5
    assert times.measure(mirror, [PageTransfer(3, 7, 7)]) == [3]
    times.note_completed([1, 2])
    clock.now += 1
    times.note_completed([3, 4])
    assert times.take("enqueued") == [0.25, 0.25] and times.take("completed") == [1.0, 1.25]
    assert times.take("enqueued") == times.take("completed") == []


def test_copies_that_never_complete_are_forgotten() -> None:
    """Goal: no false latency and no growth. Method: a failed launch, a flush, a completion that overtakes another."""
    times = CopyTimes(Clock())
    assert times.measure(lambda transfers: [], [PageTransfer(1, 5, 5)]) == []
    times.note_completed([1])
    assert times.take("enqueued") == times.take("completed") == []
    for transfer_id in (2, 3, 4):
        times.measure(lambda transfers: [transfers[0].transfer_id], [PageTransfer(transfer_id, 5, 5)])
    times.note_completed([3])
    times.note_completed([2])
    assert len(times.take("completed")) == 1, "2 was passed over, and its late news is none"
    times.forget()
    times.note_completed([4])
    assert times.take("completed") == []


def test_latencies_of_a_run_reach_the_histogram(cpu_world: World) -> None:
    """Goal: the runtime's own copies are timed. Method: a request is mirrored while the reporter exports."""
    sglang = sglang_reporter()
    clock = Clock()
    reporter = bound(cpu_world, sglang, clock)
    client = cpu_world.start(700)
    cpu_world.decode(client)
    cpu_world.settle()
    report(reporter, clock)
    for stage in ("enqueued", "completed"):
        assert sglang.metrics_collector.value("spill_latency_seconds_count", stage=stage) >= 1
    cpu_world.runtime.clear()
    assert reporter._times._planned == {}


# ---- exporting -------------------------------------------------------------------------------------------------------


def report(reporter: Reporter, clock: Clock) -> None:
    """Let a second pass, and tick until the report is out."""
    clock.now += metrics.PERIOD_SECONDS
    reporter.tick()
    reporter.tick()


def test_counters_grow_by_what_is_new(cpu_world: World) -> None:
    """Goal: totals since start, exported as such. Method: three samples, the second the same as the first."""
    collector, times = Collector(), CopyTimes(Clock())
    exporter = Exporter(collector.labels, collector)
    sample = gather(cpu_world.runtime, FetchedBytes(cpu_world.runtime.hot))
    sample["row_share"] = shares(sample["rows_total"], {})
    for spilled, free in ((5, 9), (5, 3), (12, 4)):
        sample["spilled_pages_total"], sample["pages"]["free"] = {"": spilled}, free
        exporter.publish(sample, times)
        assert collector.value("spilled_pages_total") == spilled and collector.value("pages", state="free") == free
    assert math.isnan(collector.value("row_share", source="hot"))
    assert collector.value("rows_total", source="host") == 0, "a series exists before its first event"


def test_a_second_passes_between_reports(cpu_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: at most one look a second, with the counts of this look. Method: many ticks under a hand-driven clock."""
    looks = []
    monkeypatch.setattr(metrics, "gather", lambda *args: looks.append(1) or gather(*args))
    clock, sglang = Clock(), sglang_reporter(logs=False)
    reporter = bound(cpu_world, sglang, clock)
    client = cpu_world.start(700)
    on_host = cpu_world.go_mixed(client)
    report(reporter, clock)
    looks.clear()
    resolve_some(cpu_world, client, on_host[:10])
    for _ in range(60):
        clock.now += metrics.PERIOD_SECONDS / 25
        reporter.tick()
    assert len(looks) == 2
    assert sglang.metrics_collector.value("rows_total", source="host") == 20


def test_nothing_is_done_where_metrics_are_off(cpu_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: free of cost when off. Method: neither flag set; then the log alone; what would cost must not be called."""
    runtime, clock = cpu_world.runtime, Clock()
    reporter = bound(cpu_world, sglang_reporter(logs=False, exports=False), clock)
    monkeypatch.setattr(metrics, "gather", lambda *args: pytest.fail("gathered"))
    monkeypatch.setattr(runtime, "counters", lambda: pytest.fail("counted"))
    client = cpu_world.start(700)
    for _ in range(5):
        clock.now += 10
        cpu_world.decode(client)
    assert reporter._times is None and reporter._exporter is None and reporter._fetched is None
    monkeypatch.undo()
    reporter = bound(cpu_world, sglang_reporter(exports=False), clock)
    for _ in range(3):
        clock.now += 10
        cpu_world.decode(client)
    assert reporter._times is None and reporter._exporter is None


def test_gathering_does_not_wait_for_the_device(world: World) -> None:
    """Goal: R1 for reports too. Method: reports and timed copies under torch's sync-debug mode, which raises."""
    clock = Clock()
    reporter = bound(world, sglang_reporter(interval=1), clock)
    client = world.start(700)
    on_host = world.go_mixed(client)
    resolve_some(world, client, on_host[:10])
    if world.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            world.runtime.before_forward()
            report(reporter, clock)
    finally:
        if world.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


# ---- the log line ----------------------------------------------------------------------------------------------------


def test_the_line_says_what_happened_since_the_last(cpu_world: World) -> None:
    """Goal: rates, moves and speeds are of the interval. Method: two samples made by hand, the line in full."""
    before = gather(cpu_world.runtime, FetchedBytes(cpu_world.runtime.hot))
    after = {name: dict(values) for name, values in before.items()}
    after["rows_total"] = {"resident": 600, "hot": 300, "host": 100, "failed": 0}
    after["requests"] = {"full": 3, "mixed": 2, "none": 1}
    after["spilled_pages_total"], after["promoted_pages_total"] = {"": 12}, {"": 4}
    after["mirror_backlog_pages"] = {"waiting": 7, "in_flight": 5}
    after["to_host_bytes_total"], after["to_device_bytes_total"] = {"": 5e9}, {"promote": 1e9, "fetch": 8e9}
    assert decode_line(after, before, 2.0) == (
        "HiSparse, #full-req: 3, #mixed-req: 2, #none-req: 1, resident rate: 0.600, hot rate: 0.300, miss rate: 0.100, "
        "#spilled-page: 12, #promoted-page: 4, #unmirrored-page: 7, #copying-page: 5, to host (GB/s): 2.50, "
        "from host (GB/s): 4.50"
    )
    assert "resident rate: -, hot rate: -, miss rate: -, #spilled-page: 0" in decode_line(after, after, 2.0)


def test_one_line_a_decode_interval(cpu_world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: SGLang's cadence, through a flush too. Method: its decode counter driven by hand, a tick each step."""
    clock, sglang = Clock(), sglang_reporter(exports=False, interval=4)
    reporter = bound(cpu_world, sglang, clock)

    def lines_of(steps: int) -> int:
        caplog.clear()
        for _ in range(steps):
            sglang.forward_ct_decode += 1
            clock.now += 0.01
            reporter.tick()
        return sum(record.getMessage().startswith("HiSparse, ") for record in caplog.records)

    with caplog.at_level(logging.INFO, "sglang_hisparse.metrics"):
        assert lines_of(3) == 0
        assert lines_of(2) == 1, "the line comes with the tick after the fourth step"
        assert lines_of(40) == 10
        sglang.forward_ct_decode = 0
        assert lines_of(5) == 1


def test_other_ranks_are_silent(cpu_world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: one rank logs. Method: a rank that exports and does not log; intervals pass."""
    clock, sglang = Clock(), sglang_reporter(logs=False, interval=1)
    reporter = bound(cpu_world, sglang, clock)
    with caplog.at_level(logging.INFO, "sglang_hisparse.metrics"):
        for _ in range(5):
            sglang.forward_ct_decode += 1
            report(reporter, clock)
    assert not caplog.records and sglang.metrics_collector.value("hot_leases") == 0


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_quiet_log_costs_nothing(cpu_world: World, caplog: pytest.LogCaptureFixture, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no decode step gathers figures for a line that nobody sees. Method: reads of the device counts, at both levels."""
    clock, sglang = Clock(), sglang_reporter(exports=False, interval=1)
    reporter, reads = bound(cpu_world, sglang, clock), []
    counters = cpu_world.runtime.counters
    monkeypatch.setattr(cpu_world.runtime, "counters", lambda: reads.append(1) or counters())
    with caplog.at_level(level, "sglang_hisparse.metrics"):
        for _ in range(6):
            sglang.forward_ct_decode += 1
            clock.now += 0.01
            reporter.tick()
    assert bool(reads) == (level == logging.INFO)


def test_labels_are_sglangs() -> None:
    """Goal: our series join with SGLang's. Method: names and values of the labels of each series, own label last."""
    collector = Collector()
    Exporter(collector.labels, collector)
    seen: dict[str, set[Any]] = {}
    for family in collector.registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                seen.setdefault(family.name, set()).add(frozenset(sample.labels) - {"le"})
    for metric in METRICS:
        labels = seen[metric.full_name.removesuffix("_total")]
        assert labels == {frozenset({*LABELS, *([metric.label] if metric.label else [])})}, metric.name
