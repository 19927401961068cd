"""Draws the result of a chaos campaign.

    multiworld chaos --duration 8h --seed 7 --json soak.json
    python docs/plot_soak.py soak.json soak.svg

Needs matplotlib, which the extra `bench` installs.
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of `multiworld chaos`")
    parser.add_argument("picture", type=Path, help="file to write, such as soak.svg")
    options = parser.parse_args()
    found = json.loads(options.result.read_text(encoding="utf-8"))
    rows = sorted(found["faults"], key=lambda row: (row["times"], row["fault"]))
    names = [f"{row['fault']} ({row['times']})" for row in rows]

    mpl.rcParams |= {"svg.hashsalt": "soak", "svg.fonttype": "none"}  # the same result gives the same file
    figure, (latency, memory) = plt.subplots(1, 2, figsize=(11, 1.5 + 0.2 * len(rows)), layout="constrained")
    figure.suptitle(
        f"{len(found['injections']):,} faults in {found['duration_s'] / 3600:.1f} h, {found['requests']:,} requests: "
        f"{found['failed']} failed, {found['wrong']} wrong, {found['duplicates']} answered twice, {found['excused']} excused"
    )
    p99_s = [0.0 if row["latency"] is None else row["latency"]["p99"] for row in rows]
    latency.barh(names, p99_s, color="#4878a8")
    if (without := found["latency_without_faults"]) is not None:
        latency.axvline(without["p99"], color="#c44e52", label=f"without faults: {without['p99'] * 1e3:.0f} ms")
        latency.legend(loc="lower right")
    latency.set(title="p99 of requests during a fault (times)", xlabel="seconds", xscale="log")

    hours = [(each["ended_s"] - found["started_unix_s"]) / 3600 for each in found["injections"]]
    memory.plot(hours, [each["resident_mib"] for each in found["injections"]], color="#4878a8", linewidth=0.8)
    memory.set(title="all processes after each fault", xlabel="hours", ylabel="resident memory, MiB")
    memory.yaxis.label.set_color("#4878a8")
    memory.set_ylim(0, 1.1 * memory.get_ylim()[1])
    descriptors = memory.twinx()
    descriptors.plot(hours, [each["descriptors"] for each in found["injections"]], color="#c44e52", linewidth=0.8)
    descriptors.set_ylabel("file descriptors", color="#c44e52")
    descriptors.set_ylim(0, 1.3 * descriptors.get_ylim()[1])
    figure.savefig(options.picture, metadata={"Date": None} if options.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
