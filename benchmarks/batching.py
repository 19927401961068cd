"""Adaptive batching compared to fixed settings: images per second and latency, from one client to a full queue.

    python -m benchmarks.batching
    python -m benchmarks.batching --model resnet18 --clients 1 16 --rounds 2

One service with one stage for each setting; they are measured in turn. Claim: at every number of clients, the default is within 5 % of the
best fixed setting. No fixed setting is the best at every number of clients.
"""

import argparse
import sys
from contextlib import ExitStack

from benchmarks.servers import ours, stop_on_sigterm
from benchmarks.throughput import cases, measure, report
from multiworld_serving.testing.load.images import photo

SETTINGS: dict[str, dict[str, object]] = {
    "adaptive (default)": {},
    "one by one": {"max_batch_size": 1},
    "fixed, 2 ms": {"batching": "fixed", "batch_timeout_s": 0.002},
    "fixed, 20 ms": {"batching": "fixed", "batch_timeout_s": 0.02},
    "fixed, 100 ms": {"batching": "fixed", "batch_timeout_s": 0.1},
}


def main() -> int:
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement, and more with more clients")
    parser.set_defaults(precision="float32")
    options = parser.parse_args()
    jpeg = photo()
    with ExitStack() as stack:
        compared = []
        for name, settings in SETTINGS.items():
            print(f"starting {name}", flush=True)
            service = ours(jpeg, model=options.model, weights="random:0", stages=1, replicas=1, **settings)
            compared += cases(name, stack.enter_context(service), options.model, with_tensors=False)
        figures = measure(compared, None, options)
    report(figures, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
