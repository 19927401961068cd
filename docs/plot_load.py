"""Measures and draws the goodput under overload and a step of the load with `--autoscale`.

    python docs/plot_load.py docs/img

writes goodput.svg and autoscale.svg. Takes four minutes. Needs matplotlib, which the extra `bench` installs.
"""

import argparse
import time
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from multiworld_serving.testing.load.clients import Load, run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.measurement import Measurement, measure
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import LocalService

SHARES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
WARM_UP_S, MEASURED_S = 3.0, 10.0
BEFORE_S, STEP_S = 15.0, 60.0
BLUE, RED, GRAY = "#4878a8", "#c44e52", "#808080"


def loaded(url: str, rate_hz: float | None) -> Measurement:
    """Measure a load of single images; without a rate that of 16 clients, each of which waits for its response."""
    with run_load(url, [ReferenceRequest(photo())], clients=16, rate_hz=rate_hz) as load:
        time.sleep(WARM_UP_S + MEASURED_S)
        until_s = time.time()
    return measure(load.samples, until_s - MEASURED_S, until_s)


def draw_goodput(picture: Path) -> None:
    """Correct responses and refusals for each rate of requests with the default deadline and queue."""
    with LocalService(model="resnet18", weights="random:0", stages=1, replicas=2, timeout_s=2) as service:
        capacity_hz = loaded(service.url, None).answered_per_s
        found = [loaded(service.url, share * capacity_hz) for share in SHARES]
    sent = [share * capacity_hz for share in SHARES]
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(sent, [each.answered_per_s for each in found], "o-", color=BLUE, label="answered in time")
    axes.plot(sent, [each.refused / each.seconds for each in found], "o-", color=GRAY, label="refused with 429")
    axes.plot(sent, [each.failed / each.seconds for each in found], "o-", color=RED, label="deadline missed, or failed")
    axes.set(xlabel="requests sent per second", ylabel="per second")
    axes.legend()
    figure.savefig(picture, metadata={"Date": None})


def draw_autoscale(picture: Path) -> None:
    """Latency of each request and the number of workers, while 1 client becomes 8."""
    workers: list[tuple[float, int]] = []
    samples: list[Load] = []
    with LocalService(model="resnet18", weights="random:0", stages=1, threads=1, autoscale="1..2") as service:
        started_s = time.time()
        for clients, seconds in ((1, BEFORE_S), (8, STEP_S)):
            with run_load(service.url, [ReferenceRequest(photo())], clients=clients) as load:
                until_s = time.time() + seconds
                while time.time() < until_s:
                    replicas = service.status()["stages"][0]["replicas"]
                    workers.append((time.time(), sum(each["state"] == "ready" for each in replicas)))
                    time.sleep(0.25)
            samples.append(load)
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for load in samples:
        axes.scatter(
            [each.sent_s - started_s for each in load.samples],
            [each.took_s for each in load.samples],
            s=4,
            linewidths=0,
            color=BLUE,
        )
    axes.axvline(BEFORE_S, color=GRAY, linewidth=0.8)
    axes.set(xlabel="seconds; after the line, 8 clients instead of 1", ylabel="seconds for a request", ylim=(0, None))
    number = axes.twinx()
    number.step([at_s - started_s for at_s, _ in workers], [count for _, count in workers], color=RED, where="post")
    number.set_ylabel("workers that serve", color=RED)
    number.set(ylim=(0, 3), yticks=range(4))
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the pictures")
    folder = parser.parse_args().folder
    mpl.rcParams |= {"svg.hashsalt": "load", "svg.fonttype": "none"}
    draw_goodput(folder / "goodput.svg")
    draw_autoscale(folder / "autoscale.svg")


if __name__ == "__main__":
    main()
