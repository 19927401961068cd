"""Bad input gets an error in the common format, and the service continues."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.unit.server.frontend_app import RunningFrontend, image_bytes, png, running_frontend

MAX_BODY_BYTES = 200_000
PNG = {"Content-Type": "image/png"}
IMAGE = image_bytes()
BOMB = png((b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""), size=(20_000, 20_000))
"""Its header says that it is large, which costs nothing."""


@pytest.fixture
async def frontend() -> AsyncIterator[RunningFrontend]:
    async with running_frontend(max_body_bytes=MAX_BODY_BYTES, max_image_pixels=1_000_000) as running:
        yield running


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
    "1x1": ({"content": image_bytes(size=(1, 1)), "headers": PNG}, 422, "invalid_image", "at least 8x8"),
    "bomb": ({"content": BOMB, "headers": PNG}, 413, "image_too_large", "20000x20000"),
    "no type": ({"content": IMAGE}, 415, "unsupported_media_type", "there is no content type"),
    "empty": ({"content": b"", "headers": PNG}, 422, "invalid_body", "empty"),
    "too long": (
        {"content": bytes(MAX_BODY_BYTES + 1), "headers": PNG},
        413,
        "body_too_large",
        f"limit of {MAX_BODY_BYTES} bytes",
    ),
    "other field": (form(("file", IMAGE)), 422, "invalid_body", "'file'; only 'image' is expected"),
    "option in form": (form(("image", IMAGE), ("top_k", b"3")), 422, "invalid_body", "options go into the query"),
    "no fields": (form(), 422, "invalid_body", "no field 'image'"),
    "cut form": (form(("image", IMAGE), end=b""), 422, "invalid_body", "truncated"),
    "no boundary": (
        {"content": b"x", "headers": {"Content-Type": "multipart/form-data"}},
        422,
        "invalid_body",
        "has no boundary",
    ),
}


def assert_error(response: httpx.Response, status: int, reason: str, says: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()
    assert set(error) == {"error", "reason", "request_id"}
    assert error["reason"] == reason
    assert says in error["error"]
    assert error["request_id"] == response.headers["X-Request-Id"]


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_predict_rejects_a_bad_body(frontend: RunningFrontend, name: str) -> None:
    request, status, reason, says = BAD_BODIES[name]
    response = await frontend.client.post("/predict", **request)
    assert_error(response, status, reason, says)
    assert frontend.predictor.request_ids == []
    labels = {"model": "meancolour", "version": "weights v1 ü", "protocol": "predict"}
    assert frontend.sample("multiworld_requests_total", **labels, code=str(status), reason=reason) == 1
    await frontend.assert_serves()


@pytest.mark.parametrize(
    ("query", "headers", "says"),
    [
        ("top_k=0", {}, "query top_k: expected a number from 1 to 3, got '0'"),
        ("top_k=4", {}, "expected a number from 1 to 3"),
        ("top_k=many", {}, "got 'many'"),
        ("", {"X-Request-Timeout-S": "0"}, "greater than 0"),
        ("", {"X-Request-Timeout-S": "-1"}, "greater than 0"),
        ("", {"X-Request-Timeout-S": "nan"}, "finite"),
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


async def test_body_is_rejected_when_all_bodies_exceed_the_memory_limit() -> None:
    proceed, begun = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield IMAGE[:100]
        begun.set()
        await proceed.wait()
        yield IMAGE[100:]

    async with running_frontend(max_body_bytes=len(IMAGE) + 50, max_held_bytes=len(IMAGE) + 50) as frontend:
        first = asyncio.create_task(frontend.client.post("/predict", content=slow(), headers=PNG))
        await begun.wait()
        refused = await frontend.client.post("/predict", content=IMAGE, headers=PNG)
        proceed.set()
        assert (await first).status_code == 200
        assert_error(refused, 429, "overloaded", "try again later")
        assert refused.headers["Retry-After"] == "1"
        answered = await frontend.client.post("/predict", content=IMAGE, headers=PNG)
        assert answered.status_code == 200
