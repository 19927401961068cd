"""Certificates and client certificate authorities that are replaced while a port serves."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.certificates import Authority
from tests.unit.server.frontend_app import image_bytes
from tests.unit.server.http_port import Port, http_port

IMAGE = image_bytes("blue")
ASK = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n%b"


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of the service and its clients."""
    authority = Authority(tmp_path_factory.mktemp("tls"))
    return server_context(authority), ssl.create_default_context(cafile=str(authority.file))


def server_context(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.sign("server"))
    return context


Scenario = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def on_loop(request: pytest.FixtureRequest) -> Scenario:
    """Runs a scenario on an event loop of this kind."""

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(scenario)

    return run


async def answered(port: Port, context: ssl.SSLContext) -> None:
    client = await port.open(context)
    await client.say(ASK % (len(IMAGE), IMAGE))
    assert (await client.answer())[0] == 200
    assert await client.healthy()


def test_new_connections_get_the_replaced_certificate(
    on_loop: Scenario, contexts: tuple[ssl.SSLContext, ssl.SSLContext], tmp_path: Path
) -> None:
    async def scenario() -> None:
        other = Authority(tmp_path, "other")
        async with http_port(context=contexts[0]) as port:
            old = await port.open(contexts[1])
            port.server.reload_tls(server_context(other))
            await answered(port, ssl.create_default_context(cafile=str(other.file)))
            with pytest.raises(ssl.SSLError):
                await port.open(contexts[1])
            assert await old.healthy()

    on_loop(scenario())


def test_new_connections_need_a_certificate_of_the_replaced_authority(on_loop: Scenario, tmp_path: Path) -> None:
    async def scenario() -> None:
        services, former, newest = (Authority(tmp_path, name) for name in ("services", "former", "newest"))

        def accepts(authority: Authority) -> ssl.SSLContext:
            context = server_context(services)
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

    on_loop(scenario())
