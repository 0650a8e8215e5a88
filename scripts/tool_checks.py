"""What `verify_tools.py` demands of a server's metrics, its log and its recording, and how it reads them.

It takes texts and files and returns findings; it starts no server and sends no request. Metric names, labels and kinds come
from the package's own table, so that a metric which a scrape lacks is named.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from sglang_hisparse.metrics import METRICS, Kind, Metric
from sglang_hisparse.recording.format import RecordingError
from sglang_hisparse.recording.reader import read_recording

SGLANG_METRIC = "sglang:num_running_reqs"  # whose labels ours must have

# What requests that do not fit the device must have set going, by metric and value of its own label.
MUST_GROW = (
    ("rows_total", "resident"),
    ("rows_total", "hot"),
    ("rows_total", "host"),
    ("to_host_bytes_total", ""),
    ("to_device_bytes_total", "fetch"),
    ("mirrored_pages_total", ""),
    ("spilled_pages_total", ""),
    ("hot_leases_acquired_total", ""),
    ("audited_rows_total", ""),
)
MUST_STAY_ZERO = (("rows_total", "failed"), ("failed_copies_total", ""), ("audit_mismatches_total", ""))
_RATE = r"(-|[01]\.\d{3})"
LOG_LINE = re.compile(
    r"HiSparse, #full-req: \d+, #mixed-req: \d+, #none-req: \d+, "
    rf"resident rate: {_RATE}, hot rate: {_RATE}, miss rate: {_RATE}, "
    r"#spilled-page: \d+, #promoted-page: \d+, #unmirrored-page: \d+, #copying-page: \d+, "
    r"to host \(GB/s\): \d+\.\d\d, from host \(GB/s\): \d+\.\d\d"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One demand: whether it holds and what was found."""

    check: str
    ok: bool
    found: str

    def line(self) -> str:
        """For the terminal."""
        return f"{'ok' if self.ok else 'FAILED'}: {self.check}: {self.found}"


@dataclass(slots=True)
class Family:
    """One metric of a scrape. values: own label's value ("": it has none) -> number; sums over the server's own labels."""

    kind: str
    labels: set[str] = field(default_factory=set)
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, list[float]] = field(default_factory=dict)


Scrape = dict[str, Family]


def read_scrape(text: str) -> Scrape:
    """Our metrics by their name in the package's table, and SGLang's own gauge. Raises ValueError where it is no scrape."""
    wanted = {_family_name(metric): metric for metric in METRICS}
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        if family.name == SGLANG_METRIC:
            labels = set(family.samples[0].labels) if family.samples else set()
            found[SGLANG_METRIC] = Family(family.type, labels)
        elif family.name in wanted:
            found[wanted[family.name].name] = _family(wanted[family.name], family)
    return found


def _family_name(metric: Metric) -> str:
    # The text form names a counter's family without the suffix of its samples.
    return metric.full_name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.full_name


def _family(metric: Metric, family: Any) -> Family:
    read = Family(family.type)
    for sample in family.samples:
        own = sample.labels.get(metric.label, "") if metric.label else ""
        if sample.name.endswith("_bucket"):
            read.buckets.setdefault(own, []).append(sample.value)
        elif metric.kind is Kind.HISTOGRAM and not sample.name.endswith("_count"):
            continue
        elif not sample.name.endswith("_created"):
            read.labels |= set(sample.labels) - {metric.label}
            read.values[own] = read.values.get(own, 0.0) + sample.value
    return read


# ---- metrics ---------------------------------------------------------------------------------------------------------


def check_metrics(scrapes: Sequence[Scrape]) -> list[Check]:
    """Hold the scrapes of one run, first to last, against the table: names, kinds, labels, and what must have moved."""
    return [_all_there(scrapes[-1]), _labels(scrapes[-1]), *_movement(scrapes), *_sums(scrapes), *_latencies(scrapes[-1])]


def _all_there(scrape: Scrape) -> Check:
    wrong = []
    for metric in METRICS:
        family = scrape.get(metric.name)
        if family is None:
            wrong.append(f"{metric.full_name} is missing")
        elif family.kind != metric.kind.value:
            wrong.append(f"{metric.full_name} is a {family.kind}, not a {metric.kind.value}")
        elif set(family.values) != set(metric.values):
            wrong.append(f"{metric.full_name} has {sorted(family.values)} for {metric.label}")
    return Check("every metric with its type and label values", not wrong, "; ".join(wrong) or f"{len(METRICS)} metrics")


def _labels(scrape: Scrape) -> Check:
    name = "SGLang's label set"
    if SGLANG_METRIC not in scrape:
        return Check(name, False, f"{SGLANG_METRIC} is missing")
    theirs = scrape[SGLANG_METRIC].labels
    wrong = [metric.full_name for metric in METRICS if metric.name in scrape and scrape[metric.name].labels != theirs]
    return Check(name, bool(theirs) and not wrong, f"differs in {', '.join(wrong)}" if wrong else ", ".join(sorted(theirs)))


def _value(scrape: Scrape, name: str, own: str) -> float:
    return scrape[name].values.get(own, math.nan) if name in scrape else math.nan


def _movement(scrapes: Sequence[Scrape]) -> list[Check]:
    """Counters never fall, grow where they must, and stay at zero where they must."""
    fallen = [
        f"{metric.full_name} {own}"
        for metric in METRICS
        if metric.kind is Kind.COUNTER
        for own in metric.values
        if any(_value(b, metric.name, own) < _value(a, metric.name, own) for a, b in itertools.pairwise(scrapes))
    ]
    grown = {f"{name} {own}".strip(): _value(scrapes[-1], name, own) for name, own in MUST_GROW}
    zero = {f"{name} {own}".strip(): _value(scrapes[-1], name, own) for name, own in MUST_STAY_ZERO}
    return [
        Check("counters never fall", not fallen, ", ".join(fallen) or f"{len(scrapes)} scrapes"),
        Check("counters that pressure moves", all(value > 0 for value in grown.values()), _numbers(grown)),
        Check("counters of failures are zero", all(value == 0 for value in zero.values()), _numbers(zero)),
    ]


def _sums(scrapes: Sequence[Scrape]) -> list[Check]:
    """Pages are neither lost nor made; shares add up; requests were seen where the load must put them."""
    checks = []
    for name in ("pages", "device_pages"):
        sums = sorted({sum(scrape[name].values.values()) for scrape in scrapes if name in scrape})
        found = " or ".join(f"{value:.0f}" for value in sums)
        checks.append(Check(f"{name}: the same sum in every scrape", len(sums) == 1 and sums[0] > 0, found))
    shares = [sum(scrape["row_share"].values.values()) for scrape in scrapes if "row_share" in scrape]
    told = [share for share in shares if not math.isnan(share)]
    good = bool(told) and all(abs(share - 1) < 1e-6 for share in told)
    checks.append(Check("row shares add up to 1", good, f"{len(told)} of {len(shares)} scrapes with selected rows"))
    peak = peaks(scrapes)
    seen = peak["hot_leases"] > 0 and peak["mixed"] + peak["none"] > 0 and peak["device_demand"] > 1
    checks.append(Check("pressure seen in the gauges", seen, _numbers(peak)))
    return checks


def peaks(scrapes: Iterable[Scrape]) -> dict[str, float]:
    """Largest values of the gauges that tell how hard the device was pressed."""
    wanted = {
        "hot_leases": ("hot_leases", ""),
        "full": ("requests", "full"),
        "mixed": ("requests", "mixed"),
        "none": ("requests", "none"),
        "device_demand": ("device_demand", ""),
        "host_usage": ("host_usage", ""),
        "waiting": ("mirror_backlog_pages", "waiting"),
    }
    found = dict.fromkeys(wanted, 0.0)
    for scrape in scrapes:
        for key, (name, own) in wanted.items():
            value = _value(scrape, name, own)
            found[key] = found[key] if math.isnan(value) else max(found[key], value)
    return found


def _latencies(scrape: Scrape) -> list[Check]:
    """The histogram has observations, and its buckets are cumulative up to their count."""
    family = scrape.get("spill_latency_seconds", Family("none"))
    good = bool(family.buckets)
    for own, buckets in family.buckets.items():
        cumulative = all(a <= b for a, b in itertools.pairwise(buckets))
        good &= cumulative and buckets[-1] == family.values.get(own) and buckets[-1] > 0
    return [Check("latency histogram", good, _numbers({f"{own} count": value for own, value in family.values.items()}))]


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def totals(scrape: Scrape) -> dict[str, dict[str, float | None]]:
    """Every value of a scrape, for the result file; null where there is no number."""
    return {
        metric.name: {own: None if math.isnan(value) else value for own, value in scrape[metric.name].values.items()}
        for metric in METRICS
        if metric.name in scrape
    }


# ---- log and recording -----------------------------------------------------------------------------------------------


def check_log(text: str) -> list[Check]:
    """A line of ours for SGLang's decode lines, in the documented form, and the memory table."""
    ours = [line for line in text.splitlines() if "HiSparse, #" in line]
    wrong = [line for line in ours if not LOG_LINE.search(line)]
    theirs = text.count("Decode batch")
    found = f"{len(ours)} lines beside {theirs} of SGLang, {len(wrong)} malformed" + (f": {wrong[0][:200]}" if wrong else "")
    # A line comes one tick after SGLang's: the last one may come after the load, and one may tell of two short intervals.
    enough = 0.8 * theirs - 1 <= len(ours) <= theirs
    return [
        Check("log line per decode interval", bool(ours) and not wrong and enough, found),
        Check("memory table in the log", "HiSparse memory per rank" in text, "the plan as built"),
    ]


def check_recording(path: Path) -> tuple[list[Check], dict[str, Any]]:
    """Read a recording as the replay does; (demands, its figures). Every set must hold min(top_k, length) positions."""
    try:
        recording = read_recording(path)
    except (OSError, RecordingError) as problem:
        return [Check("recording is whole", False, str(problem))], {}
    requests, header = recording.requests(), recording.header
    figures = {
        "megabytes": round(path.stat().st_size / 1e6, 3),
        "steps": len(recording.steps),
        "requests": len(requests),
        "groups": len(header.groups),
        "top_k": header.top_k,
        "longest": max((max(request.seq_lens) for request in requests), default=0),
        "dropped": recording.dropped,
        "sglang": header.sglang,
    }
    num_sets = num_full = 0
    for step in recording.steps:
        wanted = np.minimum(header.top_k, np.array(step.seq_lens))
        num_full += int((np.array(step.counts) == wanted).sum())
        num_sets += len(step.counts) * len(step.requests)
    for index in range(len(recording.steps)):
        recording.positions(index, 0, 0)  # unpacks, and so checks, every step
    kept = recording.dropped <= len(recording.steps) // 10
    return [
        Check("recording is whole", bool(requests) and figures["steps"] > 0, _numbers_of(figures)),
        Check("every recorded set is full", num_full == num_sets > 0, f"{num_full} of {num_sets} sets"),
        Check("the recorder kept up", kept, f"{recording.dropped} steps dropped, {len(recording.steps)} kept"),
    ], figures


def _numbers_of(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures.items())
