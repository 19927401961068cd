"""Containers are killed, disconnected, restarted and scaled under load through the published port: no request fails while a replica is
left, and everything recovers automatically. Faults of processes: see `tests/chaos`.
"""

import time

from multiworld_serving.testing.chaos.faults.fault import WAIT_S
from multiworld_serving.testing.chaos.observer import Observer
from tests.containers.deployment import CLIENTS, LEADERS, Deployment
from tests.containers.faults import WORKERS_UP, hurt
from tests.e2e.prometheus_server import wait_until_answers
from tests.waiting import wait_for_more

LEADER_UP = 'sum(up{job="multiworld-leader"})'
FRONTEND_UP = 'sum(up{job="multiworld-frontend"})'


def test_service_answers_after_docker_compose_up(deployment: Deployment) -> None:
    assert all(request.expected for request in deployment.requests())
    deployment.prometheus.wait_for(f"{WORKERS_UP} == 4 and on() {LEADER_UP} == 2 and on() {FRONTEND_UP} == 1")


def test_containers_of_one_host_exchange_tensors_through_shared_memory(deployment: Deployment) -> None:
    deployment.requests()
    deployment.prometheus.wait_for(
        'sum(multiworld_edge_bytes_total{job="multiworld-worker",transport="shared_memory"}) > 0'
    )


def test_no_request_is_lost_when_a_container_is_killed(deployment: Deployment) -> None:
    assert hurt(deployment, "container-kill").causes == ("exit",)
    deployment.prometheus.wait_for(f"{WORKERS_UP} == 4 and on() multiworld_redundancy == 1")


def test_worker_serves_again_when_restarted_with_another_address(deployment: Deployment) -> None:
    before = {*deployment.addresses("worker")}
    made = hurt(deployment, "unplug")
    assert made.causes
    after = {*deployment.addresses("worker")}
    assert (len(before - after), len(after - before)) == (1, 1)
    deployment.prometheus.wait_for(f"{WORKERS_UP} == 4")


def test_requests_wait_and_succeed_when_docker_compose_restarts_all_workers(deployment: Deployment) -> None:
    made = hurt(deployment, "restart-workers")
    assert made.causes == ("left",) * 4
    deployment.prometheus.wait_for("multiworld_redundancy == 1")


def test_no_request_is_lost_when_workers_are_added_and_removed(deployment: Deployment) -> None:
    hurt(deployment, "scale")
    deployment.prometheus.wait_for(f"{WORKERS_UP} == 4")


def test_no_request_is_lost_when_each_leader_gets_another_address_in_turn(deployment: Deployment) -> None:
    before = deployment.addresses(*LEADERS)
    hurt(deployment, "leader-unplug")
    deployment.prometheus.wait_for(f"multiworld_leaders == 2 and on() {LEADER_UP} == 2")
    after = deployment.addresses(*LEADERS)  # a leader may get the earlier address of the other one
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_requests_wait_and_succeed_when_both_leaders_are_restarted(deployment: Deployment) -> None:
    requests = deployment.requests()
    with deployment.load(requests) as load:
        wait_for_more(load.samples, CLIENTS)
        deployment.compose("restart", *LEADERS)
        with Observer(deployment.url) as observer:
            observer.wait(lambda now: now.complete, WAIT_S, "complete")
        wait_for_more(load.samples, 2 * CLIENTS)
    # A request that was at both leaders when they ended is rejected as poison.
    assert all("poison" in sample.error for sample in load.failed), load.failed[:3]


def test_service_is_unaffected_when_prometheus_is_restarted(deployment: Deployment) -> None:
    with deployment.load(deployment.requests()) as load:
        wait_for_more(load.samples, CLIENTS)
        began_s = time.time()
        deployment.compose("restart", "prometheus")
        wait_until_answers(f"{deployment.prometheus.url}/-/ready")
        deployment.prometheus.wait_for("multiworld_redundancy == 1")
        wait_for_more(load.samples, CLIENTS)
    assert not load.failed, load.failed[:3]
    before = deployment.prometheus.query_range("multiworld_redundancy", began_s - 10, began_s)
    assert before, "earlier data is kept"
