"""Memory of each worker with one leader and with two.

    python -m benchmarks.worker_memory --rounds 3

Starts the default layout (two stages with two replicas each), sends requests to all leaders, and reads the workers' memory: PSS, which
divides pages shared between processes among them, and private memory. Repeats this with two leaders, and compares the medians.
"""

import argparse
import statistics
import time

from benchmarks.service_memory import memory_mb
from multiworld_serving.testing.load.clients import record_reference_answers, run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService

_REQUESTS_S = 6.0
_CLIENTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--optimize", default="auto")
    options = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(options.rounds):
        for leaders, workers in found.items():
            workers.extend(_measure(leaders, options))
    for name in found[1][0]:
        one, two = ([worker[name] for worker in workers] for workers in found.values())
        print(
            f"{name}: {_summary(one)} with one leader, {_summary(two)} with two, "
            f"{statistics.median(two) / statistics.median(one) - 1:+.1%}"
        )


def _summary(megabytes: list[float]) -> str:
    return f"{statistics.median(megabytes):.0f} MB ({min(megabytes):.0f} to {max(megabytes):.0f})"


def _measure(leaders: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """The memory of each worker in MB."""
    with LocalService(
        model=options.model, weights="random:0", stages=2, replicas=2, leaders=leaders, optimize=options.optimize
    ) as service:
        requests = record_reference_answers(service.url, [(photo(0), "image/jpeg")])
        with run_load(service.url, requests, clients=_CLIENTS):
            time.sleep(_REQUESTS_S)
        return [memory_mb(pid) for pid in service.worker_pids().values()]


if __name__ == "__main__":
    main()
