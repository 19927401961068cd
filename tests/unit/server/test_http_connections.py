"""What the HTTP port does below the application: malformed requests, limits, clients that go away, and new certificates."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.unit.server.frontend_app import MODEL, ColourPredictor, image_bytes
from tests.unit.server.http_port import Port, http_port
from tests.waiting import until

IMAGE = image_bytes("blue")
ASK = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"


async def test_connection_is_closed_when_it_is_idle() -> None:
    async with http_port(keep_alive_s=1) as port:
        client = await port.open()
        assert await client.healthy()
        assert await client.rest() == b""


@pytest.mark.parametrize("sent", [0, 20, len(IMAGE) + 100])
async def test_half_closed_connection_is_closed_immediately(sent: int) -> None:
    """A half-closed connection looks like a dead client, for which nothing is computed."""
    async with http_port(ColourPredictor(proceed=asyncio.Event())) as port:
        client = await port.open()
        whole = ASK % len(IMAGE) + IMAGE
        await client.say(whole[:sent] if sent <= len(IMAGE) else whole)
        if sent > len(IMAGE):
            await port.frontend.predictor.asked.acquire()
        client.writer.write_eof()
        assert await client.rest() == b""
        await port.until_open(0)
        await until(lambda: port.frontend.sample("multiworld_requests_in_flight") == 0)
        assert port.frontend.predictor.cancelled == (sent > len(IMAGE))
        labels = {"model": MODEL.name, "version": MODEL.version, "protocol": "predict"}
        withdrawn = port.frontend.sample("multiworld_requests_total", **labels, code="499", reason="cancelled")
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
        await port.frontend.predictor.asked.acquire()
        port.server.should_exit = True
        status, body = await client.answer()
        assert (status, body["reason"]) == (503, "draining")
        assert await client.rest() == b""


# -- TLS -----------------------------------------------------------------------------------------------------------------------


async def answered(port: Port, context: ssl.SSLContext) -> None:
    client = await port.open(context)
    await client.say(ASK % len(IMAGE), IMAGE)
    assert (await client.answer())[0] == 200
    assert await client.healthy()


async def test_new_connections_need_a_certificate_of_the_replaced_authority(tmp_path: Path) -> None:
    services, former, newest = (Authority(tmp_path, name) for name in ("services", "former", "newest"))

    def accepts(authority: Authority) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(services.sign("server"))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority.file)
        return context

    def client_with(authority: Authority) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(services.file))
        context.load_cert_chain(authority.sign("client"))
        return context

    async with http_port(context=accepts(former)) as port:
        await answered(port, client_with(former))
        port.server.reload_tls(accepts(newest))
        await answered(port, client_with(newest))
        refused = await port.open(client_with(former))
        with suppress(OSError):  # with TLS 1.3 a client learns of the refusal when it reads
            await refused.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await refused.answer()
