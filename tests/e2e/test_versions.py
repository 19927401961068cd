"""Rollout to another version and back, under load, requested with Triton's client; and requests that must change nothing."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from multiworld_serving.models.export.torchvision_models import load_model
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.services import small_service
from tests.versioned_requests import VersionedRequest, versioned_requests
from tests.waiting import wait_until

MODEL, SIDE = "resnet18", 32
FIRST, OTHER = "random:0", "other"
OTHER_FILE = f"deep/{OTHER}.safetensors"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valid and invalid weights."""
    folder = tmp_path_factory.mktemp("versions") / "weights"
    (folder / "deep").mkdir(parents=True)
    state = load_model(MODEL, "random:7").module.state_dict()
    safetensors.torch.save_file(state, folder / "deep" / f"{OTHER}.safetensors")
    huge = {**state, "fc.weight": torch.full_like(state["fc.weight"], 3e38)}
    safetensors.torch.save_file(huge, folder / "huge.safetensors")
    return folder


@pytest.fixture(scope="module")
def service(weights: Path) -> Iterator[LocalService]:
    with small_service(weights_dir=weights, stages=2, replicas=2, spares=1) as running:
        yield running


@pytest.fixture(scope="module")
def operators(service: LocalService) -> Iterator[Any]:
    address = service.metrics_url.removeprefix("http://").removesuffix("/metrics")
    with triton.InferenceServerClient(address, network_timeout=PATIENCE_S, connection_timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def requests(weights: Path) -> Sequence[VersionedRequest]:
    """Images of the model's size: nothing is scaled, so the references get the same pixels."""
    images = torch.randint(0, 256, (8, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    models = {
        name: load_model(MODEL, file, image_size=SIDE)
        for name, file in ((FIRST, FIRST), (OTHER, str(weights / OTHER_FILE)))
    }
    with torch.inference_mode():
        answers = {name: model.classifier()(images) for name, model in models.items()}
    assert not torch.equal(answers[FIRST].argmax(1), answers[OTHER].argmax(1))
    return versioned_requests(images, answers, "x-model-version")


def wait_for(version: str, requests: Sequence[VersionedRequest]) -> None:
    """Wait for another response of this version."""
    before = requests[0].seen[version]
    wait_until(lambda: requests[0].seen[version] > before)


def config(weights: str) -> str:
    """A model configuration as Triton's clients send it."""
    return json.dumps({"parameters": {"weights": {"string_value": weights}}})


def change(service: LocalService, weights: str) -> httpx.Response:
    """The same as `operators`, for threads: a Triton client belongs to the thread that created it."""
    url = service.metrics_url.replace("/metrics", f"/v2/repository/models/{MODEL}/load")
    return httpx.post(url, json={"parameters": {"weights": weights}}, timeout=PATIENCE_S)


def served(service: LocalService) -> str:
    version: str = service.status()["version"]
    return version


def test_rollout_there_and_back_under_load_fails_no_request(
    service: LocalService, operators: Any, requests: Sequence[VersionedRequest]
) -> None:
    with run_load(service.url, requests, rate_hz=20) as load:
        wait_for(FIRST, requests)
        operators.load_model(MODEL, config=config(OTHER_FILE))
        assert operators.get_model_repository_index()[0]["version"] == "2"
        wait_for(OTHER, requests)
        operators.load_model(MODEL)  # the version it was started with
        wait_for(FIRST, requests)
        operators.load_model(MODEL, config=config(FIRST))  # which already serves
    assert not load.failed, load.failed[:3]
    seen = requests[0].seen
    assert operators.get_model_repository_index() == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]
    wait_until(lambda: service.metric("multiworld_version_changes_total") == 2)
    wait_until(lambda: service.metric("multiworld_model_version", version=FIRST) == 1)
    wait_until(lambda: service.metric("multiworld_requests_total", code="200") == seen.total())
    assert service.metric("multiworld_requests_total", code="200", version=FIRST) == seen[FIRST]


def test_invalid_version_changes_nothing_and_the_reason_is_reported(service: LocalService, operators: Any) -> None:
    before, changes = served(service), service.metric("multiworld_version_changes_total")
    with pytest.raises(InferenceServerException, match="infinity or NaN") as raised:
        operators.load_model(MODEL, config=config("huge.safetensors"))
    assert raised.value.status() == "400"
    assert served(service) == before
    wait_until(lambda: service.metric("multiworld_version_changes_total") == changes)
    wait_until(lambda: service.status()["version_loading"] is None)
    assert httpx.post(f"{service.url}/predict", files={"image": photo()}, timeout=PATIENCE_S).status_code == 200


def test_worker_lost_during_a_rollout_costs_no_request_and_the_next_load_succeeds(
    service: LocalService, operators: Any, requests: Sequence[VersionedRequest]
) -> None:
    service.wait_until_complete(PATIENCE_S)
    seen = len(service.lines)
    statuses: list[int] = []
    with run_load(service.url, requests, rate_hz=20) as load:
        wait_for(FIRST, requests)
        loading = threading.Thread(target=lambda: statuses.append(change(service, OTHER_FILE).status_code))
        loading.start()
        held = service.wait_for(lambda line: "loaded version" in line.message, PATIENCE_S, after=seen)
        first = held.message.partition("worker=")[2].split()[0]
        victim = next(pid for name, pid in service.worker_pids().items() if name != first)
        os.kill(victim, signal.SIGKILL)
        loading.join()
        service.wait_until_complete(PATIENCE_S)
        if statuses == [500]:
            assert served(service) == FIRST
            operators.load_model(MODEL, config=config(OTHER_FILE))
        wait_for(OTHER, requests)
        operators.load_model(MODEL)
        wait_for(FIRST, requests)
    assert not load.failed, load.failed[:3]
    service.wait_until_complete(PATIENCE_S)
