"""All queries of dashboards and rules, read from the deployed files."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))


@dataclass(frozen=True)
class Query:
    """One expression. `unit` is Grafana's, empty if there is none."""

    where: str
    expr: str
    unit: str = ""

    def filled_in(self, rate_interval: str, whole_range: str) -> str:
        """The expression with Grafana's variables as "All" and these ranges."""
        expr = self.expr.replace("$__rate_interval", rate_interval).replace("$__range", whole_range)
        return re.sub(r'"\$(namespace|leader|model|stage|replica)"', '".*"', expr)


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels, including those in collapsed rows."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def dashboard_queries(file: Path) -> list[Query]:
    """The queries of all panels and annotations of one dashboard."""
    dashboard = json.loads(file.read_text())
    queries = [
        Query(
            f"{file.stem}: {panel['title']} {target['refId']}",
            target["expr"],
            panel["fieldConfig"]["defaults"].get("unit", ""),
        )
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
    ]
    queries += [Query(f"{file.stem}: @{each['name']}", each["expr"]) for each in dashboard["annotations"]["list"]]
    return queries


def variable_queries(file: Path) -> list[Query]:
    """`label_values(…)` of a dashboard's variables."""
    variables = json.loads(file.read_text())["templating"]["list"]
    return [Query(f"{file.stem}: ${each['name']}", each["query"]) for each in variables if each["type"] == "query"]


def rules_text() -> str:
    """All rules without comments and annotations."""
    lines = "\n".join(file.read_text() for file in RULES).splitlines()
    return "\n".join(line for line in lines if not re.match(r"\s*(#|- name:|summary:|description:|runbook_url:)", line))


def recorded_names() -> set[str]:
    """The names of the series that the recording rules create."""
    return set(re.findall(r"- record: (\S+)", rules_text()))


def selectors(expr: str) -> list[str]:
    """The vector selectors of an expression: `name` or `name{matchers}`, without their ranges."""
    return re.findall(r"\b(?:multiworld[\w:]*|process_\w+|up\b)(?:\{[^}]*\})?", expr)
