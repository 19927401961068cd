"""`multiworld simulate`: capacity planning by simulation."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from multiworld_serving.cli.service import AsJson
from multiworld_serving.common.config import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from multiworld_serving.testing.planning.forecast import Forecast

EPILOG = """
[bold]Examples[/bold]

multiworld simulate --stages 2 --replicas 1,2,3 --load 0.5,0.8 --mtbf 1d --recovery 9s --service-time 25ms

multiworld simulate --replicas 2 --load 0.2,0.4,0.6,0.8,1.0,1.2 --mtbf 1h --plot plan.svg

multiworld simulate --replicas 2 --load 0.7 --service-tail heavy --json
"""

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
N = TypeVar("N", int, float)


def seconds(text: str) -> float:
    """Parse a duration such as "25ms", "9s", "1.5h" or "never" into seconds; a number without unit is in seconds."""
    if text in ("never", "inf"):
        return float("inf")
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip())
    if match is None or (match[2] or "s") not in UNITS:
        raise typer.BadParameter(
            f"{text!r} is not a duration: expected a number with a unit of {', '.join(UNITS)}, such as 25ms or 1.5h"
        )
    return float(match[1]) * UNITS[match[2] or "s"]


def _list_of(kind: Callable[[str], N]) -> Callable[[str], list[N]]:
    def parse(text: str) -> list[N]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise typer.BadParameter(f"{text!r}: expected numbers separated by commas, such as 1,2,3") from None

    return parse


def _duration(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="DURATION", help=text, parser=seconds)


Stages = Annotated[int, typer.Option("--stages", metavar="N", help="Number of pipeline stages.")]
Replicas = Annotated[Any, typer.Option("--replicas", metavar="N,N…", help="Replicas per stage.", parser=_list_of(int))]
Loads = Annotated[
    Any,
    typer.Option(
        "--load",
        metavar="SHARE,…",
        help="Arrival rate as a fraction of the capacity with full batches.",
        parser=_list_of(float),
    ),
]
Mtbf = Annotated[Any, _duration("--mtbf", "Mean time between failures of one worker; `never` for no failures.")]
Recovery = Annotated[Any, _duration("--recovery", "Time from the death of a worker until it serves again.")]
Detection = Annotated[Any, _duration("--detection", "Time from the death of a worker until the leader detects it.")]
ServiceTime = Annotated[Any, _duration("--service-time", "Compute time of one request in one stage.")]
RowShare = Annotated[
    float,
    typer.Option(
        "--row-share", metavar="SHARE", help="Cost of each further request of a batch, as a fraction of --service-time."
    ),
]
ServiceTail = Annotated[
    str,
    typer.Option(
        "--service-tail",
        metavar="KIND",
        help="Distribution of compute times: none (constant), usual (log-normal) or heavy (Pareto).",
    ),
]
Deadline = Annotated[Any, _duration("--deadline", "Timeout of a request.")]
Grace = Annotated[Any, _duration("--grace", "How long requests wait for a stage without a replica.")]
MaxBatchSize = Annotated[int, typer.Option("--max-batch-size", metavar="N", help="Maximum requests per batch.")]
Window = Annotated[int, typer.Option("--window", metavar="N", help="Maximum batches in flight per worker.")]
QueueLimit = Annotated[int, typer.Option("--queue-limit", metavar="N", help="Maximum number of waiting requests.")]
Requests = Annotated[
    int, typer.Option("--requests", metavar="N", help="Approximate number of simulated requests per table row.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed. The same seed gives the same table.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Write a plot (.png, .svg, .pdf); needs matplotlib.")
]


def simulate(
    stages: Stages = 2,
    replicas: Replicas = "1,2,3",
    load: Loads = "0.5,0.8",
    mtbf: Mtbf = "1d",
    recovery: Recovery = "9s",
    detection: Detection = "5ms",
    service_time: ServiceTime = "25ms",
    row_share: RowShare = 0.25,
    service_tail: ServiceTail = "none",
    deadline: Deadline = "30s",
    grace: Grace = "15s",
    max_batch_size: MaxBatchSize = 8,
    window: Window = 2,
    queue_limit: QueueLimit = 256,
    requests: Requests = 20_000,
    seed: Seed = 1,
    plot: Plot = None,
    as_json: AsJson = False,
) -> int:
    """Estimate availability, latency and failed requests for given numbers of replicas and loads.

    Runs the real scheduler; clients, workers, failures and time are simulated. No process is started.
    """
    if plot is not None:
        _check_plot(plot)
    numbers = {
        "stages": stages,
        "mtbf_s": mtbf,
        "recovery_s": recovery,
        "detection_s": min(detection, recovery),
        "service_s": service_time,
        "row_share": row_share,
        "tail": service_tail,
        "deadline_s": deadline,
        "grace_s": grace,
        "max_batch_size": max_batch_size,
        "window": window,
        "queue_limit": queue_limit,
        "requests": requests,
        "seed": seed,
    }
    forecasts = _forecasts([{**numbers, "replicas": number, "load": share} for number in replicas for share in load])
    if as_json:
        print(json.dumps([_facts(forecast) for forecast in forecasts], indent=2))
    else:
        _show(forecasts)
    if plot is not None:
        _draw(forecasts, plot)
    return 0


def _forecasts(lines: list[dict[str, Any]]) -> "list[Forecast]":
    from multiworld_serving.testing.planning.forecast import Plan, compute_forecast

    try:
        plans = [Plan(**numbers) for numbers in lines]
        return [compute_forecast(plan) for plan in plans]
    except ValueError as error:
        raise UserError(str(error)) from error


def _facts(forecast: "Forecast") -> dict[str, Any]:
    plan = {name: None if value == float("inf") else value for name, value in asdict(forecast.plan).items()}
    facts = {name: value for name, value in asdict(forecast).items() if name != "plan"}
    return {
        "plan": plan,
        "rate_per_s": forecast.plan.rate,
        "exact_availability": forecast.plan.exact_availability,
        "failed": forecast.failed,
        **facts,
    }


def _show(forecasts: "list[Forecast]") -> None:
    from multiworld_serving.cli.console import console

    out = console()
    out.print(_table(forecasts))
    least = min(forecast.requests for forecast in forecasts)
    out.print(
        f"stages up: fraction of time in which every stage has a replica, simulated "
        f"(exact: closed form). At least {least} requests per row; seed {forecasts[0].plan.seed}.",
        markup=False,
        style="dim",
    )


def _table(forecasts: "list[Forecast]") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("replicas", "load", "requests/s", "stages up", "(exact)", "p50", "p99", "failed"):
        table.add_column(name, justify="right")
    table.add_column("refused as")
    for forecast in forecasts:
        plan = forecast.plan
        table.add_row(
            str(plan.replicas),
            f"{plan.load:g}",
            f"{plan.rate:.1f}",
            _percent(1 - forecast.availability, inverted=True),
            _percent(1 - plan.exact_availability, inverted=True),
            _milliseconds(forecast.p50_s),
            _milliseconds(forecast.p99_s),
            _percent(forecast.failed if forecast.refused else 0.0),
            ", ".join(f"{reason} {_percent(share)}" for reason, share in forecast.refused.items()) or "-",
        )
    return table


def _percent(share: float, *, inverted: bool = False) -> str:
    """Format a fraction with enough digits to show a small value or, if inverted, its small distance from 100 %."""
    if inverted:
        digits = 3 if share <= 0 else max(1, min(9, 1 - int(f"{100 * share:e}".partition("e")[2])))
        return f"{100 * (1 - share):.{digits}f} %"
    return "0 %" if share <= 0 else f"{100 * share:.2g} %"


def _milliseconds(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s * 1e3:.1f} ms"


def _check_plot(file: Path) -> None:
    """Check the plot options before the simulation starts. Raises UserError."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UserError(f"--plot {file} needs matplotlib: pip install 'multiworld-serving[bench]'")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {file}: the name must end in .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise UserError(f"--plot {file}: the directory {file.parent} does not exist")


def _draw(forecasts: "list[Forecast]", file: Path) -> None:
    from multiworld_serving.testing.planning.plot import draw

    try:
        draw(forecasts, file)
    except OSError as error:
        raise UserError(f"--plot {file}: {error.strerror}") from error
