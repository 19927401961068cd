"""Hostile inputs to a frontend, and to HAProxy with `deploy/haproxy/haproxy.cfg` in front of two; a killed frontend, and an upgrade."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from multiworld_serving.testing.load.clients import Load, run_load
from multiworld_serving.testing.load.images import photos
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import LocalService, LogLine, start_program
from tests.e2e.hostile_connections import HOSTILE_CONNECTIONS, SILENT, SLOW_HEAD, HostileConnections, ask, attack
from tests.e2e.hostile_requests import BODY_LIMIT, HOSTILE_REQUESTS, HostileRequest
from tests.nursery import ForkedProcess
from tests.programs import free_port, process, program
from tests.services import external_frontend, small_service
from tests.waiting import wait_for_more, wait_until

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "haproxy"


@dataclass(frozen=True)
class Frontend:
    """A frontend with a port of its own."""

    url: str
    process: ForkedProcess
    log: Path

    @property
    def port(self) -> int:
        return int(urlsplit(self.url).port or 0)


@contextlib.contextmanager
def proxy(folder: Path, *urls: str, checks: str = "", **environment: str) -> Iterator[int]:
    """HAProxy in front of these frontends: its port."""
    servers = [f"    server frontend-{index} {urlsplit(url).netloc} {checks}" for index, url in enumerate(urls)]
    (folder / "servers.cfg").write_text("\n".join(["backend frontends", *servers, ""]))
    port = free_port()
    given = {"PROXY_BIND": f"127.0.0.1:{port}", **environment}
    command = ["env", *(f"{name}={value}" for name, value in given.items()), program("haproxy"), "-db"]
    command += ["-f", str(FOLDER / "haproxy.cfg"), "-f", str(folder / "servers.cfg")]
    with (folder / "haproxy.log").open("wb") as log, process(*command, log=log):
        wait_until(lambda: ready(port))
        yield port


def load_on(port: int, **options: Any) -> contextlib.AbstractContextManager[Load]:
    url = f"http://127.0.0.1:{port}"
    return run_load(url, served_requests(url, photos(4)), **options)


def ready(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    return False


@pytest.fixture(scope="module")
def service(token_file: Path) -> Iterator[LocalService]:
    with small_service(token_file=token_file) as running:
        yield running


@pytest.fixture(scope="module")
def frontends(service: LocalService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Frontend, ...]]:
    folder, limits = tmp_path_factory.mktemp("frontends"), {"max_body_bytes": BODY_LIMIT, "timeout_s": 20}
    with contextlib.ExitStack() as stack:
        made = {
            name: stack.enter_context(external_frontend(service, name, folder, **limits))
            for name in ("first", "second")
        }
        yield tuple(Frontend(url, running, folder / f"{name}.log") for name, (url, running) in made.items())


@pytest.fixture(scope="module")
def proxied(frontends: tuple[Frontend, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of HAProxy in front of both frontends."""
    with proxy(tmp_path_factory.mktemp("haproxy"), *(each.url for each in frontends)) as port:
        yield port


async def wrong_ends(port: int) -> list[str]:
    """How requests and connections ended that did not end as they must. All connections are open at the same time."""
    wrong = []
    for request in HOSTILE_REQUESTS:
        if (found := await ask("127.0.0.1", port, request)) != request.answer:
            wrong.append(f"{request.name}: {found}, not {request.answer}")
    attacks = await asyncio.gather(*(attack("127.0.0.1", port, each) for each in HOSTILE_CONNECTIONS))
    for hostile, ends in zip(HOSTILE_CONNECTIONS, attacks, strict=True):
        if not ends.keys() <= set(hostile.answer.split(" or ")):
            wrong.append(f"{hostile.name}: {ends}, not {hostile.answer}")
    return wrong


def test_hostile_inputs_get_their_responses_and_do_not_affect_other_requests(frontends: tuple[Frontend, ...]) -> None:
    frontend, _ = frontends
    with load_on(frontend.port, rate_hz=20) as load:
        assert not asyncio.run(wrong_ends(frontend.port))
    assert load.samples
    assert not load.failed, load.failed[:3]
    assert "Traceback" not in frontend.log.read_text()


@pytest.mark.parametrize("hostile", [each for each in HOSTILE_REQUESTS if each.proxied], ids=lambda each: each.name)
def test_hostile_request_gets_another_response_through_the_proxy(proxied: int, hostile: HostileRequest) -> None:
    assert asyncio.run(ask("127.0.0.1", proxied, hostile, hostile.proxied)) in hostile.proxied.split(" or ")


@pytest.mark.parametrize("hostile", [SILENT, SLOW_HEAD], ids=lambda each: each.name)
def test_slow_client_is_disconnected_by_the_proxy(proxied: int, hostile: HostileConnections) -> None:
    with load_on(proxied, rate_hz=20) as load:
        ends = asyncio.run(attack("127.0.0.1", proxied, hostile))
    assert ends.keys() <= set(hostile.answer.split(" or ")), ends
    assert load.samples
    assert not load.failed, load.failed[:3]


def test_connections_of_one_address_are_limited(service: LocalService, tmp_path: Path) -> None:
    async def is_served(port: int, opened: list[asyncio.StreamWriter]) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            return await reader.read(1) != b""
        except OSError:
            return False

    async def served(port: int) -> int:
        """The number of connections that are served, of ten that are open at the same time."""
        opened: list[asyncio.StreamWriter] = []
        found = await asyncio.gather(*(is_served(port, opened) for _ in range(10)))
        for writer in opened:
            writer.transport.abort()
        return found.count(True)

    with proxy(tmp_path, service.url, MAX_CONNECTIONS_PER_SOURCE="5") as port:
        # At first, HAProxy may still count the connection that has waited until it was ready.
        wait_until(lambda: asyncio.run(served(port)) == 5)


def test_no_request_fails_when_one_frontend_is_killed(proxied: int, frontends: tuple[Frontend, ...]) -> None:
    with load_on(proxied, clients=8) as load:
        wait_for_more(load.samples, 50)
        frontends[0].process.kill()
        wait_for_more(load.samples, 100)
    assert not load.failed, load.failed[:3]


def supervisor_says(text: str, line: LogLine) -> bool:
    return line["process"] == "supervisor" and line.message.startswith(text)


def test_no_request_fails_when_the_service_is_upgraded_or_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalService, "start_program", staticmethod(start_program))  # a fork has no command line

    def upgrade(settings: str, *expected: str) -> None:
        config.write_text(settings)
        seen = len(service.lines)
        os.kill(service.pid, signal.SIGUSR2)
        for text in expected:
            service.wait_for(partial(supervisor_says, text), 120.0, after=seen)

    config = tmp_path / "settings.toml"
    config.write_text("[serve]\nstages = 1\nreplicas = 1\n")
    with (
        LocalService(
            model="resnet18",
            weights="random:0",
            image_size=32,
            config=config,
            heartbeat_timeout_s=10,
            recovery_grace_s=60,
        ) as service,
        proxy(tmp_path, service.url, checks="fall 20") as port,  # a busy machine may stop the only frontend for seconds
    ):
        with load_on(port, rate_hz=20) as load:
            upgrade(
                "[serve]\nstages = 0\n", "no upgrade, and this service continues: the new supervisor ended status=2"
            )
            assert len(service.status()["stages"]) == 1
            upgrade("[serve]\nstages = 2\nreplicas = 1\n", "upgraded", "stopped")
            assert len(service.status()["stages"]) == 2
            wait_for_more(load.samples, 50)
        assert not load.failed, load.failed[:3]
        assert service.stop() == 0
