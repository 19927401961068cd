"""Requests while random processes are killed and stopped: how many fail, and how long a client waits at most.

    python -m benchmarks.leader_failures --kills 50 --freezes 20 --worker-kills 150 --versions 20

Starts a service, sends requests with HTTP keep-alive in a closed loop, and compares all answers. A killed process ends by SIGKILL. A frozen
leader stops by SIGSTOP, until the supervisor kills it. The next fault comes when everything is ready again. `--versions` loads versions
back and forth, and kills a leader in the middle of each. `--loads` kills a worker every 5 s meanwhile, and `--swaps` kills nothing. The two
versions differ too little to change an answer.

After kills of workers, it prints the latency of the requests that the kills affected, and when as many requests a second are answered again
as before. `--pause 6` gives these times a meaning: the next kill comes later.
"""

import argparse
import math
import os
import random
import signal
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from safetensors.torch import save_file

from multiworld_serving.models.export.torchvision_models import load_model
from multiworld_serving.testing.load.clients import Load, run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.load.measurement import quantile
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import LocalService

_MODEL = "resnet18"
_READY_S = 120.0
_PAUSE_S = 0.5
_KILL_EVERY_S = 5.0
_AFFECTED_S = 2.0
_STEPS_S = [step / 10 for step in range(100)]
_IMAGES = 8


class Faults:
    """What happens to a service that has this many leaders."""

    def __init__(self, service: LocalService, leaders: int, pause_s: float, seed: int) -> None:
        self._service, self._leaders, self._random = service, leaders, random.Random(seed)
        self._pause_s, self._loads = pause_s, 0
        self.kills_s: list[float] = []
        """When workers were killed (`time.time()`)."""

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the service did not become ready: {self._service.status()}")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        status = self._service.status()
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        leaders = [leader["state"] for leader in status["leaders"]]
        settled = leaders == ["ready", *["standby"] * (self._leaders - 1)]
        return settled and all(replica["state"] == "ready" for replica in replicas)

    def end_leader(self, signum: int) -> None:
        """End the leader that serves, and wait until another process has replaced it."""
        self.until(self.is_ready)
        pid = next(leader["pid"] for leader in self._service.status()["leaders"] if leader["state"] == "ready")
        os.kill(pid, signum)
        self.until(lambda: all(leader["pid"] != pid for leader in self._service.status()["leaders"]))
        time.sleep(self._pause_s)

    def kill_worker(self) -> None:
        self.until(self.is_ready)
        self.kills_s.append(time.time())
        os.kill(self._random.choice([*self._service.worker_pids().values()]), signal.SIGKILL)
        time.sleep(self._pause_s)

    def load_version(self) -> None:
        """Load the other version, and check that all leaders serve it."""
        self._loads += 1
        weights = f"{self._loads % 2}.safetensors"
        url = self._service.metrics_url.replace("/metrics", f"/v2/repository/models/{_MODEL}/load")
        while (
            found := httpx.post(url, json={"parameters": {"weights": weights}}, timeout=_READY_S)
        ).status_code != 200:
            print(f"load {self._loads}: {found.status_code} {found.text[:200]}", flush=True)
            time.sleep(_PAUSE_S)
        self.until(
            lambda: {leader["version"] for leader in self._service.status()["leaders"]} == {found.json()["weights"]}
        )

    def load_without_leader(self) -> None:
        """Load a version, and kill a leader in the middle."""
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(self.load_version)
            time.sleep(self._random.uniform(0.0, 1.0))
            self.end_leader(signal.SIGKILL)
            loading.result()

    def load_under_kills(self) -> None:
        """Load a version while a worker is killed every 5 s."""
        done = threading.Event()

        def kill() -> None:
            while not done.is_set():
                with suppress(ProcessLookupError):  # it has not been replaced yet
                    os.kill(self._random.choice([*self._service.worker_pids().values()]), signal.SIGKILL)
                done.wait(_KILL_EVERY_S)

        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(kill)
            try:
                self.load_version()
            finally:
                done.set()
            killing.result()
        self.until(self.is_ready)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("kills", "freezes", "worker-kills", "versions", "loads", "swaps", "seed"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--leaders", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--pause", type=float, default=_PAUSE_S, help="seconds after each kill")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = load_model(_MODEL, "random:0").module.state_dict()
        for number in range(2):
            save_file({**state, "fc.bias": state["fc.bias"] + number * 1e-6}, Path(folder) / f"{number}.safetensors")
        shape: dict[str, Any] = {"image_size": 32, "replicas": 2}
        shape |= {name: getattr(options, name) for name in ("stages", "spares", "leaders")}
        with LocalService(model=_MODEL, weights=f"{folder}/0.safetensors", weights_dir=folder, **shape) as service:
            requests, faults = (
                served_requests(service.url, photos(_IMAGES)),
                Faults(service, options.leaders, options.pause, options.seed),
            )
            campaigns: dict[str, tuple[int, Callable[[], None]]] = {
                "no fault": (1, lambda: time.sleep(5.0)),
                "leader killed": (options.kills, lambda: faults.end_leader(signal.SIGKILL)),
                "leader frozen": (options.freezes, lambda: faults.end_leader(signal.SIGSTOP)),
                "worker killed": (options.worker_kills, faults.kill_worker),
                "version loaded": (options.swaps, faults.load_version),
                "version loaded while workers are killed": (options.loads, faults.load_under_kills),
                "version loaded, leader killed": (options.versions, faults.load_without_leader),
            }
            for name, (count, fault) in campaigns.items():
                if count:
                    with run_load(service.url, requests, clients=options.clients) as load:
                        for _ in range(count):
                            fault()
                    print(f"{count} x {name}: {_summary(load)}", flush=True)
                    if name == "worker killed":
                        print(f"    {_after_kills(load, faults.kills_s)}", flush=True)


def _after_kills(load: Load, kills_s: list[float]) -> str:
    """The latency with and without a kill, and the time until the rate of responses of half a second is at 95 % of the one before."""
    affected: list[float] = []
    others: list[float] = []
    for sample in load.samples:
        near = any(killed_s - sample.took_s <= sample.sent_s <= killed_s + _AFFECTED_S for killed_s in kills_s)
        (affected if near else others).append(sample.took_s)
    ended_s = sorted(sample.done_s for sample in load.samples if not sample.failed)

    def rate(since_s: float, seconds: float) -> float:
        return (bisect_left(ended_s, since_s + seconds) - bisect_left(ended_s, since_s)) / seconds

    back_s = [
        next((after_s for after_s in _STEPS_S if rate(at_s + after_s, 0.5) >= 0.95 * rate(at_s - 2.0, 2.0)), math.inf)
        for at_s in kills_s
    ]
    return (
        f"p99 {1e3 * quantile(others, 0.99):.0f} ms, sent up to {_AFFECTED_S:g} s after a kill or in flight then "
        f"{1e3 * quantile(affected, 0.99):.0f} ms; at 95 % of the rate after {median(back_s):.1f} s (max {max(back_s):.1f} s)"
    )


def _summary(load: Load) -> str:
    wrong = [sample for sample in load.samples if sample.status == 200 and sample.error]
    took_s = [sample.took_s for sample in load.samples]
    silence_s = max(later - earlier for earlier, later in pairwise(sorted(sample.done_s for sample in load.samples)))
    found = (
        f"{len(load.samples)} requests, {len(load.failed)} failed, {len(wrong)} wrong, longest {max(took_s):.3f} s, "
        f"{silence_s:.3f} s without a response"
    )
    kinds = {f"{sample.status} {sample.error[:160]}" for sample in load.failed}
    return (
        found
        + f", p50 {1e3 * quantile(took_s, 0.5):.0f} ms, p99 {1e3 * quantile(took_s, 0.99):.0f} ms"
        + "".join(f"\n    {kind}" for kind in sorted(kinds)[:5])
    )


if __name__ == "__main__":
    main()
