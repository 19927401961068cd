"""Plot of forecasts: latency and losses over load, one line per number of replicas. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from multiworld_serving.testing.planning.forecast import Forecast


def draw(forecasts: Sequence[Forecast], file: Path) -> None:
    """Write the plot; the suffix of the file gives the format (png, svg, pdf).

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib cannot write this kind of file.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    latency, losses = figure.subplots(1, 2)
    _lines(latency, forecasts, lambda each: each.p99_s and each.p99_s * 1e3, style="o-", label="p99, {} replicas")
    _lines(latency, forecasts, lambda each: each.p50_s and each.p50_s * 1e3, style="o--", label="p50, {} replicas")
    _lines(losses, forecasts, lambda each: 100 * each.failed, style="o-", label="{} replicas")
    latency.set(xlabel="load, share of capacity", ylabel="latency, ms", yscale="log")
    losses.set(xlabel="load, share of capacity", ylabel="requests that fail, %")
    losses.set_yscale("symlog", linthresh=1e-4)
    losses.set_ylim(bottom=0)
    for axes in (latency, losses):
        axes.grid(visible=True, alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    plan = forecasts[0].plan
    figure.suptitle(
        f"{plan.stages} stages, worker MTBF {plan.mtbf_s:g} s, recovery {plan.recovery_s:g} s",
        fontsize=10,
    )
    figure.savefig(file)


def _lines(
    axes: Any, forecasts: Sequence[Forecast], value: Callable[[Forecast], float | None], *, style: str, label: str
) -> None:
    for color, replicas in enumerate(sorted({each.plan.replicas for each in forecasts})):
        points = [(each.plan.load, value(each)) for each in forecasts if each.plan.replicas == replicas]
        known = sorted((load, height) for load, height in points if height is not None)
        if known:
            axes.plot(*zip(*known, strict=True), style, color=f"C{color}", label=label.format(replicas))
