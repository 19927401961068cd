"""`multiworld simulate`: capacity planning by simulation."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import typer

from multiworld_serving.cli.options import AsJson, PlotFile, duration, seconds, value
from multiworld_serving.common.config import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from multiworld_serving.testing.planning.forecast import Forecast, Plan

EPILOG = """
[bold]Examples[/bold]

multiworld simulate --stages 2 --replicas 1,2,3 --load 0.5,0.8 --mtbf 1d --recovery 9s --service-time 25ms

multiworld simulate --replicas 2 --load 0.2,0.4,0.6,0.8,1.0,1.2 --mtbf 1h --plot plan.svg

multiworld simulate --replicas 2 --load 0.7 --service-tail heavy --json
"""

N = TypeVar("N", int, float)


def _seconds_or_never(text: str) -> float:
    return float("inf") if text in ("never", "inf") else seconds(text)


def _list_of(kind: Callable[[str], N]) -> Callable[[str], list[N]]:
    def parse(text: str) -> list[N]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise typer.BadParameter(f"{text!r}: expected numbers separated by commas, such as 1,2,3") from None

    return parse


Replicas = Annotated[Any, value("N,N…", "Replicas per stage.", parser=_list_of(int))]
Loads = Annotated[
    Any, value("SHARE,…", "Arrival rate as a fraction of the capacity with full batches.", parser=_list_of(float))
]


@dataclass(frozen=True)
class PlanOptions:
    """Options with the names of the fields of `testing.planning.forecast.Plan`."""

    panel: ClassVar[None] = None
    stages: Annotated[int, value("N", "Number of pipeline stages.")] = 2
    mtbf_s: Annotated[
        Any,
        duration(
            "Mean time between failures of one worker; `never` for no failures.", "--mtbf", parser=_seconds_or_never
        ),
    ] = "1d"
    recovery_s: Annotated[Any, duration("Time from the death of a worker until it serves again.", "--recovery")] = "2s"
    detection_s: Annotated[
        Any, duration("Time from the death of a worker until the leader detects it.", "--detection")
    ] = "100ms"
    service_s: Annotated[Any, duration("Compute time of one request in one stage.", "--service-time")] = "25ms"
    row_share: Annotated[
        float, value("SHARE", "Cost of each further request of a batch, as a fraction of --service-time.")
    ] = 0.25
    tail: Annotated[
        str,
        value(
            "KIND",
            "Distribution of compute times: none (constant), usual (log-normal) or heavy (Pareto).",
            "--service-tail",
        ),
    ] = "none"
    deadline_s: Annotated[Any, duration("Timeout of a request.", "--deadline")] = "30s"
    grace_s: Annotated[Any, duration("How long requests wait for a stage without a replica.", "--grace")] = "15s"
    max_batch_size: Annotated[int, value("N", "Maximum requests per batch.")] = 8
    window: Annotated[int, value("N", "Maximum batches in flight per worker.")] = 2
    queue_limit: Annotated[int, value("N", "Maximum number of waiting requests.")] = 256
    requests: Annotated[int, value("N", "Approximate number of simulated requests per table row.")] = 20_000
    seed: Annotated[int, value("N", "Random seed. The same seed gives the same table.")] = 1

    def plan(self, replicas: int, load: float) -> "Plan":
        """Return the plan of one table row. Raises ValueError if a value is out of range."""
        from multiworld_serving.testing.planning.forecast import Plan

        numbers = asdict(self) | {"detection_s": min(self.detection_s, self.recovery_s)}
        return Plan(**numbers, replicas=replicas, load=load)


def simulate(
    *,
    replicas: Replicas = "1,2,3",
    load: Loads = "0.5,0.8",
    options: PlanOptions,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> int:
    """Estimate availability, latency and failed requests for given numbers of replicas and loads.

    Runs the real scheduler; clients, workers, failures and time are simulated. No process is started.
    """
    from multiworld_serving.cli.console import progress
    from multiworld_serving.testing.planning.forecast import compute_forecast
    from multiworld_serving.testing.plots import check_plot, draw_forecasts

    check_plot(plot)
    try:
        plans = [options.plan(number, share) for number in replicas for share in load]
        forecasts = []
        with progress("rows", len(plans), results_at_end=True) as advance:
            for plan in plans:
                forecasts.append(compute_forecast(plan))
                advance()
    except ValueError as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps([_facts(forecast) for forecast in forecasts], indent=2))
    else:
        _show(forecasts)
    if plot is not None:
        draw_forecasts(forecasts, plot)
    return 0


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
    from multiworld_serving.cli.console import table

    numbers = ("replicas", "load", "requests/s", "stages up", "(exact)", "p50", "p99", "failed")
    rows = table(*numbers, "refused as", numbers=numbers)
    for forecast in forecasts:
        plan = forecast.plan
        rows.add_row(
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
    return rows


def _percent(share: float, *, inverted: bool = False) -> str:
    """Format a fraction with enough digits to show a small value or, if inverted, its small distance from 100 %."""
    if inverted:
        digits = 3 if share <= 0 else max(1, min(9, 1 - int(f"{100 * share:e}".partition("e")[2])))
        return f"{100 * (1 - share):.{digits}f} %"
    return "0 %" if share <= 0 else f"{100 * share:.2g} %"


def _milliseconds(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s * 1e3:.1f} ms"
