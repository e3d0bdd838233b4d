"""The queries of the dashboard and of the rules."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def panels() -> list[dict[str, Any]]:
    """Panels with queries."""
    board = json.loads((CONFIGS / "grafana" / "jaxpaged.json").read_text(encoding="utf-8"))
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def panel_queries(interval: str) -> list[tuple[str, str]]:
    """(title, query) of each target, with variables replaced."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", interval).replace("$instance", ".*"))
        for panel in panels()
        for target in panel["targets"]
    ]


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of a file."""
    groups = yaml.safe_load((CONFIGS / "prometheus" / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def names_in(query: str) -> set[str]:
    """Names of figures that a query asks for."""
    return set(re.findall(r"\b((?:jaxpaged|process)[_:][a-zA-Z0-9_:]+)", query))
