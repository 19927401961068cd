"""Every query of the dashboards uses metrics and labels that a leader or a worker exports."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.metrics import merge_metrics
from multiworld_serving.server.supervisor.supervisor import restart_metrics
from tests import dashboard_queries as written
from tests.dashboard_queries import Query, dashboard_queries, recorded_names, rules_text, selectors
from tests.unit.server.test_leader_metrics import busy_frontend, busy_leader
from tests.unit.workers.test_worker_metrics import busy_worker

FROM_PROMETHEUS = {"namespace", "job", "instance"}


def told() -> dict[str, set[str]]:
    """The labels of every series that a leader or a worker exports, by name."""
    frontend, leader, worker = busy_frontend(), busy_leader(), busy_worker()
    for program in (frontend, worker):
        EdgeMetrics(program)
    restarts = restart_metrics([("", "frontend", {0: 0}), ("m", "leader", {0: 0}), ("m", "worker", {0: 0})])
    texts = [
        ("frontend-0", "", frontend.text().decode()),
        ("leader-0", "m", leader.text().decode()),
        ("supervisor", "", restarts),
    ]
    of_service = merge_metrics(texts)
    found: dict[str, set[str]] = {"up": set(FROM_PROMETHEUS)}
    for line in (of_service + worker.text().decode()).splitlines():
        if match := re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line):
            found.setdefault(match[1], set(FROM_PROMETHEUS)).update(re.findall(r'(\w+)="', match[2] or ""))
    return found


def unknown(queries: Iterable[Query]) -> list[str]:
    """Metric names that no process exports, and labels that a metric does not have."""
    known, problems = told(), []
    recorded = recorded_names()
    for query in queries:
        for selector in selectors(query.expr):
            name, _, matchers = selector.partition("{")
            if name in recorded:
                continue
            if name not in known:
                problems.append(f"{query.where}: there is no {name}")
            elif strangers := set(re.findall(r"(\w+)\s*(?:=|!)", matchers)) - known[name]:
                problems.append(f"{query.where}: {name} has no {strangers}")
    return problems


@pytest.mark.parametrize("file", written.DASHBOARDS, ids=lambda file: file.stem)
def test_every_dashboard_query_uses_exported_metrics(file: Path) -> None:
    queries = dashboard_queries(file)
    assert len(queries) > 8
    assert all(selectors(query.expr) for query in queries)
    for query in [*queries, *written.variable_queries(file)]:
        if query.where != f"{file.stem}: $namespace":
            assert all('{namespace=~"$namespace"' in selector for selector in selectors(query.expr)), query
    assert not unknown([*queries, *written.variable_queries(file)])


def test_every_rule_uses_exported_metrics() -> None:
    rules = Query("rules", rules_text())
    assert len(selectors(rules.expr)) > 20
    assert not unknown([rules])
