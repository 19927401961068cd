"""The dashboard *Pipeline*: a stage a row."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.grafana.frame import REPLICA, STAGE, dashboard
from deploy.grafana.panels import graph


def pipeline() -> Dashboard:
    """A stage a row."""
    compute = f'{REPLICA}, phase="compute"'
    spent = f"rate(multiworld_stage_duration_seconds_sum{{{compute}}}[$__rate_interval])"
    batches = f"rate(multiworld_stage_duration_seconds_count{{{compute}}}[$__rate_interval])"
    return (
        dashboard("Pipeline", "The stages: who serves each, and where a batch's time goes.", ("stage", "replica"))
        .with_row(Row("Stage $stage").repeat("stage"))
        .with_panel(
            graph(
                "Replicas",
                (f"sum by (state) (multiworld_stage_replicas{{{STAGE}}}) > 0", "{{state}}"),
                unit="none",
                says="By state; those that are ready serve.",
                width=6,
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Time of a batch",
                (
                    f"sum by (phase) (rate(multiworld_stage_duration_seconds_sum{{{REPLICA}}}[$__rate_interval]))"
                    f" / sum by (phase) (rate(multiworld_stage_duration_seconds_count{{{REPLICA}}}[$__rate_interval]))",
                    "{{phase}}",
                ),
                unit="s",
                says="Mean by phase: computing at the worker, and on the link both ways.",
                width=6,
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Compute by replica",
                (f"{spent} / ({batches} > 0)", "replica {{replica}}"),
                unit="s",
                says="A replica that is slower than its siblings has another device, or somebody else on it.",
                width=6,
            )
        )
        .with_panel(
            graph(
                "In flight",
                (f"multiworld_replica_in_flight{{{REPLICA}}}", "replica {{replica}}"),
                unit="none",
                says="Batches sent and not answered; the window is the most.",
                width=6,
            )
        )
        .with_panel(
            graph(
                "Batches",
                (
                    f'rate(multiworld_stage_duration_seconds_count{{{REPLICA}, phase="compute"}}[$__rate_interval])',
                    "replica {{replica}}",
                ),
                unit="ops",
                says="Answered a second.",
                width=6,
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Bytes",
                (
                    f"sum by (direction) (rate(multiworld_link_bytes_total{{{REPLICA}}}[$__rate_interval]))",
                    "{{direction}}",
                ),
                unit="Bps",
                says="On the stage's links, as the leader sees them.",
                width=6,
            )
        )
        .with_panel(
            graph(
                "Busy",
                (
                    f'rate(multiworld_stage_duration_seconds_sum{{{REPLICA}, phase="compute"}}[$__rate_interval])',
                    "replica {{replica}}",
                ),
                unit="percentunit",
                says="Share of the time that a worker computed. The stage that is nearest to 1 limits the service.",
                width=6,
                at_most=1,
            )
        )
        .with_panel(
            graph(
                "Rerouted and retried",
                (f"sum(increase(multiworld_reroutes_total{{{STAGE}}}[$__rate_interval]))", "rerouted"),
                (
                    f"sum(increase(multiworld_retries_total{{{STAGE}}}[$__rate_interval]))",
                    "sent again, for any reason",
                ),
                unit="none",
                says="Batches that went to another replica.",
                width=6,
            )
        )
    )
