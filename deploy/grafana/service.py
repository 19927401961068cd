"""The dashboard *Service*: what clients get."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat
from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.grafana.frame import LEADER, PLAIN, REQUESTS, dashboard, lost, redundancy
from deploy.grafana.panels import buckets, graph, number


def service() -> Dashboard:
    """Rate, errors, latency, queue, batches."""
    return (
        dashboard("Service", "What clients get: rate, errors, latency, and how requests wait and travel.", ("model",))
        .with_row(Row("Now"))
        .with_panel(_requests_a_second())
        .with_panel(_answered_share())
        .with_panel(_quantile("0.5"))
        .with_panel(_quantile("0.99"))
        .with_panel(redundancy())
        .with_panel(lost())
        .with_row(Row("Requests"))
        .with_panel(
            graph(
                "Requests by outcome",
                (
                    f"sum by (code, reason) (rate(multiworld_requests_total{{{REQUESTS}}}[$__rate_interval])) > 0",
                    "{{code}} {{reason}}",
                ),
                unit="reqps",
                says="Everything that ended, refusals included.",
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Latency of answers",
                *(
                    (
                        f"histogram_quantile({quantile}, sum by (le) (rate(multiworld_request_duration_seconds_bucket"
                        f'{{{LEADER}, code="200"}}[$__rate_interval])))',
                        f"p{float(quantile) * 100:g}",
                    )
                    for quantile in ("0.5", "0.95", "0.99")
                ),
                unit="s",
                says="From the request's first byte of HTTP to its answer's last.",
            )
        )
        .with_panel(
            buckets(
                "Latency, all answers",
                f'sum by (le) (increase(multiworld_request_duration_seconds_bucket{{{LEADER}, code="200"}}[$__rate_interval]))',
                unit="s",
                says="How many answers took how long.",
            )
        )
        .with_panel(
            graph(
                "Error budget, times too fast",
                ('multiworld:request_errors:ratio_rate5m{model=~"$model"} / 0.001', "5 minutes"),
                ('multiworld:request_errors:ratio_rate1h{model=~"$model"} / 0.001', "1 hour"),
                unit="none",
                says="1 spends exactly the budget of 0.1 %. The page comes at 14.4 in both windows.",
            )
        )
        .with_row(Row("Queue and batches"))
        .with_panel(
            graph(
                "Queue",
                (f"multiworld_queue_depth{{{LEADER}}}", "images waiting"),
                (f"multiworld_requests_in_flight{{{LEADER}}}", "requests begun, not ended"),
                (f"multiworld_queue_limit{{{LEADER}}}", "limit"),
                unit="none",
                says="At the limit, requests are refused with 429.",
            )
        )
        .with_panel(
            graph(
                "Wait before the first batch",
                *(
                    (
                        f"histogram_quantile({quantile}, sum by (le) "
                        f"(rate(multiworld_queue_duration_seconds_bucket{{{LEADER}}}[$__rate_interval])))",
                        f"p{float(quantile) * 100:g}",
                    )
                    for quantile in ("0.5", "0.95")
                ),
                unit="s",
                says="Time an image waited in the leader before its batch was sent to the first stage.",
            )
        )
        .with_panel(
            graph(
                "Images a batch",
                (
                    f"sum(rate(multiworld_batch_size_sum{{{LEADER}}}[$__rate_interval]))"
                    f" / sum(rate(multiworld_batch_size_count{{{LEADER}}}[$__rate_interval]))",
                    "mean",
                ),
                unit="none",
                says="Larger batches carry more a second and wait longer.",
            )
        )
        .with_panel(
            buckets(
                "Batches by size",
                f"sum by (le) (increase(multiworld_batch_size_bucket{{{LEADER}}}[$__rate_interval]))",
                unit="none",
                says="How many batches had at most so many images.",
            )
        )
    )


def _requests_a_second() -> stat.Panel:
    expr = f"sum(rate(multiworld_requests_total{{{REQUESTS}}}[$__rate_interval]))"
    return number("Requests", expr, unit="reqps", says="Ended a second.", steps=PLAIN, decimals=1)


def _answered_share() -> stat.Panel:
    return number(
        "Without error",
        f'1 - sum(increase(multiworld_requests_total{{{REQUESTS}, code=~"5.."}}[$__range]))'
        f" / sum(increase(multiworld_requests_total{{{REQUESTS}}}[$__range]))",
        unit="percentunit",
        says="Share of the requests of the time shown that did not end with a 5xx. The objective is 99.9 %.",
        steps=((None, "red"), (0.99, "orange"), (0.999, "green")),
        decimals=3,
    )


def _quantile(quantile: str) -> stat.Panel:
    return number(
        f"p{float(quantile) * 100:g}",
        f"histogram_quantile({quantile}, sum by (le) (rate(multiworld_request_duration_seconds_bucket"
        f'{{{LEADER}, code="200"}}[$__rate_interval])))',
        unit="s",
        says="So long the answers took at most, but for the slowest.",
        steps=((None, "green"), (0.5, "orange"), (2.0, "red")),
        decimals=3,
    )
