"""The dashboard *Failures*: what broke, and that nothing was lost."""

from __future__ import annotations

from grafana_foundation_sdk.builders import heatmap
from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.grafana.frame import LEADER, PLAIN, REPLICA, STAGE, dashboard, lost, redundancy
from deploy.grafana.panels import buckets, graph, number, timeline


def failures() -> Dashboard:
    """What broke, how soon it was noticed and healed, and that nothing was lost."""
    return (
        dashboard("Failures", "What broke, how soon it was seen, sent elsewhere and healed.", ("stage", "replica"))
        .with_row(Row("Now"))
        .with_panel(lost(width=6))
        .with_panel(redundancy(width=6))
        .with_panel(
            number(
                "Failures",
                f"sum(increase(multiworld_world_failures_total{{{REPLICA}}}[$__range]))",
                unit="none",
                says="Worlds that broke in the time shown.",
                steps=PLAIN,
                width=6,
            )
        )
        .with_panel(
            number(
                "Batches rerouted",
                f"sum(increase(multiworld_reroutes_total{{{STAGE}}}[$__range]))",
                unit="none",
                says="Batches that a failure left behind and another replica answered.",
                steps=PLAIN,
                width=6,
            )
        )
        .with_row(Row("Worlds"))
        .with_panel(
            timeline(
                "Worlds",
                (f"multiworld_world_up{{{REPLICA}}}", "{{world}}"),
                says="When each link served.",
                states={"1": ("ready", "green"), "0": ("down", "red")},
            )
        )
        .with_panel(
            graph(
                "Failures by cause",
                (
                    f"sum by (cause) (increase(multiworld_world_failures_total{{{REPLICA}}}[$__rate_interval])) > 0",
                    "{{cause}}",
                ),
                unit="none",
                says="exit: the process ended. hang: it was silent. transport: the link failed. error: it answered wrongly or raised.",
                stacked=True,
            )
        )
        .with_panel(
            graph(
                "Redundancy",
                (f"multiworld_redundancy{{{LEADER}}} + 1", "fewest ready replicas of a stage"),
                (f"multiworld_spares{{{LEADER}}}", "spares"),
                (f"multiworld_workers_kept_away{{{LEADER}}}", "kept away by the breaker"),
                unit="none",
                says="0 means that the service does not serve; 1, that the next failure may stop it.",
            )
        )
        .with_row(Row("How long"))
        .with_panel(_times("Detection", "failure_detection_seconds", "From the last sign of life to the break."))
        .with_panel(_times("Reroute", "reroute_seconds", "From a break until its batch was sent to another replica."))
        .with_panel(_times("Recovery", "recovery_seconds", "From a break until the slot served again."))
        .with_row(Row("What was done"))
        .with_panel(
            graph(
                "Rerouted and retried",
                (
                    f"sum by (stage) (increase(multiworld_reroutes_total{{{STAGE}}}[$__rate_interval]))",
                    "rerouted, stage {{stage}}",
                ),
                (
                    f"sum by (stage) (increase(multiworld_retries_total{{{STAGE}}}[$__rate_interval]))",
                    "sent again, stage {{stage}}",
                ),
                unit="none",
                says="Batches that went to another replica.",
            )
        )
        .with_panel(
            graph(
                "Second copies",
                (f"sum by (outcome) (increase(multiworld_hedges_total{{{LEADER}}}[$__rate_interval]))", "{{outcome}}"),
                (
                    f"sum(increase(multiworld_duplicate_answers_total{{{LEADER}}}[$__rate_interval]))",
                    "answers dropped",
                ),
                unit="none",
                says="Late batches that were sent twice, by which copy answered first.",
            )
        )
    )


def _times(title: str, name: str, says: str) -> heatmap.Panel:
    expr = f"sum by (le) (increase(multiworld_{name}_bucket{{{LEADER}}}[$__rate_interval]))"
    return buckets(title, expr, unit="s", says=says, width=8)
