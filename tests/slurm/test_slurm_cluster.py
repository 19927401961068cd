"""The batch scripts on a Slurm cluster of four nodes: tasks are cancelled and killed, and nodes are switched off, under load."""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.requests import served_requests
from tests.slurm.cluster import CONTROLLER, SlurmCluster, need_slurm
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)

SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"
NODES = ("node1", "node2", "node3", "node4")


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    need_slurm()
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short, for the paths of Unix sockets
    try:
        with SlurmCluster(folder, *NODES) as running, running.host(CONTROLLER).entered():
            yield running
    finally:
        shutil.rmtree(folder)


def ready_workers(cluster: SlurmCluster) -> dict[str, int]:
    """The process ids of the ready workers by name, as the frontend of node1 knows them; empty if it does not answer."""
    with contextlib.suppress(httpx.TransportError, KeyError):
        stages = httpx.get(f"http://{cluster.addresses['node1']}:8000/status", timeout=60).json()["stages"]
        return {each["worker"]: each["pid"] for each in stages[0]["replicas"] if each["state"] == "ready"}
    return {}


def ready_leaders(cluster: SlurmCluster) -> set[int]:
    """The process ids of the leaders that serve or could take over."""
    with contextlib.suppress(httpx.TransportError, KeyError):
        leaders = httpx.get(f"http://{cluster.addresses['node1']}:8000/status", timeout=60).json()["leaders"]
        return {each["pid"] for each in leaders if each["state"] in ("ready", "standby")}
    return set()


def test_service_on_slurm_survives_lost_tasks_and_nodes(cluster: SlurmCluster, digits: Path) -> None:
    model = ("--model", str(digits / "digits.bundle"), "--stages", "1", "--replicas", "2")
    service = cluster.run("sbatch", "--parsable", str(SCRIPTS / "service.sbatch"), *model)
    array = ("sbatch", "--parsable", "--cpus-per-task=5", "--export=ALL")
    workers = cluster.run(*array, "--array=0-2", str(SCRIPTS / "worker.sbatch"), "--threads", "1")
    wait_until(lambda: ready_workers(cluster).keys() == {"worker-0", "worker-1", "worker-2"})
    wait_until(lambda: len(ready_leaders(cluster)) == 2)
    url = f"http://{cluster.addresses['node1']}:8000"
    requests = served_requests(url, [(photo(), "image/jpeg")])
    with run_load(url, requests, rate_hz=10) as load:
        [killed] = cluster.programs("node1", "/multiworld worker --name worker-0")
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: ready_workers(cluster).get("worker-0", killed) != killed)

        [leader] = cluster.programs("node1", "/multiworld leader --name")
        os.kill(leader, signal.SIGKILL)
        wait_until(lambda: len(ready_leaders(cluster) - {leader}) == 2)

        cluster.switch_off("node3")  # the task of worker-2 is put back into the queue, and node4 is free
        wait_until(lambda: "worker-2" not in ready_workers(cluster))
        wait_until(
            lambda: cluster.run("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i") == f"{workers}_2"
        )
        cluster.run("scontrol", "update", f"JobId={workers}_2", "StartTime=now")  # Slurm would wait for two minutes
        wait_until(lambda: "worker-2" in ready_workers(cluster))
        assert cluster.programs("node4", "/multiworld worker --name worker-2")

        cluster.switch_off("node2")  # a leader, a frontend, and worker-1
        wait_until(lambda: len(ready_leaders(cluster)) == 1)
        wait_until(lambda: ready_workers(cluster).keys() == {"worker-0", "worker-2"})

        cluster.run("scancel", f"{workers}_2")
        wait_until(lambda: ready_workers(cluster).keys() == {"worker-0"})
    assert load.samples
    assert not load.failed, load.failed[:3]
    cluster.run("scancel", service, workers)
    wait_until(lambda: not any(cluster.programs(node, "/multiworld ") for node in ("node1", "node4")))
