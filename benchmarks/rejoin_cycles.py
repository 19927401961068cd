"""Kill workers and let them come back, many times over: does anything of the leader grow?

    python -m benchmarks.rejoin_cycles --cycles 200

A cycle is one `kill -9` and the return of the slot to service. One worker of every stage is killed at a time; with `--all`, every worker.
Prints the leader's threads,
descriptors and resident memory along the way; exits 1 when threads or descriptors at the end are more than at the start.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kill_under_load import photo
from benchmarks.load import closed_loop
from deploy.service import LocalService

_WAIT_S = 180.0


def resources(pid: int) -> tuple[int, int, float]:
    """Threads, open descriptors, resident MiB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(status["VmRSS"].split()[0]) / 1024


def kill_in_each_stage(service: LocalService, slots: Sequence[int]) -> int:
    """Kill the workers in these slots of every stage at once. Gives how many that were, once all are back."""
    seen, pids, stages = len(service.lines), service.worker_pids(), service.status()["stages"]
    places = [(stage, slot) for stage in stages for slot in slots]
    for stage, slot in places:
        os.kill(pids[stage["replicas"][slot]["worker"]], signal.SIGKILL)
    for stage, slot in places:
        world = f"s{stage['index']}.r{slot}"
        service.wait_for(lambda x, w=world: x["world"] == w and "->broken" in x.message, _WAIT_S, after=seen)  # type: ignore[misc]
    service.wait_until_complete(_WAIT_S)
    return len(places)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="kill both replicas of every stage at once, without clients")
    options = parser.parse_args()
    over = threading.Event()
    with LocalService(model="resnet18", weights="random:0", stages=2, replicas=2, image_size=64) as service:
        loads = []
        client = threading.Thread(
            target=lambda: loads.append(
                asyncio.run(
                    closed_loop(service.url, photo(), clients=0 if options.all else options.clients, until=over.is_set)
                )
            )
        )
        client.start()
        started_s, done, first = time.monotonic(), 0, None
        print(f"{'cycles':>6} {'threads':>7} {'fds':>5} {'RSS MiB':>8} {'s':>6}")
        try:
            while done < options.cycles:
                done += kill_in_each_stage(service, (0, 1) if options.all else (done // 2 % 2,))
                now = resources(service.pid)
                first = first or now
                if done % 20 < 2 or done >= options.cycles:
                    print(
                        f"{done:>6} {now[0]:>7} {now[1]:>5} {now[2]:>8.1f} {time.monotonic() - started_s:>6.0f}",
                        flush=True,
                    )
        finally:
            over.set()
            client.join()
        time.sleep(2.0)
        last = resources(service.pid)
    failed = loads[0].failed
    print(f"idle at the end: {last[0]} threads, {last[1]} descriptors, {last[2]:.1f} MiB")
    print(f"{len(loads[0].samples)} requests meanwhile, {len(failed)} failed", *failed[:3])
    assert first is not None
    return 1 if failed or last[0] > first[0] or last[1] > first[1] else 0


if __name__ == "__main__":
    sys.exit(main())
