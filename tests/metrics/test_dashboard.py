"""Goal: the dashboard loads and shows what the server exports, all of it and nothing else.

Method: Grafana's own types read it; its queries are held against metrics.METRICS.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from metrics import dashboard
from sglang_hisparse.metrics import METRICS, Kind, Metric


def exported_names(metric: Metric) -> set[str]:
    """Names of its series, without prefix."""
    ends = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
    return {metric.name + end for end in ends}


def lost(written: Any, read: Any, path: str = "") -> list[str]:
    """Paths of what is in `written` and not, or differently, in `read` (which may have defaults besides)."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [gone for key, value in written.items() for gone in lost(value, read.get(key), f"{path}/{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = enumerate(zip(written, read, strict=True))
        return [gone for index, pair in pairs for gone in lost(*pair, f"{path}/{index}")]
    return [] if written == read else [f"{path}: {written!r}, read as {read!r}"]


def test_grafana_reads_it_without_loss() -> None:
    """Goal: every key means something to Grafana. Method: parse with Grafana's types, write again, look for losses."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog import encoder, plugins

    plugins.register_default_plugins()
    written = dashboard.load()
    for variable in written["templating"]["list"]:
        variable.pop("definition", None)  # the query as text, which Grafana's editor shows; not among the types
    parsed = models.Dashboard.from_json(json.loads(json.dumps(written)))
    assert lost(written, json.loads(encoder.JSONEncoder().encode(parsed))) == []


def test_every_query_names_metrics_that_exist() -> None:
    """Goal: no panel is empty for a misspelt name. Method: names in queries and variables against the table."""
    known = set().union(*map(exported_names, METRICS))
    texts = [query for _, query in dashboard.queries()] + [selector for selector, _ in dashboard.variable_queries()]
    assert texts and all(dashboard.NAME.search(text) for text in texts)
    unknown = {name for text in texts for name in dashboard.NAME.findall(text)} - known
    assert unknown == set()


def test_every_metric_is_shown() -> None:
    """Goal: nothing is exported that nobody sees. Method: each metric's names are searched in the queries."""
    shown = {name for _, query in dashboard.queries() for name in dashboard.NAME.findall(query)}
    assert [metric.name for metric in METRICS if not exported_names(metric) & shown] == []


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_queries_use_the_metric_as_what_it_is(metric: Metric) -> None:
    """Goal: counters under rate, gauges plain, own labels spelt right. Method: look around each use of the name."""
    for title, query in dashboard.queries():
        for match in re.finditer(r"\{([^}]*)\}", query):
            if not exported_names(metric) & set(dashboard.NAME.findall(match.group())):
                continue
            counted = re.search(r"(rate|increase)\($", query[: match.start()]) is not None
            assert counted == (metric.kind is not Kind.GAUGE), f"{title}: {query}"
            for label, value in re.findall(r'(\w+)!?="(\w+)"', match.group()):
                assert label == metric.label and value in metric.values, f"{title}: {query}"
            for grouping in re.findall(r"by \(([^)]*)\)", query):
                assert set(grouping.split(", ")) <= {metric.label, "le"}, f"{title}: {query}"


def test_panels_do_not_overlap() -> None:
    """Goal: the grid is as drawn. Method: every cell of 24 columns belongs to one panel; ids are unique."""
    panels = dashboard.load()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
