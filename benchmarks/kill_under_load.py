"""Kill or freeze one worker of each stage in turn, again and again, under a closed loop of clients; nothing may be lost.

    python -m benchmarks.kill_under_load                      10 x kill -9 of a worker of each stage
    python -m benchmarks.kill_under_load --signal STOP        freeze instead
    python -m benchmarks.kill_under_load --rounds 100 --stages 2

Prints a row for every fault and the medians; exits 1 when a request failed or was answered twice.
"""

import argparse
import asyncio
import io
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
from PIL import Image

from benchmarks.load import Load, closed_loop
from deploy.service import LocalService, LogLine

_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and what followed, in seconds since it was made."""

    stage: int
    slot: int
    at_s: float
    cause: str
    detected_s: float
    rerouted_s: float
    """Until the last batch that it stranded was sent elsewhere; 0 when none was in flight."""
    reroutes: int
    recovered_s: float


def photo(width: int = 500, height: int = 375, seed: int = 0) -> bytes:
    """A JPEG with some structure."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 25, width // 25, 3), dtype=np.uint8)
    picture, file = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC), io.BytesIO()
    picture.save(file, "JPEG", quality=90)
    return file.getvalue()


def make_fault(service: LocalService, stage: int, slot: int, signum: signal.Signals) -> Fault:
    """Signal the worker in that place, and wait until another serves there."""
    worker = service.worker_at(stage, slot)
    assert worker is not None, f"stage {stage} replica {slot} is not ready"
    pid, seen = service.worker_pids()[worker], len(service.lines)
    world = f"s{stage}.r{slot}"
    at_s = time.time()
    os.kill(pid, signum)
    broken = service.wait_for(lambda line: line["world"] == world and "->broken" in line.message, _WAIT_S, after=seen)
    if signum == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)  # whoever runs the workers ends one that hangs; the supervisor starts another
    ready_s = service.wait_for(lambda line: _became_ready(line, stage), _WAIT_S, after=seen).at_s
    service.wait_until_complete(_WAIT_S)
    rerouted = [
        line.at_s for line in service.lines[seen:] if "rerouted" in line.message and line["stage"] == str(stage)
    ]
    return Fault(
        stage=stage,
        slot=slot,
        at_s=at_s,
        cause=str(broken["cause"]),
        detected_s=broken.at_s - at_s,
        rerouted_s=max(rerouted, default=at_s) - at_s,
        reroutes=len(rerouted),
        recovered_s=ready_s - at_s,
    )


def _became_ready(line: LogLine, stage: int) -> bool:
    return "checking->ready" in line.message and line["stage"] == str(stage)


def run(
    service: LocalService, *, rounds: int, clients: int, signum: signal.Signals, settle_s: float
) -> tuple[list[Fault], Load]:
    """Faults in every stage in turn, and in every replica in turn, while the clients go on.

    Args:
        settle_s: pause after each fault has healed. Within some seconds the supervisor has no process in reserve again.
    """
    over = threading.Event()
    loads: list[Load] = []
    client = threading.Thread(
        target=lambda: loads.append(asyncio.run(closed_loop(service.url, photo(), clients=clients, until=over.is_set)))
    )
    client.start()
    faults = []
    try:
        time.sleep(settle_s)
        for number in range(rounds):
            for stage, found in enumerate(service.status()["stages"]):
                faults.append(make_fault(service, stage, number % len(found["replicas"]), signum))
                time.sleep(settle_s)
    finally:
        over.set()
        client.join()
    return faults, loads[0]


def report(faults: list[Fault], load: Load, doubles: float, ends: list[LogLine]) -> None:
    print(f"{'stage':>5} {'slot':>4} {'cause':>9} {'detect ms':>10} {'reroute ms':>10} {'batches':>7} {'back s':>7}")
    for fault in faults:
        print(
            f"{fault.stage:>5} {fault.slot:>4} {fault.cause:>9} {fault.detected_s * 1e3:>10.1f} "
            f"{fault.rerouted_s * 1e3:>10.1f} {fault.reroutes:>7} {fault.recovered_s:>7.2f}"
        )
    print(
        f"\n{len(faults)} faults, {len(load.samples)} requests, {len(load.failed)} failed, {doubles:.0f} answered twice"
    )
    for name in ("detected_s", "rerouted_s", "recovered_s"):
        values = sorted(getattr(fault, name) for fault in faults)
        print(f"{name[:-2]:>10}: median {statistics.median(values) * 1e3:8.1f} ms, max {values[-1] * 1e3:8.1f} ms")
    print(
        f"   latency: median {load.quantile_s(0.5) * 1e3:8.1f} ms, p99 {load.quantile_s(0.99) * 1e3:8.1f} ms, "
        f"max {load.quantile_s(1.0) * 1e3:8.1f} ms"
    )
    causes = Counter(str(line["cause"]) for line in ends)
    print(f"links that broke: {len(ends)}, of which made here {len(faults)}: {dict(causes)}")
    for sample in load.failed[:5]:
        print("failed:", sample)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--settle-s", type=float, default=1.0)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    options = parser.parse_args()
    with LocalService(
        model=options.model, weights="random:0", stages=options.stages, replicas=options.replicas
    ) as service:
        signum = signal.Signals[f"SIG{options.signal}"]
        faults, load = run(
            service, rounds=options.rounds, clients=options.clients, signum=signum, settle_s=options.settle_s
        )
        doubles = service.metric("multiworld_duplicate_answers_total")
        ends = [line for line in service.lines if line["logger"] == "server.link" and "->broken" in line.message]
    report(faults, load, doubles, ends)
    return 1 if load.failed or doubles else 0


if __name__ == "__main__":
    sys.exit(main())
