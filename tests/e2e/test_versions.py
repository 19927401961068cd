"""Rollout to another version and back, under load, requested with Triton's client; and requests that must change nothing."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

from multiworld_serving.models.export.torchvision_models import load_model
from multiworld_serving.testing.local_service import LocalService
from tests.waiting import wait_until

MODEL, SIDE = "resnet18", 32
FIRST, OTHER = "random:1", "other"
OTHER_FILE = f"deep/{OTHER}.safetensors"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valid weights, invalid weights, and another file beside it."""
    folder = tmp_path_factory.mktemp("versions") / "weights"
    (folder / "deep").mkdir(parents=True)
    state = load_model(MODEL, "random:7").module.state_dict()
    safetensors.torch.save_file(state, folder / "deep" / f"{OTHER}.safetensors")
    safetensors.torch.save_file(state, folder.parent / "outside.safetensors")
    huge = {**state, "fc.weight": torch.full_like(state["fc.weight"], 3e38)}
    safetensors.torch.save_file(huge, folder / "huge.safetensors")
    return folder


@pytest.fixture(scope="module")
def service(weights: Path) -> Iterator[LocalService]:
    with LocalService(
        heartbeat_timeout_s=10,
        timeout_s=100,
        model=MODEL,
        weights=FIRST,
        weights_dir=weights,
        image_size=SIDE,
        stages=2,
        replicas=2,
        spares=1,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def operators(service: LocalService) -> Iterator[Any]:
    address = service.metrics_url.removeprefix("http://").removesuffix("/metrics")
    with triton.InferenceServerClient(address, network_timeout=PATIENCE_S, connection_timeout=PATIENCE_S) as client:
        yield client


def picture(number: int) -> bytes:
    """A PNG of the model's size: nothing is scaled, so the reference gets the same pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def right_answers(weights: str) -> dict[int, int]:
    """The most probable class of some images."""
    model = load_model(MODEL, weights, image_size=SIDE)
    pixels = [np.asarray(Image.open(io.BytesIO(picture(number)))) for number in range(8)]
    batch = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    with torch.inference_mode():
        return dict(enumerate(model.classifier()(batch).argmax(1).tolist()))


@dataclass
class Answers:
    """The answers that a load generator received."""

    expected: dict[str, dict[int, int]]
    versions: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)
    """Set when the awaited version has answered."""
    awaited: str = ""

    def take(self, number: int, response: httpx.Response) -> None:
        if response.status_code != 200:
            self.wrong.append(f"{response.status_code} {response.text}")
            return
        version = response.headers["x-model-version"]
        short = version.rpartition("-")[0] if version.startswith(OTHER) else version
        self.versions[short] += 1
        body = response.json()
        if body["version"] != version or body["predictions"][0]["class_id"] != self.expected[short][number]:
            self.wrong.append(f"{version} answered picture {number} with {body}")
        if short == self.awaited:
            self.enough.set()

    def wait_for(self, version: str) -> None:
        self.enough.clear()
        self.awaited = version
        assert self.enough.wait(PATIENCE_S), f"nothing was answered by {version}"


@contextmanager
def load(service: LocalService, expected: dict[str, dict[int, int]], clients: int = 4) -> Iterator[Answers]:
    """Clients that send requests continuously while the block lasts."""
    answers, stop = Answers(expected), threading.Event()

    def ask(seed: int) -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            number = seed
            while not stop.wait(0.05):
                number = (number + 1) % 8
                files = {"image": ("picture.png", picture(number))}
                answers.take(number, client.post(f"{service.url}/predict", files=files))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def expected(weights: Path) -> dict[str, dict[int, int]]:
    found = {FIRST: right_answers(FIRST), OTHER: right_answers(str(weights / "deep" / f"{OTHER}.safetensors"))}
    assert found[FIRST] != found[OTHER]
    return found


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
    service: LocalService, operators: Any, expected: dict[str, dict[int, int]]
) -> None:
    with load(service, expected) as answers:
        answers.wait_for(FIRST)
        operators.load_model(MODEL, config=config(OTHER_FILE))
        assert operators.get_model_repository_index()[0]["version"] == "2"
        answers.wait_for(OTHER)
        operators.load_model(MODEL)  # the version it was started with
        answers.wait_for(FIRST)
        operators.load_model(MODEL, config=config(FIRST))  # which already serves
    assert answers.wrong == []
    assert set(answers.versions) == {FIRST, OTHER}
    assert operators.get_model_repository_index() == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]
    wait_until(lambda: service.metric("multiworld_version_changes_total") == 2)
    wait_until(lambda: service.metric("multiworld_model_version", version=FIRST) == 1)
    answered = service.metric("multiworld_requests_total", code="200")
    assert answered == answers.versions.total()
    assert service.metric("multiworld_requests_total", code="200", version=FIRST) == answers.versions[FIRST]
    assert events(service).count("version_changed") == 2


def events(service: LocalService) -> list[str]:
    """The events that a new subscriber of the feed receives."""
    found = []
    with httpx.stream("GET", f"{service.url}/events", timeout=30.0) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and '"what"' in line:
                found.append(json.loads(line.removeprefix("data: "))["what"])
            elif line.startswith("data: {") and '"uptime_s"' in line and found:
                return found
    return found


BAD = {
    "huge.safetensors": "infinity or NaN",
    "../outside.safetensors": "not below",
}


@pytest.mark.parametrize("name", BAD, ids=lambda name: repr(name)[:32])
def test_invalid_version_changes_nothing_and_the_reason_is_reported(
    service: LocalService, operators: Any, name: str
) -> None:
    before, changes = served(service), service.metric("multiworld_version_changes_total")
    with pytest.raises(InferenceServerException) as raised:
        operators.load_model(MODEL, config=config(name))
    assert raised.value.status() == "400"
    assert BAD[name] in raised.value.message()
    assert "root:" not in raised.value.message()
    assert served(service) == before
    wait_until(lambda: service.metric("multiworld_version_changes_total") == changes)
    assert service.status()["version_loading"] is None
    assert httpx.post(f"{service.url}/predict", files={"image": picture(1)}, timeout=PATIENCE_S).status_code == 200


def test_second_load_is_refused_during_a_rollout(service: LocalService, operators: Any) -> None:
    found: list[int] = []
    for seed in range(20, 40, 2):  # the first request may have ended before the second one was sent
        with ThreadPoolExecutor(2) as threads:
            loads = threads.map(lambda weights: change(service, weights), (f"random:{seed}", f"random:{seed + 1}"))
            found = sorted(load.status_code for load in loads)
        if found != [200, 200]:
            break
    assert found == [200, 409]
    operators.load_model(MODEL)


def test_worker_lost_during_a_rollout_costs_no_request_and_the_next_load_succeeds(
    service: LocalService, operators: Any, expected: dict[str, dict[int, int]]
) -> None:
    service.wait_until_complete(PATIENCE_S)
    seen = len(service.lines)
    statuses: list[int] = []
    with load(service, expected) as answers:
        answers.wait_for(FIRST)
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
        answers.wait_for(OTHER)
        operators.load_model(MODEL)
        answers.wait_for(FIRST)
    assert answers.wrong == []
    service.wait_until_complete(PATIENCE_S)


def test_unloaded_model_is_not_ready_until_it_is_loaded(service: LocalService, operators: Any) -> None:
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        operators.unload_model(MODEL)
        assert not client.is_model_ready(MODEL)
        assert not client.is_server_ready()
        (index,) = client.get_model_repository_index()
        assert (index["state"], index["reason"]) == ("UNAVAILABLE", "unloaded")
        refused = httpx.post(f"{service.url}/predict", files={"image": picture(1)}, timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["reason"]) == (503, "not_ready")
        operators.load_model(MODEL)
        assert client.is_model_ready(MODEL)
    assert httpx.post(f"{service.url}/predict", files={"image": picture(1)}, timeout=PATIENCE_S).status_code == 200
