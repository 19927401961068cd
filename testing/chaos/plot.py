"""Plot of latency over time with the faults marked. Needs matplotlib (extra `bench`)."""

from pathlib import Path
from typing import Any

from multiworld_serving.common.config import UserError
from multiworld_serving.testing.chaos.campaign import CampaignResult


def check_plot(path: Path) -> None:
    """Raise UserError if the plot cannot be written. Call before a long run."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "--plot needs matplotlib: install the extra `bench` (pip install 'multiworld-serving[bench]')"
        ) from error
    known = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise UserError(
            f"--plot {path}: the file name must end in one of {', '.join(f'.{name}' for name in sorted(known))}"
        )


def draw(result: CampaignResult, path: Path) -> None:
    """Write the plot."""
    from matplotlib.figure import Figure

    seconds = result.ended_s - result.started_s
    figure = Figure(figsize=(min(60.0, max(12.0, seconds / 12)), 6.0), layout="constrained")
    axes = figure.add_subplot()
    _dots(axes, result, failed=False)
    _dots(axes, result, failed=True)
    for injection in result.injections:
        at_s = injection.at_s - result.started_s
        axes.axvline(at_s, color="tab:orange", linewidth=0.8)
        axes.axvspan(at_s, injection.ended_s - result.started_s, color="tab:orange", alpha=0.12, linewidth=0)
        name = f"{injection.fault} {' '.join(injection.targets)}"
        axes.text(at_s, 1.01, name, rotation=60, fontsize=7, transform=axes.get_xaxis_transform())
    axes.set(xlabel="seconds", ylabel="latency, ms", yscale="log", xlim=(0, seconds))
    axes.legend(loc="upper right", fontsize=8)
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)


def _dots(axes: Any, result: CampaignResult, *, failed: bool) -> None:
    chosen = [sample for sample in result.load.samples if sample.failed == failed]
    axes.plot(
        [sample.done_s - result.started_s for sample in chosen],
        [max(sample.took_s, 1e-4) * 1e3 for sample in chosen],
        *("x" if failed else ".",),
        color="tab:red" if failed else "tab:blue",
        markersize=7 if failed else 2,
        label=f"{len(chosen)} {'failed' if failed else 'answered'}",
    )
