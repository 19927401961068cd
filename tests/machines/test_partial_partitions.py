"""Two leaders, of which some processes reach only the second one."""

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from multiworld_serving.server.supervisor.programs import PROGRAM
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import RunningService
from tests.chaos.clients import TOKEN
from tests.machines.network import Host, Network, need_namespaces
from tests.waiting import wait_for_more, wait_until

LEADERS, FRONTEND, WORKERS = ("10.90.1.1", "10.90.1.2"), "10.90.1.3", ("10.90.1.11", "10.90.1.12")
METRICS_PORT = 8003
MODEL = "--model resnet18 --weights random:0 --image-size 32 --stages 1 --replicas 2 --join-port 8001"


class Site:
    """Each process on a machine of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self.service = RunningService(f"http://{FRONTEND}:8000")

    @contextlib.contextmanager
    def started(self, host: Host, *arguments: str) -> Iterator[None]:
        with (self.folder / f"{host.name}.log").open("w") as log, host.entered():
            environment = {**os.environ, "MULTIWORLD_TOKEN": TOKEN}
            patience = ("--heartbeat-timeout-s", "6")  # a busy machine must not lose a process that is not cut off
            process = subprocess.Popen([*PROGRAM, *arguments, *patience], env=environment, stderr=log)
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def states(self) -> list[str]:
        """Of the replicas and of the leaders."""
        status: dict[str, Any] = self.service.status()
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        return [each["state"] for each in (*replicas, *status["leaders"])]

    def until_ready(self) -> None:
        wait_until(lambda: self.states() == ["ready"] * 4)


class Obedience(threading.Thread):
    """Asks the workers all the time which leaders they obey, as long as the block runs.

    Attributes:
        found: by worker, the leaders that it obeyed at one time, each time that this has changed.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: dict[str, list[tuple[str, ...]]] = {worker: [] for worker in WORKERS}
        self._end = threading.Event()

    def __enter__(self) -> Self:
        self.start()  # in the namespace of the thread that starts it
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()

    def run(self) -> None:
        while not self._end.wait(0.02):
            for worker, changes in self.found.items():
                text = httpx.get(f"http://{worker}:{METRICS_PORT}/metrics", timeout=30).text
                obeyed = tuple(sorted(re.findall(r'^multiworld_worker_obeys{leader="([^"]+)"} 1', text, re.MULTILINE)))
                if obeyed != (changes[-1] if changes else None):
                    changes.append(obeyed)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    need_namespaces()
    made = Site(tmp_path_factory.mktemp("partitions"))
    joins = [part for leader in LEADERS for part in ("--leader", f"{leader}:8001")]
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network())
        for number, address in enumerate(LEADERS):
            host = network.host(f"leader-{number}", f"{address}/24")
            stack.enter_context(
                made.started(host, "leader", "--name", host.name, *MODEL.split(), "--join-host", address)
            )
        for number, address in enumerate(WORKERS):
            host = made.hosts[f"worker-{number}"] = network.host(f"worker-{number}", f"{address}/24")
            metrics = "--metrics-host", address, "--metrics-port", str(METRICS_PORT)
            stack.enter_context(made.started(host, "worker", "--name", host.name, "--threads", "1", *metrics, *joins))
        host = made.hosts["frontend"] = network.host("frontend", f"{FRONTEND}/24")
        stack.enter_context(made.started(host, "frontend", "--host", FRONTEND, "--http-port", "8000", *joins))
        stack.enter_context(host.entered())
        wait_until(lambda: "serves http=" in made.log("frontend"))
        made.until_ready()
        yield made


@pytest.mark.parametrize("cut", [["worker-0"], ["worker-0", "frontend"]], ids="-and-".join)
def test_no_request_fails_when_processes_reach_only_the_second_leader(site: Site, cut: Sequence[str]) -> None:
    requests = served_requests(site.service.url, photos(4))
    logged = len(site.log("worker-0"))
    with run_load(site.service.url, requests, rate_hz=20) as load, Obedience() as obedience:
        with contextlib.ExitStack() as stack:
            for name in cut:
                rules = f"INPUT -s {LEADERS[0]}", f"OUTPUT -d {LEADERS[0]}"
                stack.enter_context(site.hosts[name].losing(*rules))
            wait_until(lambda: "leader=10.90.1.1:8001 cannot be joined" in site.log("worker-0")[logged:])
            wait_until(lambda: obedience.found[WORKERS[0]][-1:] == [("leader-1",)])
            if "frontend" in cut:
                wait_until(lambda: "unreachable" in site.states())
            wait_for_more(load.samples, 50)
        site.until_ready()
        wait_until(lambda: all(obeyed[-1:] == [("leader-0",)] for obeyed in obedience.found.values()))
    assert not load.failed, load.failed[:3]
    first, second = obedience.found.values()
    assert first == [("leader-0",), ("leader-1",), ("leader-0",)]
    assert second == [("leader-0",)], "exactly one leader at any time"
