"""A service with two models: each is reached by its name, and the loss of processes of one does not touch the other."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator

import httpx
import pytest

from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import LocalService
from tests.services import small_service
from tests.waiting import wait_until

MODELS = ("small", "resnet18")
INFER = {"inputs": [{"name": "input", "datatype": "UINT8", "shape": [1, 3, 32, 32], "data": [7] * 3072}]}


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    model = "small=resnet18,resnet18"
    with small_service(model=model, replicas=2, leaders=2, wait_until_ready=False) as running:
        wait_until(lambda: is_ready(running))
        yield running


def is_ready(service: LocalService) -> bool:
    try:
        response = httpx.get(f"{service.url}/readyz", timeout=30)
    except httpx.TransportError:
        return False
    return response.status_code == 200 and all(complete(service, model) for model in MODELS)


def complete(service: LocalService, model: str) -> bool:
    """Whether all leaders and replicas of a model are ready."""
    status = httpx.get(f"{service.url}/status", params={"model": model}, timeout=30).json()
    return bool(status["state"] == "ready") and len(status["leaders"]) == 2


def pids(service: LocalService, name: str) -> list[int]:
    """The processes that were started with this name."""
    started = re.compile(rf"{name} slot=\d+ pid=(\d+) started")
    return [int(match[1]) for line in service.lines if (match := started.fullmatch(line.message))]


def kill_one(service: LocalService, name: str) -> None:
    """Kill a process with this name, and wait until it was started again."""
    before = pids(service, name)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: len(pids(service, name)) > len(before))


def test_each_model_is_reached_by_its_name(service: LocalService) -> None:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        for model in MODELS:
            response = client.post(f"/v2/models/{model}/infer", json=INFER)
            assert (response.status_code, response.json()["model_name"]) == (200, model), response.text
        unknown = client.post("/v2/models/large/infer", json=INFER)
        assert (unknown.status_code, unknown.json()["reason"]) == (404, "unknown_model")
        series = 'multiworld_redundancy{process="small-leader-0",model="small"}'
        wait_until(lambda: series in client.get("/metrics").text)
    wait_until(lambda: service.metric("multiworld_images_total", model="resnet18") >= 1)


def test_no_request_of_any_model_fails_when_a_leader_and_a_worker_of_one_are_killed(service: LocalService) -> None:
    with contextlib.ExitStack() as stack:
        requests = {model: served_requests(service.url, model=model, rows=1) for model in MODELS}
        loads = [stack.enter_context(run_load(service.url, each, rate_hz=20)) for each in requests.values()]
        wait_until(lambda: all(load.samples for load in loads))
        for victim in ("small-leader", "small-worker"):
            kill_one(service, victim)
            wait_until(lambda: complete(service, "small"))
        before = [len(load.samples) for load in loads]
        wait_until(lambda: all(len(load.samples) > count for load, count in zip(loads, before, strict=True)))
    assert not [load.failed[:3] for load in loads if load.failed]
    assert len(pids(service, "resnet18-worker")) == 2, "the other model lost no process"
    assert service.metric("multiworld_leader_restarts_total", model="resnet18") == 0
    wait_until(lambda: service.metric("multiworld_leader_restarts_total", model="small") == 1)
