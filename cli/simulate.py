"""`multiworld simulate`: what a fleet would be worth, before the machines are bought."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cli.service import AsJson
from config import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from simulation.planning import Forecast

EPILOG = """
[bold]Examples[/bold]

multiworld simulate --stages 2 --replicas 1,2,3 --load 0.5,0.8 --mtbf 1d --recovery 9s --service-time 25ms

multiworld simulate --replicas 2 --load 0.2,0.4,0.6,0.8,1.0,1.2 --mtbf 1h --plot plan.svg

multiworld simulate --replicas 2 --load 0.7 --service-tail heavy --json
"""

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
N = TypeVar("N", int, float)


def seconds(text: str) -> float:
    """A duration as people write it ("25ms", "9s", "1.5h", "never"), in seconds; a bare number is seconds."""
    if text in ("never", "inf"):
        return float("inf")
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip())
    if match is None or (match[2] or "s") not in UNITS:
        raise typer.BadParameter(
            f"{text!r} is no duration: write a number with {', '.join(UNITS)}, such as 25ms or 1.5h"
        )
    return float(match[1]) * UNITS[match[2] or "s"]


def _list_of(kind: Callable[[str], N]) -> Callable[[str], list[N]]:
    def parse(text: str) -> list[N]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise typer.BadParameter(f"{text!r}: write numbers with commas between them, such as 1,2,3") from None

    return parse


def _duration(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="DURATION", help=text, parser=seconds)


Stages = Annotated[int, typer.Option("--stages", metavar="N", help="Stages that the model is cut into.")]
Replicas = Annotated[
    Any, typer.Option("--replicas", metavar="N,N…", help="Replicas of each stage.", parser=_list_of(int))
]
Loads = Annotated[
    Any,
    typer.Option(
        "--load",
        metavar="SHARE,…",
        help="Requests, as a share of what all replicas could compute in full batches.",
        parser=_list_of(float),
    ),
]
Mtbf = Annotated[Any, _duration("--mtbf", "Mean time between failures of one worker, or never.")]
Recovery = Annotated[Any, _duration("--recovery", "From a worker's death until it serves again.")]
Detection = Annotated[Any, _duration("--detection", "From a worker's death until the leader knows.")]
ServiceTime = Annotated[Any, _duration("--service-time", "Computing time of one request in one stage.")]
RowShare = Annotated[
    float, typer.Option("--row-share", metavar="SHARE", help="What each further row of a batch costs, of that.")
]
ServiceTail = Annotated[
    str, typer.Option("--service-tail", metavar="KIND", help="How service times scatter: none, usual or heavy.")
]
Deadline = Annotated[Any, _duration("--deadline", "How long a client waits for its answer.")]
Grace = Annotated[Any, _duration("--grace", "How long work waits for a stage without a replica.")]
MaxBatchSize = Annotated[int, typer.Option("--max-batch-size", metavar="N", help="Most requests of a batch.")]
Window = Annotated[int, typer.Option("--window", metavar="N", help="Most batches in flight on one link.")]
QueueLimit = Annotated[int, typer.Option("--queue-limit", metavar="N", help="Most requests that wait.")]
Requests = Annotated[
    int, typer.Option("--requests", metavar="N", help="About how many to simulate, for each line of the table.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="The same seed gives the same table.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw it too: png, svg or pdf. Needs matplotlib.")
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
    """Ask what a fleet would be worth: availability, latency and losses for so many replicas under such a load.

    The scheduler that serves decides; clients, workers, failures and time are simulated. Nothing is started.
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
    from simulation.planning import Plan, foresee

    try:
        plans = [Plan(**numbers) for numbers in lines]
        return [foresee(plan) for plan in plans]
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
    from cli.console import console

    out = console()
    out.print(_table(forecasts))
    least = min(forecast.requests for forecast in forecasts)
    out.print(
        f"stages up: share of time in which every stage has a replica, simulated over failures of workers "
        f"(exact: in closed form). At least {least} requests a line; seed {forecasts[0].plan.seed}.",
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
    """With as many digits as it takes to see a small share, or (inverted) how far a large one is from 100 %."""
    if inverted:
        digits = 3 if share <= 0 else max(1, min(9, 1 - int(f"{100 * share:e}".partition("e")[2])))
        return f"{100 * (1 - share):.{digits}f} %"
    return "0 %" if share <= 0 else f"{100 * share:.2g} %"


def _milliseconds(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s * 1e3:.1f} ms"


def _check_plot(file: Path) -> None:
    """Before the work, not after it."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UserError(f"--plot {file} needs matplotlib: pip install 'multiworld-serving[bench]'")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {file}: the name must end in .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise UserError(f"--plot {file}: there is no folder {file.parent}")


def _draw(forecasts: "list[Forecast]", file: Path) -> None:
    from simulation.picture import draw

    try:
        draw(forecasts, file)
    except OSError as error:
        raise UserError(f"--plot {file}: {error.strerror}") from error
