"""Responses when the pipeline rejects a request, and cancellation when the client disconnects."""

import asyncio
import logging

import pytest

from multiworld_serving.server import errors
from multiworld_serving.server.errors import RequestRejected
from tests.unit.server.frontend_app import MODEL, ColourPredictor, image_bytes, running_frontend

LABELS = {"model": MODEL.name, "version": MODEL.version, "protocol": "predict"}


@pytest.mark.parametrize(
    ("failure", "status", "retry_after"),
    [
        (errors.OverloadedError("the queue is full", retry_after_s=2.1), 429, "3"),
        (errors.OverloadedError("the queue is full", retry_after_s=0.01), 429, "1"),
        (errors.OverloadedError("the queue is full"), 429, "1"),
        (errors.NoReplicaError("stage 1 has no replica"), 503, "1"),
        (errors.NotReadyError("not ready"), 503, "1"),
        (errors.DrainingError("stopping", retry_after_s=10), 503, "10"),
        (errors.DeadlineError("too late"), 504, None),
        (errors.PoisonError("broke three worlds"), 500, None),
        (errors.StageError("stage 0 raised"), 500, None),
        (errors.WithdrawnError("withdrawn"), 499, None),
    ],
    ids=lambda value: value.reason if isinstance(value, RequestRejected) else None,
)
async def test_predict_returns_the_status_of_the_reason(
    failure: RequestRejected, status: int, retry_after: str | None
) -> None:
    async with running_frontend(ColourPredictor(failure=failure)) as frontend:
        response = await frontend.client.post("/predict", files={"image": image_bytes()})
        assert response.status_code == status
        assert response.json()["error"] == failure.detail
        assert response.json()["reason"] == failure.reason
        assert response.headers.get("Retry-After") == retry_after
        assert frontend.sample("multiworld_requests_total", **LABELS, code=str(status), reason=failure.reason) == 1


async def test_predict_returns_500_and_logs_once_when_the_predictor_raises(caplog: pytest.LogCaptureFixture) -> None:
    predictor = ColourPredictor(failure=ZeroDivisionError("our bug"))
    async with running_frontend(predictor) as frontend:
        with caplog.at_level(logging.INFO):
            response = await frontend.client.post(
                "/predict", files={"image": image_bytes()}, headers={"X-Request-Id": "r-7"}
            )
        assert response.status_code == 500
        assert response.json()["reason"] == "internal"
        assert response.json()["request_id"] == response.headers["X-Request-Id"] == "r-7"
        assert "our bug" not in response.text
        tracebacks = [record for record in caplog.records if record.exc_info]
        assert len(tracebacks) == 1
        assert "request_id=r-7" in tracebacks[0].getMessage()
        assert frontend.sample("multiworld_requests_total", **LABELS, code="500", reason="internal") == 1
        assert frontend.sample("multiworld_requests_in_flight") == 0
        predictor.failure = None
        await frontend.assert_serves()


async def test_predict_returns_504_when_the_predictor_exceeds_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld_serving.server.http.open_request.DEADLINE_GRACE_S", 0.0)
    async with running_frontend(ColourPredictor(proceed=asyncio.Event()), timeout_s=3.0) as frontend:
        response = await frontend.client.post("/predict", files={"image": image_bytes()})
        assert response.status_code == 504
        assert response.json()["reason"] == "deadline"
        assert frontend.predictor.cancelled == 1
