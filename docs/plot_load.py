"""Measures and draws the goodput under overload, and the replicas while the load rises and falls.

    python docs/plot_load.py docs/img/goodput.svg
    python docs/plot_load.py docs/img/autoscaling.svg

Each takes two to three minutes. Needs matplotlib, which the extra `bench` installs.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from multiworld_serving.testing.chaos.observer import Observer
from multiworld_serving.testing.load.clients import Sample, run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.measurement import measure
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import LocalService

SHARES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
WARM_UP_S, MEASURED_S = 3.0, 10.0
STEPS = ((20.0, 0.3), (40.0, 1.2), (100.0, 0.3))
"""Seconds, and requests per second as a share of what one replica answers."""
POLL_S = 0.5
BIN_S = 2
BLUE, RED, GRAY = "#4878a8", "#c44e52", "#808080"


def loaded(url: str, rate_hz: float | None) -> dict[str, Any]:
    """Measure a load of single images; without a rate that of 16 clients, each of which waits for its response."""
    with run_load(url, [ReferenceRequest(photo())], clients=16, rate_hz=rate_hz) as load:
        time.sleep(WARM_UP_S + MEASURED_S)
        until_s = time.time()
    return measure(load, until_s - MEASURED_S, until_s)


def draw_goodput(picture: Path) -> None:
    """Correct responses and refusals for each rate of requests with a deadline of 2 s."""
    with LocalService(model="resnet18", weights="random:0", stages=1, replicas=2, timeout_s=2) as service:
        capacity_hz = loaded(service.url, None)["answered_per_s"]
        found = [loaded(service.url, share * capacity_hz) for share in SHARES]
    sent = [share * capacity_hz for share in SHARES]
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(sent, [each["answered_per_s"] for each in found], "o-", color=BLUE, label="answered in time")
    axes.plot(sent, [each["refused"] / each["seconds"] for each in found], "o-", color=GRAY, label="refused with 429")
    axes.plot(
        sent, [each["failed"] / each["seconds"] for each in found], "o-", color=RED, label="deadline missed, or failed"
    )
    axes.set(xlabel="requests sent per second", ylabel="per second")
    axes.legend()
    figure.savefig(picture, metadata={"Date": None})


def draw_autoscaling(picture: Path) -> None:
    """Requests sent and answered per second, and replicas, while the load is low, higher than one replica serves, and low again."""
    with LocalService(model="resnet18", weights="random:0", stages=1, replicas=1, threads=1) as alone:
        capacity_hz = loaded(alone.url, None)["answered_per_s"]
    samples: list[Sample] = []
    times_s: list[float] = []
    replicas: list[int] = []
    sent_s: list[float] = []
    sent_hz: list[float] = []
    with (
        LocalService(
            model="resnet18", weights="random:0", stages=1, replicas=1, threads=1, autoscale="1..3"
        ) as service,
        Observer(service.url) as observer,
    ):
        started_s = time.time()
        for seconds, share in STEPS:
            until_s = time.time() + seconds
            sent_s += [time.time() - started_s, until_s - started_s]
            sent_hz += [share * capacity_hz] * 2
            with run_load(service.url, [ReferenceRequest(photo())], rate_hz=share * capacity_hz) as load:
                while time.time() < until_s:
                    times_s.append(time.time() - started_s)
                    replicas.append(observer.now.ready)
                    time.sleep(POLL_S)
            samples += load.samples
    done_s = [sample.done_s - started_s for sample in samples if not sample.failed and not sample.refused]
    starts_s = range(0, int(times_s[-1]), BIN_S)
    figure, (rates, sizes) = plt.subplots(2, 1, figsize=(6, 4), sharex=True, height_ratios=(2, 1), layout="constrained")
    rates.plot(sent_s, sent_hz, color=GRAY, label="sent")
    answered_hz = [sum(s <= each < s + BIN_S for each in done_s) / BIN_S for s in starts_s]
    rates.step(starts_s, answered_hz, where="post", color=BLUE, label="answered")
    rates.set(ylabel="requests per second", ylim=(0, None))
    rates.legend()
    sizes.step(times_s, replicas, where="post", color=BLUE)
    sizes.set(xlabel="seconds", ylabel="ready replicas", ylim=(0, 3.5))
    failed = sum(sample.failed or sample.refused for sample in samples)
    figure.suptitle(f"{len(samples):,} requests, {failed} failed or refused", fontsize=10)
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="file to write: goodput.svg or autoscaling.svg")
    picture: Path = parser.parse_args().picture
    mpl.rcParams |= {"svg.hashsalt": "load", "svg.fonttype": "none"}
    (draw_autoscaling if picture.stem == "autoscaling" else draw_goodput)(picture)


if __name__ == "__main__":
    main()
