"""Dashboard and rules ask only for figures that exist. What Prometheus says of them is in test_prometheus.py."""

import json
import runpy

from jaxpaged.metric_table import DEFINITIONS
from tests.observability.dashboards import CONFIGS, ROOT, names_in, panel_queries, panels, rules

OF_THE_CLIENT_LIBRARY = {"process_start_time_seconds", "process_cpu_seconds_total"}


def known_names() -> set[str]:
    names = set(OF_THE_CLIENT_LIBRARY) | {rule["record"] for rule in rules("recording.yaml")}
    for row in DEFINITIONS:
        names |= {row.name + suffix for suffix in (("_bucket", "_sum", "_count") if row.kind == "histogram" else ("",))}
    return names


def test_queries_ask_for_figures_that_exist() -> None:
    queries = [query for _, query in panel_queries("1m")] + [
        rule["expr"] for name in ("recording.yaml", "alerts.yaml") for rule in rules(name)
    ]
    assert len(queries) > 50
    for query in queries:
        assert names_in(query)
        assert names_in(query) - known_names() == set(), query


def test_labels_in_queries_are_those_of_the_table() -> None:
    labels = {label for row in DEFINITIONS for label in row.labels} | {"le", "instance", "job"}
    for _, query in panel_queries("1m"):
        for piece in query.split("{")[1:]:
            assert {pair.split("=")[0].strip(" !~") for pair in piece.partition("}")[0].split(",")} <= labels, query


def test_the_dashboard_is_the_one_that_the_script_writes() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "make_dashboard.py"))
    assert json.loads((CONFIGS / "grafana" / "jaxpaged.json").read_text()) == made["dashboard"](), "python scripts/make_dashboard.py"


def test_panels_do_not_lie_on_each_other() -> None:
    places = set()
    for panel in panels():
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not cells & places, panel["title"]
        places |= cells


def test_what_was_promised_is_shown() -> None:
    titles = " ".join(panel["title"] for panel in panels()).lower()
    for word in ("tokens per second", "first token", "gap", "gpu utilisation", "gpu memory", "running", "batch", "in use", "prefix hits"):
        assert word in titles
    for word in ("preemptions", "queue", "errors"):
        assert word in titles


def test_every_alert_says_where_what_and_what_to_do() -> None:
    alerts = rules("alerts.yaml")
    assert len(alerts) >= 7
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert "$labels.instance" in alert["annotations"]["summary"]
        assert len(alert["annotations"]["description"]) > 30
