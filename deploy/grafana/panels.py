"""The kinds of panel that our dashboards are made of, each with one look."""

from __future__ import annotations

from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmaps
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${source}")

Query = tuple[str, str]
"""A PromQL expression, and how Grafana names each of its series."""


def graph(
    title: str,
    *queries: Query,
    unit: str,
    says: str,
    width: int = 12,
    stacked: bool = False,
    at_most: float | None = None,
) -> timeseries.Panel:
    """Lines over time, from zero on."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(says)
        .datasource(SOURCE)
        .span(width)
        .height(8)
        .unit(unit)
        .min(0)
        .line_width(1)
        .fill_opacity(30 if stacked else 8)
        .show_points(options.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING))
        .legend(
            common.VizLegendOptions()
            .display_mode(options.LegendDisplayMode.LIST)
            .placement(options.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
    if at_most is not None:
        panel.max(at_most)
    for number, query in enumerate(queries):
        panel.with_target(_target(query, number))
    return panel


def number(
    title: str,
    expr: str,
    *,
    unit: str,
    says: str,
    steps: tuple[tuple[float | None, str], ...],
    width: int = 4,
    decimals: int = 0,
) -> stat.Panel:
    """One number in large.

    Args:
        steps: colours by the value from which on they hold; None for the lowest.
    """
    thresholds = [models.Threshold(value=value, color=colour) for value, colour in steps]
    return (
        stat.Panel()
        .title(title)
        .description(says)
        .datasource(SOURCE)
        .span(width)
        .height(5)
        .unit(unit)
        .decimals(decimals)
        .thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds))
        .color_mode(options.BigValueColorMode.BACKGROUND)
        .graph_mode(options.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target((expr, ""), 0))
    )


def buckets(title: str, expr: str, *, unit: str, says: str, width: int = 12) -> heatmap.Panel:
    """A histogram over time: `expr` gives one series for each `le`."""
    target = _target((expr, "{{le}}"), 0).format(PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .title(title)
        .description(says)
        .datasource(SOURCE)
        .span(width)
        .height(8)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(heatmaps.HeatmapColorMode.SCHEME).scheme("Oranges").steps(32))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .cell_gap(1)
        .with_target(target)
    )


def timeline(
    title: str, query: Query, *, says: str, states: dict[str, tuple[str, str]], width: int = 24
) -> statetimeline.Panel:
    """States over time, a row for each series.

    Args:
        states: word and colour by value.
    """
    words = {value: models.ValueMappingResult(text=word, color=colour) for value, (word, colour) in states.items()}
    return (
        statetimeline.Panel()
        .title(title)
        .description(says)
        .datasource(SOURCE)
        .span(width)
        .height(9)
        .mappings([models.ValueMap(options=words)])
        .show_value(options.VisibilityMode.NEVER)
        .row_height(0.8)
        .merge_values(True)
        .with_target(_target(query, 0))
    )


def _target(query: Query, number: int) -> prometheus.Dataquery:
    expr, legend = query
    target = prometheus.Dataquery().expr(expr).ref_id(ascii_uppercase[number]).datasource(SOURCE).range()
    return target.legend_format(legend or "__auto")
