"""Processes that reach the leader but not each other: the leader relays the tensors that they cannot fetch."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.load.requests import served_requests
from tests.machines.network import Network, need_namespaces
from tests.machines.test_partial_partitions import Site
from tests.waiting import wait_for_more, wait_until

LEADER, FRONTEND = "10.90.2.1", "10.90.2.3"
WORKERS = tuple(f"10.90.2.{number}" for number in range(11, 15))
MODEL = "--model resnet18 --weights random:0 --image-size 32 --stages 2 --replicas 2 --join-port 8001"
JOIN = ("--leader", f"{LEADER}:8001", "--edge-min-bytes", "0")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    need_namespaces()
    made = Site(tmp_path_factory.mktemp("cuts"))
    made.service.url = f"http://{FRONTEND}:8000"
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network())
        host = network.host("leader", f"{LEADER}/24")
        stack.enter_context(made.started(host, "leader", *MODEL.split(), "--join-host", LEADER))
        for address in WORKERS:
            host = made.hosts[address] = network.host(f"worker-{address[-2:]}", f"{address}/24")
            stack.enter_context(made.started(host, "worker", "--name", host.name, "--threads", "1", *JOIN))
        host = made.hosts[FRONTEND] = network.host("frontend", f"{FRONTEND}/24")
        stack.enter_context(made.started(host, "frontend", "--host", FRONTEND, "--http-port", "8000", *JOIN))
        stack.enter_context(host.entered())
        wait_until(lambda: "serves http=" in made.log("frontend"))
        wait_until(lambda: made.states() == ["ready"] * 5)
        yield made


CUTS = {
    "a frontend and a worker": ((FRONTEND, WORKERS[0]),),
    "a worker and the other workers": tuple((WORKERS[0], other) for other in WORKERS[1:]),
    "all": tuple(itertools.combinations((FRONTEND, *WORKERS), 2)),
}
"""The pairs of processes that do not reach each other."""


@pytest.mark.parametrize("name", CUTS)
def test_no_request_fails_when_tensors_cannot_be_fetched(site: Site, name: str) -> None:
    requests, logged = served_requests(site.service.url, photos(4)), len(site.log("frontend"))
    with run_load(site.service.url, requests, rate_hz=20) as load:
        wait_for_more(load.samples, 20)
        with contextlib.ExitStack() as stack:
            for one, other in CUTS[name]:
                stack.enter_context(site.hosts[one].losing(f"INPUT -s {other}", f"OUTPUT -d {other}"))
            wait_for_more(load.samples, 100)
            if name == "all":  # otherwise other replicas may compute all late batches
                wait_until(lambda: "new requests are relayed" in site.log("frontend")[logged:])
            assert site.hosts[CUTS[name][0][0]].lost_packets()
        wait_for_more(load.samples, 20)
    assert not load.failed, load.failed[:3]
    assert site.states() == ["ready"] * 5
