"""Reloading keys, tokens and certificates: applied everywhere or nowhere, with a log line that says which."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from multiworld_serving.common.config import UserError, load
from multiworld_serving.common.config.keys import hash_key
from multiworld_serving.server.auth.authorizer import Authorizer
from multiworld_serving.server.auth.credential_reloader import CredentialReloader, read_credentials
from multiworld_serving.server.auth.join_tokens import JoinTokens
from multiworld_serving.server.frontends.frames import FrameConnection
from multiworld_serving.server.frontends.manager import FrontendManager, FrontendSession
from multiworld_serving.server.frontends.process import _Frontend
from multiworld_serving.server.http.server import HttpServer
from multiworld_serving.server.settings import ServeSettings
from tests.certificates import Authority


class Frontends:
    """Records calls, and fails to prepare on demand."""

    def __init__(self, failure: str = "") -> None:
        self.failure = failure
        self.done: list[str] = []
        self.proceed = asyncio.Event()
        self.proceed.set()

    async def prepare_credentials(self) -> None:
        self.done.append("prepare")
        await self.proceed.wait()
        if self.failure:
            raise UserError(self.failure)

    async def apply_credentials(self) -> Mapping[str, str]:
        self.done.append("use")
        return {}

    async def reload(self) -> None:
        self.done.append("use")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a file of keys and one of tokens."""
    (tmp_path / "api.keys").write_text(f"alice:{hash_key('key-of-alice')}\n")
    (tmp_path / "token").write_text("former")
    return tmp_path


def settings(files: Path, **options: Any) -> ServeSettings:
    given = {"token_file": str(files / "token"), "api_keys_file": str(files / "api.keys"), "external_workers": True}
    return load(ServeSettings, {**given, **options}).with_token()


def names(authorizer: Authorizer) -> list[str]:
    return [key.name for key in authorizer.keys.inference]


def add_bob(files: Path) -> None:
    with (files / "api.keys").open("a") as keys:
        keys.write(f"bob:{hash_key('key-of-bob')}\n")


def renewal(
    given: ServeSettings, frontends: Frontends | None = None, servers: Mapping[str, HttpServer] | None = None
) -> tuple[CredentialReloader, Authorizer]:
    tokens = JoinTokens(given, lambda *secrets: None)
    authorizer = Authorizer(read_credentials(given).keys, tokens.admin_tokens())
    return CredentialReloader(given, authorizer, tokens, servers or {}, frontends), authorizer


async def test_frontends_are_unchanged_when_tokens_are_invalid(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    frontends = Frontends()
    made, authorizer = renewal(settings(files), frontends)
    add_bob(files)
    (files / "token").write_text("two words")
    await made.reload()
    assert "use" not in frontends.done
    assert names(authorizer) == ["alice"]
    assert "are unchanged" in caplog.text


async def test_leader_is_unchanged_when_a_frontend_fails_to_prepare(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, authorizer = renewal(settings(files), Frontends("frontend-1 cannot use the new ones (no memory)"))
    add_bob(files)
    (files / "token").write_text("new")
    await made.reload()
    assert (names(authorizer), authorizer.tokens) == (["alice"], (b"former",))
    assert "frontend-1 cannot use the new ones (no memory)" in caplog.text
    assert "reloaded keys" not in caplog.text


class Port:
    """Records whether it was given another certificate."""

    reloaded = False

    def reload_tls(self, context: object) -> None:
        self.reloaded = True


@pytest.mark.parametrize("failure", ["frontend-1 cannot use the new ones (no memory)", None])
async def test_port_reloads_its_certificate_only_when_all_frontends_prepared(files: Path, failure: str | None) -> None:
    Authority(files).sign("server")
    port = Port()
    given = settings(files, tls_cert_file=str(files / "server.pem"))
    made, authorizer = renewal(given, Frontends(failure or ""), cast(Mapping[str, HttpServer], {"http_port": port}))
    add_bob(files)
    await made.reload()
    assert port.reloaded == (failure is None)
    assert names(authorizer) == (["alice"] if failure else ["alice", "bob"])


async def test_reload_repeats_when_sighup_arrives_during_a_reload(files: Path) -> None:
    frontends = Frontends()
    frontends.proceed.clear()
    made, authorizer = renewal(settings(files), frontends)
    made.request_reload()
    async with asyncio.timeout(30):
        while not frontends.done:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        add_bob(files)
        made.request_reload()
        frontends.proceed.set()
        assert made._task is not None
        await made._task
    assert names(authorizer) == ["alice", "bob"]


class Served:
    """A manager and two connected frontends; neither serves clients."""

    def __init__(self, given: ServeSettings) -> None:
        self.settings, self.former = given, read_credentials(given).keys
        none = cast(Any, None)
        self.manager = FrontendManager(given, none, none, none, none, none, none, none)
        self.gates: list[Authorizer] = []
        self.frontends: list[_Frontend] = []

    async def connect(self, name: str) -> None:
        loop, pair = asyncio.get_running_loop(), socket.socketpair()
        guest, frontend = FrontendSession(self.manager), _Frontend()
        links: tuple[FrameConnection, FrameConnection] = (guest.link, frontend.link)
        for link, end in zip(links, pair, strict=True):
            await loop.create_connection(lambda link=link: link, sock=end)  # type: ignore[misc]
        guest.name = name
        self.manager.on_connected(guest)
        self.gates.append(Authorizer(self.former))
        frontend._settings = self.settings
        frontend._server.set_result((cast(HttpServer, None), self.gates[-1]))
        self.frontends.append(frontend)

    def close(self) -> None:
        for frontend in self.frontends:
            frontend.link.close()


async def test_no_frontend_uses_new_keys_when_one_of_them_cannot(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(settings(files))
    for name in ("frontend-0", "frontend-1"):
        await served.connect(name)
    add_bob(files)

    async def fails(files: object) -> None:
        raise OSError(24, "Too many open files")

    async with asyncio.timeout(30):
        with monkeypatch.context() as patched:
            patched.setattr(served.frontends[1], "_prepare", fails)
            with pytest.raises(UserError, match=r"frontend-1 cannot use the new ones .*Too many open files"):
                await served.manager.prepare_credentials()
        assert [names(authorizer) for authorizer in served.gates] == [["alice"], ["alice"]]
        await served.manager.prepare_credentials()
        assert [names(authorizer) for authorizer in served.gates] == [["alice"], ["alice"]]
        assert await served.manager.apply_credentials() == {}
        assert [names(authorizer) for authorizer in served.gates] == [["alice", "bob"]] * 2
    served.close()


async def test_frontend_has_the_new_keys_when_it_connects_during_prepare(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(settings(files))
    await served.connect("frontend-0")
    before = served.frontends[0]._prepare

    async def late(files: Mapping[str, str]) -> None:
        await served.connect("frontend-1")
        await before(files)

    monkeypatch.setattr(served.frontends[0], "_prepare", late)
    add_bob(files)
    async with asyncio.timeout(30):
        await served.manager.prepare_credentials()
        await served.manager.apply_credentials()
    assert [names(authorizer) for authorizer in served.gates] == [["alice", "bob"]] * 2
    served.close()
