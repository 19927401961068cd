"""The dashboard *Workers*: each place for a worker, the workers' own processes, and the leader's."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.grafana.frame import LEADER, REPLICA, dashboard
from deploy.grafana.panels import graph

_WORKER = 'job="multiworld-worker"'


def workers() -> Dashboard:
    """Each slot over the incarnations of its worker, then what the processes tell themselves."""
    return _leader(_gpus(_processes(_slots())))


def _slots() -> Dashboard:
    slot = "stage {{stage}} replica {{replica}}"
    return (
        dashboard("Workers", "Each place for a worker, whoever is in it, and the processes.", ("stage", "replica"))
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
                    "worker {{slot}}",
                ),
                (
                    f"sum by (slot) (increase(multiworld_frontend_restarts_total{{{LEADER}}}[$__rate_interval]))",
                    "frontend {{slot}}",
                ),
                unit="none",
                says="Processes that the leader's supervisor started again: local workers, and frontends where there are any.",
            )
        )
    )


def _processes(board: Dashboard) -> Dashboard:
    """What workers with a metrics port of their own tell: those of `multiworld worker --metrics-port`."""
    return (
        board.with_row(Row("Workers' processes (those with a --metrics-port)"))
        .with_panel(
            graph(
                "Batches",
                (
                    "sum by (instance, outcome) "
                    f"(rate(multiworld_worker_batches_total{{{_WORKER}}}[$__rate_interval]))",
                    "{{instance}} {{outcome}}",
                ),
                unit="ops",
                says="Failed: the stage raised. Unwanted: the world ended before the answer was out.",
            )
        )
        .with_panel(
            graph(
                "Computing",
                (
                    f"sum by (instance) (rate(multiworld_worker_compute_seconds_sum{{{_WORKER}}}[$__rate_interval]))",
                    "{{instance}}",
                ),
                (
                    f"avg_over_time(multiworld_worker_busy{{{_WORKER}}}[$__rate_interval])",
                    "{{instance}} busy at scrapes",
                ),
                unit="percentunit",
                says="Share of the time, for all its leaders together. Busy shows a batch that does not end, too.",
                at_most=1,
            )
        )
        .with_panel(
            graph(
                "Time of a batch, 95th percentile",
                (
                    "histogram_quantile(0.95, sum by (instance, stage, le) "
                    f"(rate(multiworld_worker_compute_seconds_bucket{{{_WORKER}}}[$__rate_interval]))) "
                    "and on (instance, stage) sum by (instance, stage) "
                    f"(rate(multiworld_worker_compute_seconds_count{{{_WORKER}}}[$__rate_interval])) > 0",
                    "{{instance}} stage {{stage}}",
                ),
                unit="s",
                says="Computing alone, as the worker measures it.",
            )
        )
        .with_panel(
            graph(
                "Worlds",
                (f"multiworld_worker_leaders_connected{{{_WORKER}}}", "{{instance}} leaders"),
                (
                    f"increase(multiworld_worker_worlds_joined_total{{{_WORKER}}}[$__rate_interval])",
                    "{{instance}} joined",
                ),
                (
                    f"increase(multiworld_worker_worlds_ended_total{{{_WORKER}}}[$__rate_interval])",
                    "{{instance}} ended {{cause}}",
                ),
                unit="none",
                says="Leaders that it shares a world with now, and how often one began and ended. Left is a goodbye.",
            )
        )
        .with_panel(
            graph(
                "CPU",
                (f"rate(process_cpu_seconds_total{{{_WORKER}}}[$__rate_interval])", "{{instance}}"),
                unit="none",
                says="Cores.",
                width=8,
            )
        )
        .with_panel(
            graph(
                "Memory",
                (f"process_resident_memory_bytes{{{_WORKER}}}", "{{instance}}"),
                unit="bytes",
                says="Resident: torch, and the weights of its stages.",
                width=8,
            )
        )
        .with_panel(
            graph(
                "Descriptors",
                (f"process_open_fds{{{_WORKER}}}", "{{instance}}"),
                unit="none",
                says="A few for each leader.",
                width=8,
            )
        )
    )


def _gpus(board: Dashboard) -> Dashboard:
    """Empty where workers compute on CPUs, or without nvidia-ml-py."""
    of_gpu = "{{instance}} {{device}}"
    return (
        board.with_row(Row("GPUs"))
        .with_panel(
            graph(
                "GPU",
                (f"multiworld_gpu_utilization_ratio{{{_WORKER}}}", of_gpu),
                unit="percentunit",
                says="Share of the time in which it computed, for whomever.",
                width=8,
                at_most=1,
            )
        )
        .with_panel(
            graph(
                "GPU memory",
                (f"multiworld_gpu_memory_used_bytes{{{_WORKER}}}", of_gpu),
                (f"multiworld_gpu_memory_total_bytes{{{_WORKER}}}", f"{of_gpu} all"),
                unit="bytes",
                says="In use, by whomever.",
                width=8,
            )
        )
        .with_panel(
            graph(
                "GPU temperature and power",
                (f"multiworld_gpu_temperature_celsius{{{_WORKER}}}", f"{of_gpu} °C"),
                (f"multiworld_gpu_power_watts{{{_WORKER}}}", f"{of_gpu} W"),
                unit="none",
                says="One that is too hot becomes slow.",
                width=8,
            )
        )
    )


def _leader(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Leader"))
        .with_panel(
            graph(
                "CPU",
                (f'rate(process_cpu_seconds_total{{job="multiworld-leader", {LEADER}}}[$__rate_interval])', "cores"),
                unit="none",
                says="Near 1 the leader is what limits the service; --frontends takes HTTP and images from it.",
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
