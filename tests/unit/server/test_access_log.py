"""The lines about requests: which are logged, and their fields."""

import hashlib
import logging
from types import SimpleNamespace

import pytest

from multiworld_serving.common.config.keys import KeySet
from multiworld_serving.common.service import errors
from multiworld_serving.server.frontend.auth.authorizer import ApiKeys, Authorizer
from multiworld_serving.server.frontend.observability import request_records
from multiworld_serving.server.frontend.observability.request_records import MAX_LOGGED_PER_S
from tests.unit.server.frontend_app import MODEL, ColourPredictor, RunningFrontend, image_bytes, running_frontend


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, request_records.__name__)


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == request_records.__name__]


async def test_every_request_has_one_line_with_its_outcome(caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(KeySet({hashlib.sha256(b"secret").digest(): "alice"}), KeySet())
    async with running_frontend(authorizer=Authorizer(keys), access_log=True) as frontend:
        headers = {"X-Request-Id": "mine", "Authorization": "Bearer secret"}
        await frontend.client.post("/predict", files={"image": image_bytes()}, headers=headers)
        await frontend.client.get("/healthz")
        await frontend.client.get("/sta tus=1 status=200")
    answered, probe, refused = [vars(line) for line in lines(caplog)]
    assert {"request_id": "mine", "method": "POST", "target": "/predict", "status": 200, "reason": "ok"}.items() <= (
        answered.items()
    )
    assert {"version": MODEL.version, "path": "stage0-0,stage1-1", "attempts": 2, "key": "alice"}.items() <= (
        answered.items()
    )
    assert answered["ms"] > 0
    assert (probe["status"], probe["target"], "key" in probe, "path" in probe) == (200, "/healthz", False, False)
    assert (refused["status"], refused["reason"]) == (401, "unauthenticated")


async def test_failed_and_repeated_requests_are_logged_without_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    async with running_frontend(ColourPredictor(failure=errors.StageError("of the test"))) as frontend:
        failed = await frontend.client.post("/predict", files={"image": image_bytes()})
        invalid = await frontend.client.post("/predict", files={"image": b"no image"})
        frontend.predictor.failure = None
        repeated = await frontend.client.post("/predict", files={"image": image_bytes()})
        await frontend.client.get("/nowhere")
    found = [(vars(line)["request_id"], line.levelname, vars(line)["status"]) for line in lines(caplog)]
    ids = failed.json()["request_id"], invalid.json()["request_id"], repeated.json()["id"]
    assert found == [(ids[0], "WARNING", 500), (ids[1], "INFO", 422), (ids[2], "INFO", 200)]
    assert vars(lines(caplog)[-1])["attempts"] == 2


async def test_lines_about_failed_requests_are_bounded(
    frontend: RunningFrontend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [1.0]
    monkeypatch.setattr(request_records, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    for _ in range(MAX_LOGGED_PER_S + 3):
        await frontend.client.post("/predict")
    assert len(lines(caplog)) == MAX_LOGGED_PER_S
    seconds[0] = 2.0
    await frontend.client.post("/predict")
    assert len(lines(caplog)) == MAX_LOGGED_PER_S + 2
    assert lines(caplog)[-2].getMessage().endswith("left_out=3")
