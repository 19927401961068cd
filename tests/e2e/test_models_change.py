"""Several models in one service. They are added and removed by `multiworld models` and by SIGHUP, and faults of one touch no other."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from multiworld_serving.cli.main import main
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import LocalService, start_program
from tests.services import says
from tests.unit.server.frontend_app import image_bytes
from tests.waiting import wait_until

FILE = """
[serve]
weights = "random:0"
image_size = 32
stages = 1
replicas = 1
leaders = 2
threads = 1
grpc_port = 0
heartbeat_timeout_s = 10
recovery_grace_s = 60

[[models]]
name = "first"
source = "resnet18"
"""
TABLE = """
[[models]]
name = "{}"
source = "resnet18"
"""
INFER = {"inputs": [{"name": "input", "datatype": "UINT8", "shape": [1, 3, 32, 32], "data": [7] * 3072}]}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "service.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def service(file: Path) -> Iterator[LocalService]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalService, "start_program", staticmethod(start_program))  # a fork has no command line
        with LocalService(config=file) as running:
            yield running


def infer(service: LocalService, model: str) -> int:
    response = httpx.post(f"{service.url}/v2/models/{model}/infer", json=INFER, timeout=60)
    assert response.json().get("model_name", model) == model
    return response.status_code


def descriptors(service: LocalService) -> int:
    return len(os.listdir(f"/proc/{service.pid}/fd"))


def test_models_are_added_and_removed_while_another_one_serves(
    service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--url", service.url]
    requests = served_requests(service.url, model="first", rows=1)
    with run_load(service.url, requests, rate_hz=20) as load:
        before = descriptors(service)
        assert main(["models", "add", "second=resnet18", "--set", "queue_limit=64", *options]) == 0
        assert "second 1 READY" in capsys.readouterr().out
        assert infer(service, "second") == 200
        response = httpx.post(f"{service.url}/predict", files={"image": image_bytes("blue")}, timeout=60)
        assert response.json()["model"] == "first"
        assert main(["models", "remove", "second", *options]) == 0
        assert "second" not in capsys.readouterr().out
        assert infer(service, "second") == 404
        wait_until(lambda: descriptors(service) <= before)
    # A client that is idle for a second may find its connection closed.
    assert not [each for each in load.failed if "disconnected" not in each.error], load.failed[:3]


REFUSALS = (
    (["add", "first=resnet18"], "there is a model 'first' already"),
    (["add", "deep=resnet18", "--set", "stages=64"], "at most 11"),
    (["add", "other=unknown"], "no model 'unknown'"),
    (["add", "other=../other.bundle"], "--weights-dir"),
    (["add", "other=tests"], "--weights-dir"),  # a folder where the service runs
    (["add", "other=resnet18", "--set", "weights_dir=."], "cannot be sent"),
    (["add", "other=resnet18", "--set", "colour=1"], "colour"),
    (["add", "first@1=resnet18"], "there is a model 'first@1' already"),
    (["add", "first@x=resnet18"], "@VERSION with a whole number"),
    (["share", "first", "2=5"], "has no version '2'; its versions are 1"),
    (["share", "first", "1=5"], "must be 100 % together"),
    (["remove", "other"], "there is no model 'other'"),
    (["remove", "first"], "the last model"),
)
SETTINGS_FILES = (
    ("no TOML", "is not valid TOML"),
    ("[serve]", "has no tables [[models]]"),
    (f"{FILE}stagez = 1", "the models are unchanged: unknown setting stagez of the model first"),
    (FILE.replace("replicas", "replicaz"), "the models are unchanged: unknown setting replicaz in [serve]"),
    (FILE.replace("stages = 1", "stages = 2"), "the settings of model first changed in "),
    (FILE, "models unchanged"),
)


def test_change_of_models_is_refused_with_its_reason(
    service: LocalService, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for change, reason in REFUSALS:
        assert main(["models", *change, "--url", service.url]) == 1
        assert reason in capsys.readouterr().err
    assert main(["models", "list", "--url", service.url]) == 0
    assert re.fullmatch(r"first 1 READY requests=[1-9]\d* errors=0\n", capsys.readouterr().out)

    for content, outcome in SETTINGS_FILES:
        seen = len(service.lines)
        file.write_text(content)
        os.kill(service.pid, signal.SIGHUP)
        says(service, outcome, seen)
    assert infer(service, "first") == 200


def pids(service: LocalService, name: str) -> list[int]:
    """The processes that were started with this name."""
    started = re.compile(rf"{name} slot=\d+ pid=(\d+) started")
    return [int(match[1]) for line in service.lines if (match := started.fullmatch(line.message))]


def is_complete(service: LocalService, model: str) -> bool:
    status = httpx.get(f"{service.url}/status", params={"model": model}, timeout=60).json()
    return [status["state"], *(leader["state"] for leader in status["leaders"])] == ["ready", "ready", "standby"]


def faults_of_one_model_fail_no_request(service: LocalService) -> None:
    """Kill a leader and the worker of the second model while it and the first one have load."""
    models = ("first", "second")
    with contextlib.ExitStack() as stack:
        wait_until(lambda: all(is_complete(service, model) for model in models))
        requests = {model: served_requests(service.url, model=model, rows=1) for model in models}
        loads = [stack.enter_context(run_load(service.url, each, rate_hz=20)) for each in requests.values()]
        for name in ("second-leader", "second-worker"):
            before = pids(service, name)
            os.kill(before[-1], signal.SIGKILL)
            wait_until(lambda: len(pids(service, name)) > len(before) and is_complete(service, "second"))  # noqa: B023
    assert not [load.failed[:3] for load in loads if load.failed]
    assert len(pids(service, "worker")) == 1, "the first model lost no process"
    assert service.metric("multiworld_leader_restarts_total", model="first") == 0
    wait_until(lambda: service.metric("multiworld_leader_restarts_total", model="second") == 1)


def test_models_of_the_settings_file_serve_after_sighup_and_commands_outlast_an_upgrade(
    service: LocalService, file: Path
) -> None:
    seen = len(service.lines)
    file.write_text(FILE + TABLE.format("second") + TABLE.format("bad") + "stages = 64\n")
    os.kill(service.pid, signal.SIGHUP)
    says(service, "added model=second", seen)
    says(service, "model 'bad' is unchanged", seen)
    faults_of_one_model_fail_no_request(service)
    image = tritonclient.grpc.InferInput("input", [1, 3, 32, 32], "UINT8")
    image.set_data_from_numpy(np.full((1, 3, 32, 32), 7, np.uint8))
    assert main(["models", "add", "third=resnet18", "--url", service.url]) == 0
    with tritonclient.grpc.InferenceServerClient(service.grpc_address) as client:
        index = client.get_model_repository_index(as_json=True)["models"]
        assert {each["name"] for each in index} == {"first", "second", "third"}
        outputs = [client.infer(each, [image]).as_numpy("probabilities") for each in ("first", "second", "third")]
        np.testing.assert_allclose(outputs[1:], [outputs[0]] * 2, rtol=1e-3)
    address = service.metrics_url.removeprefix("http://").removesuffix("/metrics")
    with tritonclient.http.InferenceServerClient(address) as operator:
        operator.unload_model("second")
        assert (infer(service, "second"), infer(service, "third")) == (503, 200)
        operator.load_model("second")
        assert infer(service, "second") == 200

    file.write_text(FILE + TABLE.format("second"))
    assert main(["upgrade", "--url", service.url]) == 0
    assert [infer(service, each) for each in ("first", "second", "third")] == [200, 200, 200]

    seen = len(service.lines)
    file.write_text(FILE)
    os.kill(service.pid, signal.SIGHUP)  # the former supervisor passes it on, also while it stops its processes
    says(service, "removed model=second", seen)
    says(service, "removed model=third", seen)
    assert [infer(service, each) for each in ("first", "second", "third")] == [200, 404, 404]
