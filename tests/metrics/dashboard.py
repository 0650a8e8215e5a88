"""The dashboard as tests read it: its queries, and what Grafana fills in for its variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "configs" / "grafana" / "hisparse.json"
# Either spelling: prometheus_client writes a colon as "_" for a Prometheus that asks for OpenMetrics (2.x), and keeps it
# for others (its issue 1177).
STORED_PREFIX = "sglang[:_]hisparse_"
NAME = re.compile(rf'__name__=~"{re.escape(STORED_PREFIX)}(\w+)"')
# What Grafana puts in for a person who has chosen nothing, at a scrape every two seconds.
FILLED_IN = {
    "$__rate_interval": "20s",
    "$__range": "5m",
    "$model_name": ".*",
    "$instance": ".*",
    "$tp_rank": ".*",
}


def load() -> dict[str, Any]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def queries() -> Iterator[tuple[str, str]]:
    """(panel title, PromQL) of every target."""
    for panel in load()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def variable_queries() -> Iterator[tuple[str, str]]:
    """(series selector, label) of every label_values() variable."""
    for variable in load()["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            yield selector, label


def selector_of(name: str) -> str:
    """PromQL for all series of a metric, given without prefix, however Prometheus has stored its name."""
    return f'{{__name__=~"{STORED_PREFIX}{name}"}}'


def fill_in(query: str) -> str:
    for variable, value in FILLED_IN.items():
        query = query.replace(variable, value)
    assert "$" not in query, f"a variable that tests do not know: {query}"
    return query
