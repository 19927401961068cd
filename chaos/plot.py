"""A picture of latency over time with the faults marked. Needs matplotlib, which the extra `bench` brings."""

from pathlib import Path
from typing import Any

from chaos.campaign import Findings
from config import UserError


def check_plot(path: Path) -> None:
    """Raises UserError when no picture can be drawn, or not of that name: to be asked before a long run, not after it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "--plot needs matplotlib: install the extra `bench` (pip install 'multiworld-serving[bench]')"
        ) from error
    known = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise UserError(f"--plot {path}: the name must end in one of {', '.join(f'.{name}' for name in sorted(known))}")


def draw(found: Findings, path: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    seconds = found.ended_s - found.started_s
    figure = Figure(figsize=(min(60.0, max(12.0, seconds / 12)), 6.0), layout="constrained")
    axes = figure.add_subplot()
    _dots(axes, found, failed=False)
    _dots(axes, found, failed=True)
    for injection in found.injections:
        at_s = injection.at_s - found.started_s
        axes.axvline(at_s, color="tab:orange", linewidth=0.8)
        axes.axvspan(at_s, injection.ended_s - found.started_s, color="tab:orange", alpha=0.12, linewidth=0)
        name = f"{injection.fault} {' '.join(injection.victims)}"
        axes.text(at_s, 1.01, name, rotation=60, fontsize=7, transform=axes.get_xaxis_transform())
    axes.set(xlabel="seconds", ylabel="latency, ms", yscale="log", xlim=(0, seconds))
    axes.legend(loc="upper right", fontsize=8)
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)


def _dots(axes: Any, found: Findings, *, failed: bool) -> None:
    chosen = [sample for sample in found.load.samples if sample.failed == failed]
    axes.plot(
        [sample.done_s - found.started_s for sample in chosen],
        [max(sample.took_s, 1e-4) * 1e3 for sample in chosen],
        *("x" if failed else ".",),
        color="tab:red" if failed else "tab:blue",
        markersize=7 if failed else 2,
        label=f"{len(chosen)} {'failed' if failed else 'answered'}",
    )
