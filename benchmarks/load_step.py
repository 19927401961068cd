"""A step from 1 to 10 times the load and back, on a real service with `--autoscale`.

    python -m benchmarks.load_step --rate 3 --target-latency-ms 200

Requests arrive at random times, independent of the answers. Prints when workers were started and stopped, how long the start of a worker
took, when the last answer was later than the objective, and how many requests failed.
"""

import argparse
import time

from multiworld_serving.testing.load.clients import Load, ReferenceRequest, run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.statistics import quantile
from multiworld_serving.testing.local_service import LocalService

BEFORE_S, HIGH_S, AFTER_S = 15.0, 30.0, 30.0


def phase(service: LocalService, rate_hz: float, duration_s: float) -> tuple[float, Load]:
    """Send requests at this rate. Returns when the phase began, and the load."""
    began_s = time.time()
    with run_load(service.url, [ReferenceRequest(photo())], rate_hz=rate_hz) as load:
        time.sleep(duration_s)
    return began_s, load


def show(service: LocalService, name: str, began_s: float, load: Load, target_s: float) -> None:
    """Print what happened in a phase."""
    took_s = [sample.took_s for sample in load.samples]
    late = [sample for sample in load.samples if sample.took_s > target_s]
    refused = sum(sample.refused for sample in load.samples)
    print(
        f"{name}: {len(took_s)} requests, failed {len(load.failed)}, refused {refused}, unsent {load.unsent}, "
        f"p50 {quantile(took_s, 0.5) * 1e3:.0f} ms, p99 {quantile(took_s, 0.99) * 1e3:.0f} ms, "
        f"late {len(late) / len(took_s):.1%}, the last late one was sent {max((each.sent_s - began_s for each in late), default=0):.1f} s "
        "after the beginning",
    )
    for line in service.lines:
        if 0 <= line.at_s - began_s < HIGH_S and ("autoscaling" in line.message or "->ready" in line.message):
            print(f"  {line.at_s - began_s:6.2f} s  {line.message}")


def main() -> None:
    """Run the service and the three phases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second before and after")
    parser.add_argument("--target-latency-ms", type=float, default=200.0)
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--autoscale", default="1..2")
    options = parser.parse_args()
    with LocalService(
        model="resnet18",
        weights="random:0",
        image_size=options.image_size,
        stages=1,
        replicas=1,
        worker_threads=1,
        autoscale=options.autoscale,
        autoscale_down_after_s=10,
        target_latency_ms=options.target_latency_ms,
    ) as service:
        phases = [
            (name, *phase(service, rate_hz, duration_s))
            for name, rate_hz, duration_s in (
                ("before", options.rate, BEFORE_S),
                ("high", 10 * options.rate, HIGH_S),
                ("after", options.rate, AFTER_S),
            )
        ]
        for number, (name, began_s, load) in enumerate(phases):
            show(service, name, began_s, load, options.target_latency_ms / 1e3)
            if number == 1:
                print(f"  replicas wanted now: {service.metric('multiworld_replicas_wanted'):.2f}")


if __name__ == "__main__":
    main()
