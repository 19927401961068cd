"""Images per second and CPU time per image by number of stages and replicas, with one thread per worker.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --stages 1 2 --replicas 1 2 --rounds 2

Requests are tensors over HTTP in a closed loop. In turn with each service, the bare loop of the whole model runs with one thread per
process in min(workers, cores) processes; `of bare` is the median of the ratios per turn. Clients and leader run on the same cores, so
their cost lowers the ratio. With more workers than cores no speedup is possible; these rows show the cost of stage boundaries.
"""

import argparse
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from benchmarks.bare_loop import BareLoop, bare_loop
from benchmarks.ranks import table
from benchmarks.servers import ours, stop_on_sigterm
from benchmarks.throughput import TENSORS, Case, ask, cases, machine


def together(loops: list[BareLoop], seconds: float) -> float:
    """Images per second of all loops, run at the same time."""
    with ThreadPoolExecutor(len(loops)) as threads:
        return float(sum(threads.map(lambda loop: loop.images_per_s(seconds), loops)))


def turn(case: Case, clients: int, seconds: float) -> tuple[float, float]:
    """Images per second, and CPU milliseconds of the service per image."""
    used_s = case.running.cpu_s()
    outcome = ask(case, clients, seconds)
    assert not outcome.failed, outcome.statuses
    return outcome.goodput, 1e3 * (case.running.cpu_s() - used_s) / outcome.statuses[200]


def measure(stages: int, replicas: int, loops: list[BareLoop], options: argparse.Namespace) -> list[str]:
    """The table row of one service."""
    used = loops[: stages * replicas]
    rates, cpus, shares = [], [], []
    settings = {"model": options.model, "weights": "random:0", "worker_threads": 1}
    with ours(b"", stages=stages, replicas=replicas, **settings) as running:
        case = next(case for case in cases("this", running, options.model, with_tensors=True) if TENSORS in case.name)
        ask(case, options.clients, 1.0)
        for _ in range(options.rounds):
            bare = together(used, options.seconds)
            rate, cpu_ms = turn(case, options.clients, options.seconds)
            rates.append(rate)
            cpus.append(cpu_ms)
            shares.append(rate / bare)
    figures = (f"{statistics.median(rates):.1f}", f"{statistics.median(cpus):.0f}", f"{statistics.median(shares):.2f}")
    print(f"{stages} stages, {replicas} replicas: {figures}", flush=True)
    return [str(stages), str(replicas), str(stages * replicas), *figures]


def main() -> int:
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        arguments = ("--model", options.model, "--threads", "1")
        loops = [stack.enter_context(bare_loop(*arguments)) for _ in range(cores)]
        rows = [measure(s, r, loops, options) for s in options.stages for r in options.replicas]
    columns = ["stages", "replicas", "workers", "images/s", "CPU ms", "of bare"]
    table(f"{options.model}, {options.clients} clients, one thread a worker: {machine()}", columns, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
