"""Requests while random leaders are killed and stopped: how many fail, and how long a client waits at most.

    python -m benchmarks.leader_failures --kills 50 --freezes 20

Starts a service of two leaders, sends requests with HTTP keep-alive in a closed loop, and compares all answers. A killed leader ends by
SIGKILL; a frozen one by SIGSTOP, until the supervisor kills it. The next fault comes when both leaders are ready again.
"""

import argparse
import os
import random
import signal
import time

from multiworld_serving.testing.load.clients import Load, run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import LocalService

_READY_S = 60.0
_PAUSE_S = 0.5
_IMAGES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--freezes", type=int, default=20)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--leaders", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    with LocalService(
        model="resnet18", weights="random:0", image_size=32, stages=1, replicas=2, leaders=options.leaders
    ) as service:
        requests = served_requests(service.url, photos(_IMAGES))
        with run_load(service.url, requests, clients=options.clients) as load:
            time.sleep(5.0)
        print(f"no fault: {_summary(load)}")
        for name, signum, count in (
            ("SIGKILL", signal.SIGKILL, options.kills),
            ("SIGSTOP", signal.SIGSTOP, options.freezes),
        ):
            if not count:
                continue
            with run_load(service.url, requests, clients=options.clients) as load:
                for _ in range(count):
                    leader = generator.choice(_ready_leaders(service, options.leaders))
                    os.kill(leader["pid"], signum)
                    _wait_until_replaced(service, leader["pid"])
                    time.sleep(_PAUSE_S)
            print(f"{count} x {name}: {_summary(load)}")


def _ready_leaders(service: LocalService, count: int) -> list[dict]:  # type: ignore[type-arg]
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        leaders = service.status()["leaders"]
        if sum(leader["state"] == "ready" for leader in leaders) == count:
            return list(leaders)
        time.sleep(0.05)
    raise TimeoutError(f"the leaders did not become ready: {leaders}")


def _wait_until_replaced(service: LocalService, pid: int) -> None:
    deadline_s = time.monotonic() + _READY_S
    while any(leader["pid"] == pid for leader in service.status()["leaders"]):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the leader pid={pid} was not replaced")
        time.sleep(0.05)


def _summary(load: Load) -> str:
    wrong = [sample for sample in load.samples if sample.status == 200 and sample.error]
    longest_s = max(sample.took_s for sample in load.samples)
    found = f"{len(load.samples)} requests, {len(load.failed)} failed, {len(wrong)} wrong, longest {longest_s:.3f} s"
    kinds = {f"{sample.status} {sample.error[:160]}" for sample in load.failed}
    return (
        found
        + f", p50 {1e3 * load.quantile_s(0.5):.0f} ms, p99 {1e3 * load.quantile_s(0.99):.0f} ms"
        + "".join(f"\n    {kind}" for kind in sorted(kinds)[:5])
    )


if __name__ == "__main__":
    main()
