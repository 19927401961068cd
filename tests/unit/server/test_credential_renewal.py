"""Reloading keys and certificates: all are used or none, with a log line that says which."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from multiworld_serving.common.config import load
from multiworld_serving.common.config.keys import hash_key
from multiworld_serving.common.http.server import HttpServer
from multiworld_serving.server.auth.authorizer import Authorizer
from multiworld_serving.server.auth.credential_reloader import CredentialReloader, read_credentials
from multiworld_serving.server.settings import FrontendSettings
from tests.certificates import Authority


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a file of keys."""
    (tmp_path / "api.keys").write_text(f"alice:{hash_key('key-of-alice')}\n")
    (tmp_path / "token").write_text("former")
    return tmp_path


def settings(files: Path, **options: Any) -> FrontendSettings:
    given = {"token_file": str(files / "token"), "api_keys_file": str(files / "api.keys"), "leader": "127.0.0.1:1"}
    return load(FrontendSettings, {**given, **options}).with_token()


def names(authorizer: Authorizer) -> list[str]:
    return [key.name for key in authorizer.keys.inference]


def add_bob(files: Path) -> None:
    with (files / "api.keys").open("a") as keys:
        keys.write(f"bob:{hash_key('key-of-bob')}\n")


def reloader(
    given: FrontendSettings, servers: Mapping[str, HttpServer] | None = None
) -> tuple[CredentialReloader, Authorizer]:
    authorizer = Authorizer(read_credentials(given).keys)
    return CredentialReloader(given, authorizer, servers or {}), authorizer


class Port:
    """Records whether it was given another certificate."""

    reloaded = False

    def reload_tls(self, context: object) -> None:
        self.reloaded = True


def ports() -> dict[str, Port]:
    return {"http_port": Port(), "metrics_port": Port()}


async def test_everything_is_used_when_everything_is_valid(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    Authority(files).sign("server")
    servers = ports()
    made, authorizer = reloader(
        settings(files, tls_cert_file=str(files / "server.pem")), cast(Mapping[str, HttpServer], servers)
    )
    add_bob(files)
    await made.reload()
    assert names(authorizer) == ["alice", "bob"]
    assert all(port.reloaded for port in servers.values())
    assert "reloaded keys and certificates keys=2 admin_keys=0" in caplog.text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("api.keys", "alice:no-hash\n"),
        ("api.keys", None),
        ("server.pem", "no certificate"),
        ("server.pem", None),
    ],
)
async def test_nothing_is_used_when_one_file_is_no_good(
    files: Path, file: str, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    Authority(files).sign("server")
    servers = ports()
    made, authorizer = reloader(
        settings(files, tls_cert_file=str(files / "server.pem")), cast(Mapping[str, HttpServer], servers)
    )
    add_bob(files)
    if content is None:
        (files / file).unlink()
    else:
        (files / file).write_text(content)
    await made.reload()
    assert names(authorizer) == ["alice"]
    assert not any(port.reloaded for port in servers.values())
    assert "are unchanged" in caplog.text
    assert not any(record.exc_info for record in caplog.records), "a mistake in a file is not a defect of ours"


async def test_sighup_reloads_only_when_there_are_files(files: Path) -> None:
    before = signal.getsignal(signal.SIGHUP)
    made, authorizer = reloader(FrontendSettings(leader="127.0.0.1:1"))
    made.reload_on_sighup()
    assert signal.getsignal(signal.SIGHUP) is before
    made, authorizer = reloader(settings(files))
    made.reload_on_sighup()
    try:
        add_bob(files)
        signal.raise_signal(signal.SIGHUP)
        async with asyncio.timeout(30):
            while names(authorizer) != ["alice", "bob"]:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


def test_key_of_both_kinds_is_refused(files: Path) -> None:
    with pytest.raises(Exception, match="the same key is used for inference"):
        read_credentials(settings(files, admin_keys_file=str(files / "api.keys")))
