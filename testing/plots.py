"""The plot of a load. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiworld_serving.common.config import UserError

if TYPE_CHECKING:
    from multiworld_serving.testing.load.clients import Sample

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Check the option --plot before a long run. Raises UserError if the plot cannot be written."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"--plot {path} needs matplotlib: pip install 'multiworld-serving[bench]'")
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(f"--plot {path}: the name must end in {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: the directory {path.parent} does not exist")


def draw_latency(samples: Sequence[Sample], since_s: float, until_s: float, title: str, path: Path) -> None:
    """Plot latency over time, and its distribution. Times are relative to `since_s`; earlier requests are warm-up."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.0), layout="constrained")
    figure.suptitle(title)
    over_time, spread = figure.subplots(1, 2, width_ratios=(2, 1))
    _dots(over_time, [s for s in samples if not s.failed and not s.refused], since_s, "answered", "tab:blue")
    _dots(over_time, [s for s in samples if s.refused], since_s, "refused", "tab:orange")
    _dots(over_time, [s for s in samples if s.failed], since_s, "failed", "tab:red", "x")
    over_time.axvspan(
        min((s.sent_s for s in samples), default=since_s) - since_s, 0, color="tab:gray", alpha=0.2, label="warm-up"
    )
    over_time.set(xlabel="seconds", ylabel="latency, ms", yscale="log")
    over_time.legend(loc="upper right", fontsize=8)
    times = sorted(s.took_s for s in samples if since_s <= s.sent_s <= until_s and not s.failed and not s.refused)
    shares = [100 * (number + 1) / len(times) for number in range(len(times))]
    spread.plot([1e3 * time for time in times], shares, color="tab:blue")
    spread.set(xlabel="latency, ms", ylabel="% of answers within it", xscale="log", ylim=(0, 100.5))
    for axes in (over_time, spread):
        axes.grid(visible=True, alpha=0.3)
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"--plot {path}: {error.strerror}") from error


def _dots(axes: Any, samples: Sequence[Sample], since_s: float, label: str, color: str, marker: str = ".") -> None:
    at_s = [sample.done_s - since_s for sample in samples]
    took_ms = [max(sample.took_s, 1e-4) * 1e3 for sample in samples]
    size = 3 if marker == "." else 6
    axes.plot(at_s, took_ms, marker, color=color, markersize=size, label=f"{len(samples)} {label}")
