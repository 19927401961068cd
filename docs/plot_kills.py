"""Draws the requests around the first kill of each server: how long each took, and which failed or hung.

    python -m benchmarks.kill_peers --python .venv-peers/bin/python --json kills.json
    python docs/plot_kills.py kills.json docs/img/kills.svg

Needs matplotlib, which the extra `bench` installs.
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

BEFORE_S, AFTER_S = 5.0, 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of benchmarks.kill_peers")
    parser.add_argument("picture", type=Path, help="file to write, such as kills.svg")
    options = parser.parse_args()
    found = json.loads(options.result.read_text(encoding="utf-8"))

    mpl.rcParams |= {"svg.hashsalt": "kills", "svg.fonttype": "none"}  # the same result gives the same file
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
        axes.scatter(*zip(*served, strict=True), s=4, color="#4878a8", linewidths=0)
        if lost:
            axes.scatter(*zip(*lost, strict=True), s=50, color="#c44e52", marker="x", label="failed or no answer")
            axes.legend(loc="upper right")
        axes.axvline(0.0, color="#888888", linewidth=1)
        axes.set_title(f"{name}: {len(lost)} of {len(near)} lost", loc="left", fontsize=10)
        axes.set(yscale="log", ylabel="seconds", ylim=(0.01, 60))
    rows[-1].set_xlabel("sent, seconds after kill -9 of a worker")
    figure.savefig(options.picture, metadata={"Date": None} if options.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
