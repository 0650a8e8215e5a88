"""Goal: a real Prometheus gets every metric of a served scheduler, typed, and the dashboard's queries return data.

Method: `exporter` runs SGLang's scheduler with this package on the CPU and SGLang's own /metrics; Debian's Prometheus
scrapes it every other second; answers come from its HTTP API. One server and one Prometheus serve all tests of this file.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

pytest.importorskip("sglang")

import requests
from fake_sglang import free_port
from prometheus_client.parser import text_string_to_metric_families

import sglang_hisparse
from metrics import dashboard
from sglang_hisparse.metrics import METRICS, PREFIX, Kind

TESTS = Path(__file__).parents[1]
LABELS = {"model_name": "fake-dsa", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
START_SECONDS = 240  # a busy machine imports SGLang slowly


@dataclass(slots=True)
class Served:
    """A running exporter: its port, the lines of its log so far, and the waves of requests that it has served."""

    process: subprocess.Popen[str]
    port: int
    log: list[str]
    waves: list[str]

    def scrape(self) -> str:
        return requests.get(f"http://127.0.0.1:{self.port}/metrics", timeout=10).text


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """The first true answer of `condition`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds} s")


def collect(stream: IO[str], lines: list[str]) -> None:
    threading.Thread(target=lambda: lines.extend(iter(stream.readline, "")), daemon=True).start()


@contextmanager
def child(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end: it is asked by closing its input, then told."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, **options)
    try:
        yield process
    finally:
        process.stdin.close()
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    paths = [str(TESTS), str(Path(sglang_hisparse.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    command = [sys.executable, "-W", "ignore", str(TESTS / "metrics" / "exporter.py")]
    output: list[str] = []
    log: list[str] = []
    with child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        collect(process.stdout, output)
        collect(process.stderr, log)
        wait_for(lambda: output or process.poll() is not None, "the exporter starts", START_SECONDS)
        assert process.poll() is None, "".join(log[-30:])
        served = Served(process, int(output[0]), log, output)
        wait_for(lambda: len(output) >= 2 or process.poll() is not None, "a wave of requests is served", START_SECONDS)
        assert process.poll() is None, "".join(log[-30:])
        yield served


@dataclass(slots=True)
class Prometheus:
    """A running Prometheus that has scraped the exporter several times."""

    port: int

    def get(self, path: str, **parameters: str) -> Any:
        answer = requests.get(f"http://127.0.0.1:{self.port}/api/v1/{path}", params=parameters, timeout=10).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, query: str) -> list[dict[str, Any]]:
        return self.get("query", query=query)["result"]

    def is_ready(self) -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{self.port}/-/ready", timeout=5).ok
        except requests.ConnectionError:
            return False


@pytest.fixture(scope="module")
def prometheus(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 2s}\n"
        f"scrape_configs: [{{job_name: sglang, static_configs: [{{targets: ['127.0.0.1:{served.port}']}}]}}]\n"
    )
    port = free_port()
    command = [
        shutil.which("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, child(command, stdout=log, stderr=log):
        server = Prometheus(port)
        wait_for(server.is_ready, "Prometheus starts")
        # Rates need two samples of a value that moves: a wave must begin and end while it is being scraped.
        waves = len(served.waves)
        wait_for(lambda: len(served.waves) >= waves + 2, "another wave is scraped", 120)
        wait_for(lambda: server.query(f"count_over_time({dashboard.selector_of('requests')}[1m]) > 3"), "a few scrapes")
        yield server


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus binary (Debian: apt-get install prometheus)"
)


def test_endpoint_has_every_metric_with_type_and_labels(served: Served) -> None:
    """Goal: SGLang's endpoint shows all series with SGLang's labels. Method: parse it; names, types, labels, values."""
    families = {family.name: family for family in text_string_to_metric_families(served.scrape())}
    assert "sglang:num_running_reqs" in families, "SGLang's own metrics are there too"
    for metric in METRICS:
        family = families[metric.full_name.removesuffix("_total")]
        assert family.type == metric.kind.value
        found = {sample.labels.get(metric.label, "") for sample in family.samples}
        assert found == set(metric.values), metric.name
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items(), sample
            assert set(sample.labels) <= {*LABELS, metric.label, "le"}, sample


def test_values_agree_with_each_other(served: Served) -> None:
    """Goal: figures are real. Method: identities of the engine at rest: pools add up, audit saw what was not resident."""
    values = {
        (
            sample.name.removeprefix(PREFIX),
            *(sample.labels[key] for key in sample.labels if key not in LABELS),
        ): sample.value
        for family in text_string_to_metric_families(served.scrape())
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }
    assert sum(value for key, value in values.items() if key[0] == "pages") == 128
    assert sum(value for key, value in values.items() if key[0] == "device_pages") == 32
    missed, hot = values["rows_total", "host"], values["rows_total", "hot"]
    assert missed > 0 and hot > 0 and values["rows_total", "failed"] == 0
    assert values["audited_rows_total",] > 0 and values["audit_mismatches_total",] == 0
    row_bytes, layers = 128, 4
    assert values["to_host_bytes_total",] == values["mirrored_pages_total",] * 64 * row_bytes * layers
    # Groups of one layer and of three: a fetched row is one or three rows of bytes.
    assert missed * row_bytes < values["to_device_bytes_total", "fetch"] < missed * row_bytes * 3
    assert values["spilled_pages_total",] > 0 and values["retractions_avoided_total",] > 0
    assert values["spill_latency_seconds_count", "enqueued"] >= values["spill_latency_seconds_count", "completed"] > 0
    assert 0 < values["spill_latency_seconds_sum", "enqueued"] < values["spill_latency_seconds_sum", "completed"]


def test_a_line_follows_each_decode_line(served: Served) -> None:
    """Goal: one line a decode interval, in SGLang's manner. Method: the log of the run; its fields, and its cadence."""
    kinds = [kind for line in served.log if (kind := re.search(r"Decode batch|HiSparse, ", line))]
    lines = [line for line in served.log if "HiSparse, " in line]
    assert len(lines) >= 10 and abs(sum(kind[0] == "HiSparse, " for kind in kinds) * 2 - len(kinds)) <= 1
    pattern = (
        r"HiSparse, #full-req: \d+, #mixed-req: \d+, #none-req: \d+, resident rate: (\d\.\d{3}), hot rate: (\d\.\d{3}), "
        r"miss rate: (\d\.\d{3}), #spilled-page: \d+, #promoted-page: \d+, #unmirrored-page: \d+, #copying-page: \d+, "
        r"to host \(GB/s\): \d+\.\d\d, from host \(GB/s\): \d+\.\d\d$"
    )
    for line in lines:
        rates = re.search(pattern, line.rstrip())
        assert rates, line
        assert math.isclose(sum(map(float, rates.groups())), 1, abs_tol=0.002), line
    assert any("miss rate: 0.0" in line and "miss rate: 0.000" not in line for line in lines)


@needs_prometheus
@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool binary (Debian: apt-get install prometheus)")
def test_promtool_finds_no_fault(served: Served) -> None:
    """Goal: names and help texts follow Prometheus' conventions. Method: promtool, but for SGLang's own colon."""
    lines = [line for line in served.scrape().splitlines() if PREFIX in line]
    done = subprocess.run(
        ["promtool", "check", "metrics"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    complaints = (done.stdout + done.stderr).splitlines()
    assert len(complaints) == len(METRICS), "promtool has read every metric, and says so by the colon"
    assert [line for line in complaints if "should not contain ':'" not in line] == []


@needs_prometheus
def test_prometheus_knows_every_metric_and_its_type(prometheus: Prometheus) -> None:
    """Goal: a real scrape takes all series. Method: its metadata and its series, metric by metric."""
    metadata = prometheus.get("targets/metadata", match_target='{job="sglang"}')
    types = {entry["metric"]: entry["type"] for entry in metadata}
    for metric in METRICS:
        # Where a scrape negotiates OpenMetrics, a counter's family is named without its ending.
        assert types.get(metric.full_name, types.get(metric.full_name.removesuffix("_total"))) == metric.kind.value
        name = metric.name + ("_count" if metric.kind is Kind.HISTOGRAM else "")
        series = prometheus.query(dashboard.selector_of(name))
        assert {one["metric"].get(metric.label, "") for one in series} == set(metric.values)
        assert all(LABELS.items() <= one["metric"].items() for one in series)


@needs_prometheus
@pytest.mark.parametrize(("title", "query"), list(dashboard.queries()), ids=[title for title, _ in dashboard.queries()])
def test_dashboard_query_returns_data(prometheus: Prometheus, title: str, query: str) -> None:
    """Goal: no panel is empty. Method: Grafana's variables filled in, the query run; numbers come back."""
    result = wait_for(lambda: prometheus.query(dashboard.fill_in(query)), f"{title} has data", 30)
    values = [float(one["value"][1]) for one in result]
    assert values and all(math.isfinite(value) or math.isnan(value) for value in values)


@needs_prometheus
def test_dashboard_rates_move(prometheus: Prometheus) -> None:
    """Goal: the panels show what happens. Method: quantities that a run under pressure cannot leave at zero."""
    chosen = dict(dashboard.queries())
    for title in ("Miss rate", "Retractions avoided", "Bytes over the link", "Spill latency"):
        query = dashboard.fill_in(chosen[title]).replace("[20s]", "[5m]")
        assert any(float(one["value"][1]) > 0 for one in prometheus.query(query)), title


@needs_prometheus
@pytest.mark.parametrize(
    ("selector", "label"), list(dashboard.variable_queries()), ids=[label for _, label in dashboard.variable_queries()]
)
def test_dashboard_variables_have_values(prometheus: Prometheus, selector: str, label: str) -> None:
    """Goal: the choosers at the top are filled. Method: the label's values among the series they ask for."""
    series = prometheus.get("series", **{"match[]": dashboard.fill_in(selector)})
    assert {one[label] for one in series}
