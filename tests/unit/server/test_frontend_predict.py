"""POST /predict: answers, bad input, rejections of the pipeline, and its calls to the pipeline. The service continues after all of them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from multiworld_serving.common.daemon_threads import DaemonThreads
from multiworld_serving.common.service import errors
from multiworld_serving.common.service.errors import OverloadedError, RequestRejected
from tests.unit.server.frontend_app import (
    MAX_BODY_BYTES,
    MODEL,
    ColourPredictor,
    RunningFrontend,
    image_bytes,
    running_frontend,
)

LABELS = {"model": MODEL.name, "version": MODEL.version, "protocol": "predict"}
PNG = {"Content-Type": "image/png"}
FORM = {"Content-Type": "multipart/form-data"}
IMAGE = image_bytes()


@pytest.mark.parametrize(
    ("media_type", "file_format"), [("image/jpeg", "JPEG"), ("image/png", "PNG"), ("image/webp", "WEBP")]
)
async def test_predict_answers_an_image_body(frontend: RunningFrontend, media_type: str, file_format: str) -> None:
    body = image_bytes("green", file_format=file_format)
    response = await frontend.client.post("/predict", content=body, headers={"Content-Type": media_type})
    assert response.status_code == 200
    assert response.json()["predictions"][0]["label"] == "green"


async def test_predict_answers_a_form_with_all_fields_and_headers(frontend: RunningFrontend) -> None:
    form = {"image": ("a.png", image_bytes("red"), "image/png")}
    response = await frontend.client.post("/predict", files=form, headers={"X-Request-Id": "mine-1"})
    assert response.status_code == 200
    answer, headers = response.json(), response.headers
    assert set(answer) == {"id", "model", "version", "predictions", "timings_ms"}
    assert (answer["model"], answer["version"]) == (MODEL.name, MODEL.version)
    classes = [(each["class_id"], each["label"]) for each in answer["predictions"]]
    assert classes == [(0, "red"), (1, "green"), (2, "blue")]
    assert sum(each["probability"] for each in answer["predictions"]) == pytest.approx(1)
    assert headers["X-Request-Id"] == answer["id"] == frontend.predictor.request_ids[0] == "mine-1"
    assert (headers["X-Model-Version"], headers["X-Model-Digest"]) == ("weights%20v1%20%C3%BC", "0f0f")
    assert (headers["X-Path"], headers["X-Attempts"]) == ("stage0-0,stage1-1", "2")
    timings = answer["timings_ms"]
    assert (timings["queue"], timings["compute"], timings["transfer"]) == (1, 2, 3)
    assert timings["total"] >= timings["decode"] > 0


@pytest.mark.parametrize("given", ["", "with space", "x" * 129, "tab\there"])
async def test_predict_generates_an_id_when_the_given_one_is_invalid(frontend: RunningFrontend, given: str) -> None:
    response = await frontend.client.get("/healthz", headers={"X-Request-Id": given})
    other = await frontend.client.get("/healthz")
    assert response.headers["X-Request-Id"] not in (given, other.headers["X-Request-Id"])
    assert len(response.headers["X-Request-Id"]) == 32


async def test_predict_returns_top_k_classes() -> None:
    async with running_frontend(top_k=2) as frontend:
        by_default = await frontend.client.post("/predict", files={"image": image_bytes()})
        by_query = await frontend.client.post("/predict?top_k=1", files={"image": image_bytes()})
    assert len(by_default.json()["predictions"]) == 2
    assert len(by_query.json()["predictions"]) == 1


async def test_small_jpegs_are_decoded_without_a_thread(
    frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*_: object) -> None:
        raise OverloadedError("there is no thread")

    monkeypatch.setattr(DaemonThreads, "run", none)
    jpeg = image_bytes("green", file_format="JPEG")
    raw = await frontend.client.post("/predict", content=jpeg, headers={"Content-Type": "image/jpeg"})
    in_form = await frontend.client.post("/predict", files={"image": jpeg})
    assert [each.json()["predictions"][0]["label"] for each in (raw, in_form)] == ["green", "green"]
    assert (await frontend.client.post("/predict", content=IMAGE, headers=PNG)).status_code == 429


# -- bad input -----------------------------------------------------------------------------------------------------------------


def form(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> dict[str, Any]:
    """A form with these fields, byte by byte."""
    body = b"".join(
        b'--B\r\nContent-Disposition: form-data; name="%s"; filename="a"\r\n\r\n%s\r\n' % (name.encode(), data)
        for name, data in parts
    )
    return {"content": body + end, "headers": {"Content-Type": "multipart/form-data; boundary=B"}}


BAD_BODIES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "not an image": ({"content": b"hello, world", "headers": PNG}, 422, "invalid_image", "not an image"),
    "a GIF": ({"content": b"GIF89a" + bytes(99), "headers": PNG}, 422, "invalid_image", "neither JPEG nor PNG"),
    "truncated": ({"content": IMAGE[:-30], "headers": PNG}, 422, "invalid_image", "damaged"),
    "large": ({"content": image_bytes(size=(1001, 1000)), "headers": PNG}, 413, "image_too_large", "1001x1000"),
    "of a form": (
        {"content": IMAGE, "headers": {"Content-Type": "application/x-www-form-urlencoded"}},
        *(415, "unsupported_media_type", "'application/x-www-form-urlencoded' is not supported"),
    ),
    "empty": ({"content": b"", "headers": PNG}, 422, "invalid_body", "empty"),
    "long": (
        {"content": bytes(200_001), "headers": PNG},
        413,
        "body_too_large",
        "200000 bytes; send a smaller image or fewer rows",
    ),
    "other field": (form(("file", IMAGE)), 422, "invalid_body", "'file'; only 'image' is expected"),
    "option in form": (form(("image", IMAGE), ("top_k", b"3")), 422, "invalid_body", "options go into the query"),
    "path without @": (form(("image", b"/a/b.jpg")), 422, "invalid_image", "-F image=@PATH"),
    "no fields": (form(), 422, "invalid_body", "no field 'image'"),
    "cut form": (form(("image", IMAGE), end=b""), 422, "invalid_body", "truncated"),
    "no boundary": ({"content": b"x", "headers": FORM}, 422, "invalid_body", "has no boundary"),
}


def assert_error(response: httpx.Response, status: int, reason: str, says: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()
    assert set(error) == {"error", "reason", "request_id"}
    assert error["reason"] == reason
    assert says in error["error"]
    assert error["request_id"] == response.headers["X-Request-Id"]


@pytest.mark.parametrize("content_type", [None, "image/jpg", "application/octet-stream", "image/webp"])
async def test_image_is_detected_from_the_content(frontend: RunningFrontend, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = await frontend.client.post("/predict", content=IMAGE, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_predict_rejects_a_bad_body(frontend: RunningFrontend, name: str) -> None:
    request, status, reason, says = BAD_BODIES[name]
    response = await frontend.client.post("/predict", **request)
    assert_error(response, status, reason, says)
    assert frontend.predictor.request_ids == []
    assert frontend.sample("multiworld_requests_total", **LABELS, code=str(status), reason=reason) == 1
    await frontend.assert_serves()


@pytest.mark.parametrize(
    ("query", "headers", "says"),
    [
        ("top_k=0", {}, "query top_k: expected a number from 1 to 3, got '0'"),
        ("top_k=4", {}, "expected a number from 1 to 3"),
        ("top_k=many", {}, "got 'many'"),
        ("topk=1", {}, "unknown query parameter 'topk': expected top_k"),
        ("top_k=1&zzz", {}, "unknown query parameter 'zzz': expected top_k"),
        ("", {"X-Request-Timeout-S": "0"}, "greater than 0"),
        ("", {"X-Request-Timeout-S": "inf"}, "finite"),
        ("", {"X-Request-Timeout-S": "soon"}, "header X-Request-Timeout-S: expected seconds"),
    ],
)
async def test_predict_rejects_a_bad_parameter(
    frontend: RunningFrontend, query: str, headers: dict[str, str], says: str
) -> None:
    response = await frontend.client.post(f"/predict?{query}", files={"image": IMAGE}, headers=headers)
    assert_error(response, 422, "invalid_parameter", says)
    await frontend.assert_serves()


async def test_endless_body_is_rejected_at_the_limit(frontend: RunningFrontend) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield bytes(1000)

    response = await frontend.client.post("/predict", content=endless(), headers=PNG)
    assert_error(response, 413, "body_too_large", "larger than the limit")
    assert sent <= MAX_BODY_BYTES + 2000
    await frontend.assert_serves()


async def test_body_gets_408_when_the_timeout_expires() -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield IMAGE[:50]
        await asyncio.Event().wait()

    async with running_frontend(timeout_s=0.05) as frontend:
        response = await frontend.client.post("/predict", content=stalled(), headers=PNG)
        assert_error(response, 408, "body_timeout", "bytes of the body")  # 50, or 0 on a slow machine
        assert response.headers["Connection"] == "close"


# -- rejections ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "status", "retry_after"),
    [
        (errors.OverloadedError("the queue is full", retry_after_s=2.1), 429, "3"),
        (errors.OverloadedError("the queue is full", retry_after_s=0.01), 429, "1"),
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
        assert_error(response, status, failure.reason, failure.detail)
        assert response.headers.get("Retry-After") == retry_after
        assert frontend.sample("multiworld_requests_total", **LABELS, code=str(status), reason=failure.reason) == 1


async def test_predict_returns_500_and_logs_once_when_the_predictor_raises(caplog: pytest.LogCaptureFixture) -> None:
    predictor = ColourPredictor(failure=ZeroDivisionError("our bug"))
    async with running_frontend(predictor) as frontend:
        with caplog.at_level(logging.INFO):
            headers = {**PNG, "X-Request-Id": "r-7"}
            response = await frontend.client.post("/predict", content=IMAGE, headers=headers)
        assert_error(response, 500, "internal", "search its log for the request id")
        assert response.headers["X-Request-Id"] == "r-7"
        assert "our bug" not in response.text
        tracebacks = [record for record in caplog.records if record.exc_info]
        assert len(tracebacks) == 1
        assert "request_id=r-7" in tracebacks[0].getMessage()
        assert frontend.sample("multiworld_requests_total", **LABELS, code="500", reason="internal") == 1
        assert frontend.sample("multiworld_requests_in_flight") == 0
        predictor.failure = None
        await frontend.assert_serves()


async def test_predict_returns_504_when_the_predictor_exceeds_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld_serving.server.frontend.http.open_request.DEADLINE_GRACE_S", 0.0)
    async with running_frontend(ColourPredictor(proceed=asyncio.Event()), timeout_s=3.0) as frontend:
        response = await frontend.client.post("/predict", files={"image": image_bytes()})
        assert_error(response, 504, "deadline", "")
        assert frontend.predictor.cancelled == 1
