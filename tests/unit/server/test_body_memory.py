"""Memory of request bodies, and parsing of Content-Length."""

import math
import tracemalloc

import pytest
from starlette.requests import Request
from starlette.types import Message

from multiworld_serving.server.errors import BodyTooLargeError
from multiworld_serving.server.http.body import BodyReader

CHUNK = bytes(2**16)


def request(chunks: int, **headers: str) -> Request:
    """A request whose body arrives in this many pieces."""
    left = iter(range(chunks, -1, -1))

    async def receive() -> Message:
        return {"type": "http.request", "body": CHUNK[:] if (count := next(left)) else b"", "more_body": count > 0}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw}, receive)


async def test_body_memory_is_close_to_the_counted_bytes_when_read_completely() -> None:
    reader = BodyReader(max_body_bytes=2**25, max_held_bytes=2**25)
    size = 200 * len(CHUNK)
    tracemalloc.start()
    try:
        async with reader.read(request(200), deadline_s=math.inf) as body:
            now, peak = tracemalloc.get_traced_memory()
            assert (len(body), reader.held_bytes) == (size, size)
    finally:
        tracemalloc.stop()
    assert now < 1.1 * size
    assert peak < 1.5 * size
    assert reader.held_bytes == 0


@pytest.mark.parametrize("length", ["0" * 5000, "0" * 5000 + "65536"])
async def test_body_is_read_when_content_length_has_thousands_of_zeros(length: str) -> None:
    reader = BodyReader(max_body_bytes=2**16, max_held_bytes=2**16)
    async with reader.read(request(1, content_length=length), deadline_s=math.inf) as body:
        assert len(body) == len(CHUNK)


@pytest.mark.parametrize("length", ["65537", "0" * 5000 + "65537", "9" * 4000])
async def test_body_is_rejected_unread_when_content_length_is_too_large(length: str) -> None:
    reader = BodyReader(max_body_bytes=2**16, max_held_bytes=2**16)
    with pytest.raises(BodyTooLargeError):
        async with reader.read(request(0, content_length=length), deadline_s=math.inf):
            pass
