"""What all dashboards share: variables, annotations, links, and the numbers that several of them show."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableRefresh,
    VariableSort,
)

from deploy.grafana.panels import SOURCE, number

LEADER = 'instance=~"$leader"'
REQUESTS = f'{LEADER}, model=~"$model"'
STAGE = f'{LEADER}, stage=~"$stage"'
REPLICA = f'{STAGE}, replica=~"$replica"'
GOOD_FROM_0 = ((None, "red"), (0.0, "orange"), (1.0, "green"))
BAD_FROM_1 = ((None, "green"), (1.0, "red"))
PLAIN = ((None, "blue"),)


def dashboard(title: str, says: str, variables: tuple[str, ...]) -> Dashboard:
    """One without panels yet. `variables`: of model, stage, replica."""
    empty = (
        Dashboard(f"multiworld · {title}")
        .uid(f"multiworld-{title.lower()}")
        .description(says)
        .tags(["multiworld"])
        .readonly()
        .refresh("5s")
        .time("now-15m", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            DashboardLink("multiworld")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["multiworld"])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(_variable("leader", "label_values(multiworld_redundancy, instance)"))
        .annotation(_annotation("Broken", "red", _BROKEN))
        .annotation(_annotation("Serves again", "green", _SERVES_AGAIN))
    )
    for name in variables:
        empty.with_variable(_variable(name, _VARIABLES[name]))
    return empty


_VARIABLES = {
    "model": f"label_values(multiworld_requests_total{{{LEADER}}}, model)",
    "stage": f"label_values(multiworld_stage_replicas{{{LEADER}}}, stage)",
    "replica": f"label_values(multiworld_world_up{{{STAGE}}}, replica)",
}
_BROKEN = f"sum by (stage, replica, cause) (increase(multiworld_world_failures_total{{{LEADER}}}[15s])) > 0"
_SERVES_AGAIN = f"(changes(multiworld_world_up{{{LEADER}}}[15s]) > 0) and multiworld_world_up{{{LEADER}}} == 1"


def _variable(name: str, query: str) -> QueryVariable:
    return (
        QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _annotation(name: str, colour: str, expr: str) -> AnnotationQuery:
    return AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour).expr(expr)


def redundancy(width: int = 4) -> stat.Panel:
    """How many failures can surely be survived."""
    expr = f"min(multiworld_redundancy{{{LEADER}}})"
    says = "How many failures can surely be survived; -1 means that the service does not serve."
    return number("Redundancy", expr, unit="none", says=says, steps=GOOD_FROM_0, width=width)


def lost(width: int = 4) -> stat.Panel:
    """Zero, in large."""
    expr = f"sum(multiworld_requests_lost_total{{{LEADER}}})"
    says = "Requests that got neither answer nor error in time. Anything but 0 is a bug."
    return number("Lost", expr, unit="none", says=says, steps=BAD_FROM_1, width=width)
