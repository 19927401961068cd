"""What the HTTP port does below the application: malformed requests, limits, and clients that go away."""

import asyncio

import pytest

from tests.unit.server.frontend_app import MODEL, ColourPredictor, image_bytes
from tests.unit.server.http_port import http_port
from tests.waiting import until

IMAGE = image_bytes("blue")
ASK = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"


async def test_connection_is_closed_when_it_is_idle() -> None:
    async with http_port(keep_alive_s=1) as port:
        client = await port.open()
        assert await client.healthy()
        assert await client.rest() == b""


async def test_requests_get_503_while_too_many_connections_are_open() -> None:
    async with http_port(max_connections=3) as port:
        clients = [await port.open() for _ in range(4)]
        await port.until_open(4)
        await clients[3].say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await clients[3].rest()).startswith(b"HTTP/1.1 503 ")
        await port.until_open(3)
        assert await clients[0].healthy()


@pytest.mark.parametrize("sent", [0, 20, len(IMAGE) + 100])
async def test_half_closed_connection_is_closed_immediately(sent: int) -> None:
    """A half-closed connection looks like a dead client, for which nothing is computed."""
    async with http_port(ColourPredictor(proceed=asyncio.Event())) as port:
        client = await port.open()
        whole = ASK % len(IMAGE) + IMAGE
        await client.say(whole[:sent] if sent <= len(IMAGE) else whole)
        if sent > len(IMAGE):
            await port.predictor.asked_times(1)
        client.writer.write_eof()
        assert await client.rest() == b""
        await port.until_open(0)
        await until(lambda: port.sample("multiworld_requests_in_flight") == 0)
        assert port.predictor.cancelled == (sent > len(IMAGE))
        labels = {"model": MODEL.name, "version": MODEL.version, "protocol": "predict"}
        withdrawn = port.sample("multiworld_requests_total", **labels, code="499", reason="cancelled")
        assert (withdrawn or 0) == (sent > len(IMAGE))


async def test_connection_ends_with_its_next_response_when_the_server_stops() -> None:
    async with http_port() as port:
        client = await port.open()
        assert await client.healthy()
        port.server.should_exit = True
        await until(lambda: (b"connection", b"close") in port.server.server_state.default_headers)
        assert await client.healthy(), "the client has sent it before it knows that the server stops"
        assert await client.rest() == b""
        await asyncio.wait_for(port.server.stopped.wait(), 60)


async def test_request_that_is_open_when_the_server_ends_gets_a_clear_503() -> None:
    async with http_port(ColourPredictor(proceed=asyncio.Event()), close_s=1) as port:
        client = await port.open()
        await client.say(ASK % len(IMAGE), IMAGE)
        await port.predictor.asked_times(1)
        port.server.should_exit = True
        status, body = await client.answer()
        assert (status, body["reason"]) == (503, "draining")
        assert await client.rest() == b""
