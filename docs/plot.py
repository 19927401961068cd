"""Draws the result of a chaos campaign, or the requests around the first kill of each server.

    multiworld chaos --duration 8h --seed 7 --json soak.json
    python docs/plot.py soak.json soak.svg

    python -m benchmarks.kill_peers --python .venv-peers/bin/python --json kills.json
    python docs/plot.py kills.json docs/img/kills.svg

Needs matplotlib, which the extra `bench` installs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

BEFORE_S, AFTER_S = 5.0, 15.0
"""The time around a kill."""
BLUE, RED = "#4878a8", "#c44e52"


def kills(found: dict[str, Any]) -> Figure:
    """How long each request took, and which failed or hung."""
    figure, rows = plt.subplots(
        len(found), 1, figsize=(8, 1.6 * len(found)), sharex=True, sharey=True, layout="constrained"
    )
    for axes, (name, server) in zip(rows, found.items(), strict=True):
        killed_s = server["kills"][0]
        near = [
            (sent_s - killed_s, took_s, failed)
            for sent_s, took_s, failed in server["samples"]
            if -BEFORE_S < sent_s - killed_s < AFTER_S
        ]
        lost = [(sent_s, took_s) for sent_s, took_s, failed in near if failed]
        served = [(sent_s, took_s) for sent_s, took_s, failed in near if not failed]
        axes.scatter(*zip(*served, strict=True), s=4, color=BLUE, linewidths=0)
        if lost:
            axes.scatter(*zip(*lost, strict=True), s=50, color=RED, marker="x", label="failed or no answer")
            axes.legend(loc="upper right")
        axes.axvline(0.0, color="#888888", linewidth=1)
        axes.set_title(f"{name}: {len(lost)} of {len(near)} lost", loc="left", fontsize=10)
        axes.set(yscale="log", ylabel="seconds", ylim=(0.01, 60))
    rows[-1].set_xlabel("sent, seconds after kill -9 of a worker")
    return figure


def soak(found: dict[str, Any]) -> Figure:
    """The latency during each fault, and the memory and descriptors over time."""
    rows = sorted(found["faults"], key=lambda row: (row["times"], row["fault"]))
    names = [f"{row['fault']} ({row['times']})" for row in rows]
    figure, (latency, memory) = plt.subplots(1, 2, figsize=(11, 1.5 + 0.2 * len(rows)), layout="constrained")
    figure.suptitle(
        f"{len(found['injections']):,} faults in {found['duration_s'] / 3600:.1f} h, {found['requests']:,} requests: "
        f"{found['failed']} failed, {found['wrong']} wrong, {found['duplicates']} answered twice, {found['excused']} excused"
    )
    p99_s = [0.0 if row["latency"] is None else row["latency"]["p99"] for row in rows]
    latency.barh(names, p99_s, color=BLUE)
    if (without := found["latency_without_faults"]) is not None:
        latency.axvline(without["p99"], color=RED, label=f"without faults: {without['p99'] * 1e3:.0f} ms")
        latency.legend(loc="lower right")
    latency.set(title="p99 of requests during a fault (times)", xlabel="seconds", xscale="log")

    hours = [(each["ended_s"] - found["started_unix_s"]) / 3600 for each in found["injections"]]
    memory.plot(hours, [each["resident_mib"] for each in found["injections"]], color=BLUE, linewidth=0.8)
    memory.set(title="all processes after each fault", xlabel="hours", ylabel="resident memory, MiB")
    memory.yaxis.label.set_color(BLUE)
    memory.set_ylim(0, 1.1 * memory.get_ylim()[1])
    descriptors = memory.twinx()
    descriptors.plot(hours, [each["descriptors"] for each in found["injections"]], color=RED, linewidth=0.8)
    descriptors.set_ylabel("file descriptors", color=RED)
    descriptors.set_ylim(0, 1.3 * descriptors.get_ylim()[1])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of `multiworld chaos` or of benchmarks.kill_peers")
    parser.add_argument("picture", type=Path, help="file to write, such as soak.svg")
    options = parser.parse_args()
    found = json.loads(options.result.read_text(encoding="utf-8"))
    mpl.rcParams |= {
        "svg.hashsalt": options.picture.stem,
        "svg.fonttype": "none",
    }  # the same result gives the same file
    figure = soak(found) if "injections" in found else kills(found)
    figure.savefig(options.picture, metadata={"Date": None} if options.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
