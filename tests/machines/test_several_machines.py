"""Leader and workers on separate machines, with routers, firewalls and lost packets between them.

The machines are network namespaces. Clients run on the leader's machine; the tests concern the path between leader and workers.
"""

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld_serving.testing.local_service import LocalService, start_program
from tests.chaos.clients import answers, assert_nothing_lost, external_worker, run_load
from tests.machines.network import Host, Network, need_namespaces
from tests.nursery import Process
from tests.services import service_for_workers
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)

WAIT_S = 240.0
LEADER = "10.90.0.1"
PATIENCE_S = 6.0
"""Heartbeat timeout: on a busy machine a process may stop for some seconds, and only the victim may be lost."""


class Site:
    """A leader on its own machine, and a network for workers."""

    def __init__(self, network: Network, leader: Host, service: LocalService, folder: Path) -> None:
        self.network = network
        self.leader = leader
        self.service = service
        self.folder = folder
        self.hosts: dict[str, Host] = {}

    @property
    def port(self) -> int:
        return int(self.service.join_address.rpartition(":")[2])

    @contextlib.contextmanager
    def started(self, host: Host, name: str, *options: str, leader: str = "") -> Iterator[Process]:
        """A worker on that host, whether it can join or not. It logs into `log(name)`."""
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log(name).open("w"))
            patience = ("--heartbeat-timeout-s", str(PATIENCE_S))
            joined = external_worker(
                leader or f"{LEADER}:{self.port}",
                name=name,
                options=(*patience, *options),
                stderr=log,
                in_namespace=True,
            )
            with host.entered():
                worker = stack.enter_context(joined)
            yield worker

    @contextlib.contextmanager
    def worker(self, host: Host, name: str, *options: str, leader: str = "") -> Iterator[Process]:
        """A ready worker on that host."""
        seen = len(self.service.lines)
        with self.started(host, name, *options, leader=leader) as worker:
            self.until(name, "->ready", seen)
            yield worker

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def until(self, name: str, change: str, after: int) -> None:
        """Wait for a change of that worker's link."""
        self.service.wait_for(lambda line: line["worker"] == name and change in line.message, WAIT_S, after=after)

    def replica(self, name: str) -> dict[str, object]:
        """What the status says of this worker, which may be a moment later than the log; empty if nothing."""
        stages = self.service.status()["stages"]
        return next((each for stage in stages for each in stage["replicas"] if each["worker"] == name), {})


@pytest.fixture(scope="module")
def site(token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two workers on separate machines: `sound`, the replica that always stays, and `victim`, whose network gets the faults."""
    need_namespaces()
    folder = tmp_path_factory.mktemp("machines")
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network())
        leader = network.host("leader", f"{LEADER}/24")
        stack.enter_context(leader.entered())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(LocalService, "start_program", staticmethod(start_program))  # in the namespace of this thread
        service = stack.enter_context(
            service_for_workers(token_file, join_host=LEADER, replicas=2, heartbeat_timeout_s=PATIENCE_S)
        )
        made = Site(network, leader, service, folder)
        for number, name in enumerate(("sound", "victim"), 11):
            made.hosts[name] = network.host(name, f"10.90.0.{number}/24")
            stack.enter_context(made.started(made.hosts[name], name))
        service.wait_until_complete(WAIT_S)
        yield made


def sockets(host: Host, *options: str) -> list[list[str]]:
    return [line.split() for line in host.run("ss", "-tnH", *options).splitlines()]


def test_worker_needs_only_the_leaders_address_and_the_token_and_listens_only_for_edges(site: Site) -> None:
    host = site.hosts["victim"]
    assert answers(site.service) == [200, 200, 200]
    (listening,) = sockets(host, "-l")
    own = listening[3].rpartition(":")[0]
    assert own == "10.90.0.12", "it listens for edges, on the address with which it reaches the leader"
    peers = {columns[4] for columns in sockets(host)}
    assert f"{LEADER}:{site.port}" in peers
    assert {peer.rpartition(":")[0] for peer in peers} == {LEADER}
    assert len(sockets(site.leader, "-l")) == 4, "HTTP, metrics, the join port, and edges to the frontend"


def test_worker_behind_nat_serves_under_its_own_name(site: Site) -> None:
    router = site.network.router("router", "10.90.0.20/24", "192.168.77.1/24", inner="home")
    hidden = site.network.host("hidden", "192.168.77.2/24", network="home", gateway="192.168.77.1")
    with pytest.raises(subprocess.CalledProcessError):
        site.leader.run("ping", "-c1", "-W1", "192.168.77.2")
    with site.worker(hidden, "hidden", "--advertise-host", "hidden.example"), run_load(site.service) as load:
        wait_until(lambda: site.replica("hidden").get("host") == "hidden.example")
        seen = len(site.service.lines)
        with router.losing("FORWARD -i home"):
            site.until("hidden", "->broken", seen)
            assert router.lost_packets() > 0
        site.until("hidden", "->ready", seen)
    assert_nothing_lost(site.service, load)


def test_worker_reaches_a_leader_behind_nat_at_its_forwarded_address(site: Site) -> None:
    gate = site.network.host("gate", "10.90.0.30/24")
    site.network.plug(gate, "203.0.113.1/24", "wan")
    gate.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    forward = ("-i", "wan", "-p", "tcp", "--dport", "9001", "-j", "DNAT", "--to-destination", f"{LEADER}:{site.port}")
    gate.run("iptables", "-w", "-t", "nat", "-A", "PREROUTING", *forward)
    gate.run("iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-o", "lan", "-j", "MASQUERADE")
    abroad = site.network.host("abroad", "203.0.113.2/24", network="wan")
    with site.worker(abroad, "abroad", leader="203.0.113.1:9001"):
        assert answers(site.service) == [200, 200, 200]


def test_worker_logs_the_unreachable_address_and_retries(site: Site) -> None:
    complaints = {
        "10.90.0.99:8001": "",  # no host has the address: no route or no answer, depending on the kernel
        f"{LEADER}:9": "Connection refused",
        "192.0.2.1:8001": "Network is unreachable",
    }
    host = site.network.host("lost", "10.90.0.61/24")
    lines = [
        f"leader={leader} cannot be joined: {leader} cannot be queried: .*{why}" for leader, why in complaints.items()
    ]
    first, *others = complaints
    more = [part for leader in others for part in ("--leader", leader)]
    with site.started(host, "lost", *more, leader=first):
        wait_until(lambda: all(re.search(line, site.log("lost").read_text()) for line in lines))
