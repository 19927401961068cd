"""Two leaders, of which some processes reach only the second one."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.server.supervisor.programs import PROGRAM
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import RunningService
from tests.machines.network import Host, Network, need_namespaces
from tests.services import TOKEN
from tests.waiting import wait_for_more, wait_until

LEADERS, FRONTEND, WORKERS = ("10.90.1.1", "10.90.1.2"), "10.90.1.3", ("10.90.1.11", "10.90.1.12")
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

    def changes(self, leader: str, worker: str, after: int) -> list[str]:
        """When this worker became ready and was lost at this leader."""
        return re.findall(rf"worker={worker} \S+->(ready|broken)", self.log(leader)[after:])

    def states(self) -> list[str]:
        """Of the replicas and of the leaders."""
        status: dict[str, Any] = self.service.status()
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        return [each["state"] for each in (*replicas, *status["leaders"])]

    def until_ready(self) -> None:
        wait_until(lambda: self.states() == ["ready", "ready", "ready", "standby"])


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
            stack.enter_context(made.started(host, "worker", "--name", host.name, "--threads", "1", *joins))
        host = made.hosts["frontend"] = network.host("frontend", f"{FRONTEND}/24")
        stack.enter_context(made.started(host, "frontend", "--host", FRONTEND, "--http-port", "8000", *joins))
        stack.enter_context(host.entered())
        wait_until(lambda: "serves http=" in made.log("frontend"))
        made.until_ready()
        yield made


@pytest.mark.parametrize("cut", [["worker-0"], ["worker-0", "frontend"]], ids="-and-".join)
def test_no_request_fails_when_processes_reach_only_the_second_leader(site: Site, cut: Sequence[str]) -> None:
    requests = served_requests(site.service.url, photos(4))
    logged = {name: len(site.log(name)) for name in ("leader-0", "leader-1")}

    def changes(leader: str, worker: str) -> list[str]:
        return site.changes(leader, worker, logged[leader])

    with run_load(site.service.url, requests, rate_hz=20) as load:
        with contextlib.ExitStack() as stack:
            for name in cut:
                rules = f"INPUT -s {LEADERS[0]}", f"OUTPUT -d {LEADERS[0]}"
                stack.enter_context(site.hosts[name].losing(*rules))
            wait_until(lambda: changes("leader-1", "worker-0") == ["ready"])
            if "frontend" in cut:
                wait_until(lambda: "unreachable" in site.states())
            wait_for_more(load.samples, 50)
        site.until_ready()
    assert not load.failed, load.failed[:3]
    assert changes("leader-0", "worker-0") == ["broken", "ready"]
    assert changes("leader-1", "worker-0") == ["ready", "broken"]
    assert not changes("leader-0", "worker-1") + changes("leader-1", "worker-1")
