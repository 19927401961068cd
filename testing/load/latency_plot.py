"""Plot of a load: latency over time, and its distribution. Needs matplotlib (extra `bench`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiworld_serving.testing.load.clients import Sample


def draw_latency(samples: Sequence[Sample], since_s: float, until_s: float, title: str, path: Path) -> None:
    """Write the plot. Times are relative to `since_s`; earlier requests are warm-up."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.0), layout="constrained")
    figure.suptitle(title)
    over_time, spread = figure.subplots(1, 2, width_ratios=(2, 1))
    _dots(over_time, [s for s in samples if not s.failed and not s.refused], since_s, "answered", "tab:blue", ".")
    _dots(over_time, [s for s in samples if s.refused], since_s, "refused", "tab:orange", ".")
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
    figure.savefig(path, dpi=110)


def _dots(axes: Any, samples: Sequence[Sample], since_s: float, label: str, color: str, marker: str) -> None:
    if samples:
        at = [sample.done_s - since_s for sample in samples]
        took = [max(sample.took_s, 1e-4) * 1e3 for sample in samples]
        axes.plot(at, took, marker, color=color, markersize=3, label=f"{len(samples)} {label}")
