"""Measures and draws the goodput under overload.

    python docs/plot_goodput.py docs/img/goodput.svg

Takes two minutes. Needs matplotlib, which the extra `bench` installs.
"""

import argparse
import time
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.measurement import Measurement, measure
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import LocalService

SHARES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
WARM_UP_S, MEASURED_S = 3.0, 10.0
BLUE, RED, GRAY = "#4878a8", "#c44e52", "#808080"


def loaded(url: str, rate_hz: float | None) -> Measurement:
    """Measure a load of single images; without a rate that of 16 clients, each of which waits for its response."""
    with run_load(url, [ReferenceRequest(photo())], clients=16, rate_hz=rate_hz) as load:
        time.sleep(WARM_UP_S + MEASURED_S)
        until_s = time.time()
    return measure(load.samples, until_s - MEASURED_S, until_s)


def draw_goodput(picture: Path) -> None:
    """Correct responses and refusals for each rate of requests with a deadline of 2 s."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="file to write, such as goodput.svg")
    mpl.rcParams |= {"svg.hashsalt": "load", "svg.fonttype": "none"}
    draw_goodput(parser.parse_args().picture)


if __name__ == "__main__":
    main()
