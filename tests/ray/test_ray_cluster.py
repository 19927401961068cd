"""`multiworld serve --launcher ray` and `down` on a Ray cluster of three nodes: a node is killed under load, and what is refused."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.library_clients import clients
from tests.programs import free_port, process, program
from tests.ray.cluster import RayCluster
from tests.waiting import wait_until

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = pytest.mark.timeout(900)

SERVE = (
    *("serve", "--launcher", "ray", "--model", "resnet18", "--weights", "random:0", "--image-size", "32"),
    *("--http-port", "0", "--join-port", "0", "--admin-port", "0", "--heartbeat-timeout-s", "10"),
)
JPEG = {"Content-Type": "image/jpeg"}
PHOTO = Path(__file__).parents[2] / "examples/images/clock.jpg"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a Redis server."""
    port, folder = str(free_port()), str(tmp_path_factory.mktemp("redis"))
    options = ("--port", port, "--bind", "127.0.0.1", "--dir", folder, "--save", "")
    with process(program("redis-server"), *options, log=subprocess.DEVNULL):
        yield f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def cluster(redis: str) -> Iterator[RayCluster]:
    running = RayCluster("head=4", "node-1=4", "node-2=4", redis=redis)
    try:
        yield running
    finally:
        running.close()


def status(urls: list[str]) -> dict[str, Any]:
    """GET /status of the first that answers; empty if none does."""
    for url in urls:
        with contextlib.suppress(httpx.TransportError):
            found: dict[str, Any] = httpx.get(f"{url}/status", timeout=60).json()
            return found
    return {}


def hosts(found: dict[str, Any]) -> list[set[str]]:
    """For each stage the nodes with a ready replica."""
    return [
        {each["host"] for each in stage["replicas"] if each["state"] == "ready"} for stage in found.get("stages", [])
    ]


def is_complete(found: dict[str, Any]) -> bool:
    leaders = [leader["state"] for leader in found.get("leaders", [])]
    return leaders == ["ready", "standby"] and [len(nodes) for nodes in hosts(found)] == [2]


def test_no_request_is_lost_when_a_node_is_killed_and_while_the_head_restarts(cluster: RayCluster) -> None:
    started = cluster.run(*SERVE, "--stages", "1", "--replicas", "2", "--leaders", "2", "--frontends", "2")
    assert started.returncode == 0, started.stderr
    try:
        urls = re.findall(r"listening http=(\S+)", started.stderr)[-1].split(",")
        wait_until(lambda: is_complete(status(urls)))
        assert "runs already in the namespace multiworld" in cluster.refusal(*SERVE)
        victim = sorted(hosts(status(urls))[0] - {"head"})[0]
        with clients(*urls) as calls:
            calls.until_answered(20)
            cluster.tell("kill", victim)
            wait_until(lambda: is_complete(now := status(urls)) and all(victim not in each for each in hosts(now)))
            calls.until_answered(20)
            cluster.tell("kill_gcs")
            killed = status(urls)["stages"][0]["replicas"][0]["pid"]
            os.kill(killed, signal.SIGKILL)  # its actor starts it again without the head
            wait_until(lambda: is_complete(now := status(urls)) and killed not in pids(now))
            cluster.tell("start_gcs")
            calls.until_answered(50)
        assert not calls.failures
        assert is_complete(status(urls))
    finally:
        stopped = cluster.run("down")
    assert stopped.returncode == 0, f"a new head knows the service: {stopped.stderr}"
    wait_until(lambda: not status(urls))
    assert "no service runs in the namespace multiworld" in cluster.refusal("down")


def pids(found: dict[str, Any]) -> list[int]:
    return [each["pid"] for stage in found["stages"] for each in stage["replicas"]]


def ready(found: dict[str, Any]) -> list[str]:
    stages = found.get("stages", [])
    return [each["worker"] for stage in stages for each in stage["replicas"] if each["state"] == "ready"]


def test_each_model_has_leaders_and_workers_of_its_own(cluster: RayCluster) -> None:
    models = ("resnet18", "second-leader")
    started = cluster.run(*SERVE, "--model", f"{models[1]}=resnet18", "--stages", "1", "--replicas", "1")
    assert started.returncode == 0, started.stderr
    try:
        [url] = re.findall(r"listening http=(\S+)", started.stderr)[-1].split(",")
        workers = [ready(httpx.get(f"{url}/status", params={"model": model}, timeout=60).json()) for model in models]
        assert workers == [[f"{model}-worker-0"] for model in models]
        for model in models:
            response = httpx.post(f"{url}/predict/{model}", content=PHOTO.read_bytes(), headers=JPEG, timeout=60)
            assert response.status_code == 200, response.text
    finally:
        stopped = cluster.run("down")
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped leaders=2" in stopped.stderr


def test_everything_is_taken_down_when_a_process_refuses_its_settings(cluster: RayCluster) -> None:
    line = cluster.refusal(*SERVE, "--stages", "1", "--replicas", "1", "--weights", "/nowhere.pth")
    assert re.search(r"leader-0 on \S+: cannot start; see its error above", line)
    assert "no service runs" in cluster.refusal("down")
