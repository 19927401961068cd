"""The dashboard *Workers*: each place for a worker, and the leader's process."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.grafana.frame import LEADER, REPLICA, dashboard
from deploy.grafana.panels import graph


def workers() -> Dashboard:
    """Each slot over the incarnations of its worker, and the leader's process."""
    slot = "stage {{stage}} replica {{replica}}"
    return (
        dashboard(
            "Workers", "Each place for a worker, whoever is in it, and the leader's process.", ("stage", "replica")
        )
        .with_row(Row("Workers"))
        .with_panel(
            graph(
                "Up",
                (f"avg_over_time(multiworld_world_up{{{REPLICA}}}[$__rate_interval])", slot),
                unit="percentunit",
                says="Share of the time that it served.",
                at_most=1,
            )
        )
        .with_panel(
            graph(
                "Failures",
                (
                    f"sum by (stage, replica) (increase(multiworld_world_failures_total{{{REPLICA}}}[$__rate_interval]))",
                    slot,
                ),
                unit="none",
                says="How often its world broke.",
            )
        )
        .with_panel(
            graph(
                "Busy",
                (f'rate(multiworld_stage_duration_seconds_sum{{{REPLICA}, phase="compute"}}[$__rate_interval])', slot),
                unit="percentunit",
                says="Share of the time that it computed.",
                at_most=1,
            )
        )
        .with_panel(
            graph(
                "Time of a batch, 95th percentile",
                (
                    "histogram_quantile(0.95, sum by (stage, replica, le) "
                    f'(rate(multiworld_stage_duration_seconds_bucket{{{REPLICA}, phase="compute"}}[$__rate_interval])))'
                    " and on (stage, replica) rate(multiworld_stage_duration_seconds_count"
                    f'{{{REPLICA}, phase="compute"}}[$__rate_interval]) > 0',
                    slot,
                ),
                unit="s",
                says="Computing alone.",
            )
        )
        .with_panel(
            graph(
                "Bytes",
                (f"sum by (stage, replica) (rate(multiworld_link_bytes_total{{{REPLICA}}}[$__rate_interval]))", slot),
                unit="Bps",
                says="To and from it.",
            )
        )
        .with_panel(
            graph(
                "Restarts",
                (
                    f"sum by (slot) (increase(multiworld_worker_restarts_total{{{LEADER}}}[$__rate_interval]))",
                    "process {{slot}}",
                ),
                unit="none",
                says="Processes that the leader's supervisor started again: local workers only.",
            )
        )
        .with_row(Row("Leader"))
        .with_panel(
            graph(
                "CPU",
                (f'rate(process_cpu_seconds_total{{job="multiworld-leader", {LEADER}}}[$__rate_interval])', "cores"),
                unit="none",
                says="Near 1 the leader is what limits the service.",
                width=8,
            )
        )
        .with_panel(
            graph(
                "Memory",
                (f'process_resident_memory_bytes{{job="multiworld-leader", {LEADER}}}', "resident"),
                unit="bytes",
                says="Grows until the first minute of load is over, then not.",
                width=8,
            )
        )
        .with_panel(
            graph(
                "Descriptors",
                (f'process_open_fds{{job="multiworld-leader", {LEADER}}}', "open"),
                (f'process_max_fds{{job="multiworld-leader", {LEADER}}}', "limit"),
                unit="none",
                says="About ten a worker.",
                width=8,
            )
        )
    )
