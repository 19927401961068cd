"""Certificates and client certificate authorities that are replaced while a port serves."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.unit.server.frontend_app import image_bytes
from tests.unit.server.http_port import Port, http_port

IMAGE = image_bytes("blue")
ASK = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n%b"


def server_context(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.sign("server"))
    return context


async def answered(port: Port, context: ssl.SSLContext) -> None:
    client = await port.open(context)
    await client.say(ASK % (len(IMAGE), IMAGE))
    assert (await client.answer())[0] == 200
    assert await client.healthy()


async def test_new_connections_need_a_certificate_of_the_replaced_authority(tmp_path: Path) -> None:
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
