"""An open request: memory of its body, parsing of Content-Length, and a client that disconnects."""

import asyncio
import tracemalloc
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive

from multiworld_serving.common.service.errors import BodyTooLargeError
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.http.open_request import OpenRequest, RequestGate, while_connected
from multiworld_serving.server.frontend.observability.request_records import RequestRecord
from tests.unit.server.frontend_app import ColourPredictor

CHUNK = bytes(2**16)


def gate(max_bytes: int = 2**16) -> RequestGate:
    return RequestGate(ColourPredictor(), RequestLimits(max_body_bytes=max_bytes, max_held_bytes=max_bytes))


def opened(shared: RequestGate, receive: Receive, timeout_s: float | None = None) -> OpenRequest:
    return OpenRequest(shared, RequestRecord("id", "v"), receive, timeout_s)


def request(chunks: int, **headers: str) -> Request:
    """A request whose body arrives in this many pieces."""
    left = iter(range(chunks, -1, -1))

    async def receive() -> Message:
        return {"type": "http.request", "body": CHUNK[:] if (count := next(left)) else b"", "more_body": count > 0}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw}, receive)


async def test_body_memory_is_close_to_the_counted_bytes_when_read_completely() -> None:
    shared, sent = gate(2**25), request(200)
    size = 200 * len(CHUNK)
    tracemalloc.start()
    try:
        async with opened(shared, sent.receive) as reading:
            body = await reading.body(sent)
            now, peak = tracemalloc.get_traced_memory()
            assert (len(body), shared.held_bytes) == (size, size)
            reading.release()
            assert shared.held_bytes == 0
    finally:
        tracemalloc.stop()
    assert now < 1.1 * size
    assert peak < 1.5 * size


@pytest.mark.parametrize(
    ("length", "fits"),
    [
        ("0" * 5000 + "65536", True),
        ("0" * 5000 + "65537", False),
        ("9" * 4000, False),
    ],
)
async def test_body_is_read_only_when_its_content_length_fits(length: str, fits: bool) -> None:
    sent = request(1 if fits else 0, content_length=length)
    async with opened(shared := gate(), sent.receive) as reading:
        if fits:
            assert len(await reading.body(sent)) == len(CHUNK)
        else:
            with pytest.raises(BodyTooLargeError):
                await reading.body(sent)
    assert shared.held_bytes == 0


async def test_work_completes_when_the_client_disconnects_at_the_same_time() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    goes = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await goes.wait()
        return {"type": "http.disconnect"}

    async def work() -> str:
        await asyncio.sleep(0)
        goes.set()
        await asyncio.sleep(0)  # now the disconnect is known, and the work ends at the same time
        return "done"

    assert await while_connected(receive, work()) == "done"
    await asyncio.sleep(0)
    assert complaints == []
