"""The settings that a service passes on to its processes, as JSON."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from multiworld import WorldManager
from multiworld_serving.common.config import Settings, SettingsError, UserError, load
from multiworld_serving.common.config.settings import to_json
from multiworld_serving.deploy.processes.programs import frontend_values, leader_values, settings_file
from multiworld_serving.deploy.processes.service import _Service
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.settings import FrontendSettings, ServeSettings

PORTS: dict[str, Any] = {"http_port": 0, "join_port": 0, "metrics_port": 0}


@contextlib.contextmanager
def service(settings: ServeSettings) -> Iterator[_Service]:
    with contextlib.ExitStack() as stack:
        made = _Service(settings.model_copy(update={"local_token": SecretStr("of-the-service")}), stack, print)
        yield made


def passed_on(made: _Service, cls: type[Settings], **changes: object) -> Any:
    """The settings that a program of this service gets."""
    values = leader_values(made._settings, 0) if cls is LeaderSettings else frontend_values(made._settings, 0)
    return cls.model_validate_json(to_json({**values, **changes}))


@pytest.mark.parametrize("cls", [LeaderSettings, FrontendSettings])
def test_program_has_the_settings_of_the_service(cls: type[Settings]) -> None:
    given = ServeSettings(
        **PORTS, queue_limit=17, join_timeout_s=3.5, log_format="json", model="resnet18", trace_ratio=0.5
    )
    changes = {"leader": "127.0.0.1:1"} if cls is FrontendSettings else {}
    with service(given) as made:
        found = passed_on(made, cls, **changes)
    own = {"local_token", "name", *changes}
    if cls is LeaderSettings:
        own |= {"metrics_host", "metrics_port"}
    for name in cls.model_fields.keys() & ServeSettings.model_fields.keys() - own:
        assert getattr(found, name) == getattr(given, name), name
    assert found.secret == b"of-the-service"


def test_leader_accepts_the_tokens_that_the_file_has_now(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("former\n")
    settings = load(ServeSettings, {**PORTS, "token_file": str(file), "external_workers": True}).with_token()
    with service(settings) as made:
        leader = passed_on(made, LeaderSettings)
        frontend = passed_on(made, FrontendSettings, leader="127.0.0.1:1")
        assert set(leader.accepted_secrets) == {b"former", b"of-the-service"}
        for content, tokens in (("new\nformer\n", (b"new", b"former")), ("new", (b"new",))):
            file.write_text(content)
            assert leader.accepted_secrets == (*tokens, b"of-the-service")
        assert frontend.secret == b"of-the-service", "a change of the file cannot lock our own processes out"


def test_file_of_settings_is_in_memory_and_only_this_user_can_read_it() -> None:
    with service(ServeSettings(**PORTS)) as made:
        path = Path(settings_file(made._stack, leader_values(made._settings, 0)))
        assert str(path).startswith(f"/proc/{os.getpid()}/fd/")
        assert path.stat().st_nlink == 0, "it has no name in any folder"
        assert '"local_token": "of-the-service"' in path.read_text()
        folder = path.parent.stat()
        assert (folder.st_uid, folder.st_mode & 0o077) == (os.getuid(), 0)
    assert not path.exists()


@pytest.mark.parametrize(("cls", "needed"), [(ServeSettings, {}), (FrontendSettings, {"leader": "127.0.0.1:1"})])
@pytest.mark.parametrize("missing", ["grpc", "google"])
def test_grpc_port_is_refused_without_its_packages(
    cls: type[Settings], needed: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert load(cls, needed).grpc_port is None  # type: ignore[attr-defined]
    with pytest.raises(SettingsError) as raised:
        load(cls, {**needed, "grpc_port": "8005"})
    assert str(raised.value) == "--grpc-port requires: pip install 'multiworld-serving[grpc]'"


def test_service_keeps_the_grpc_port_for_its_frontends_and_refuses_that_of_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with service(load(ServeSettings, {**PORTS, "grpc_port": "0", "frontends": "2"})) as made:
        found = FrontendSettings.model_validate_json(Path(made._command("frontend", 1)[-1]).read_text())
        assert made._grpc is not None
        assert (found.grpc_port, found.grpc_fd) == (0, made._grpc.fileno())
        assert found.grpc_fd in made._fds("frontend", 1).values()
        host, port = made._grpc.getsockname()
        with socket.socket() as frontend:
            frontend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            frontend.bind((host, port))
            frontend.listen()
            with (
                pytest.raises(UserError, match="choose another --grpc-port"),
                service(load(ServeSettings, {**PORTS, "grpc_port": str(port)})),
            ):
                pass
        with caplog.at_level(logging.INFO):
            made._log_addresses()
        assert f" grpc=127.0.0.1:{port}" in caplog.text


@pytest.mark.parametrize("timeout_s", [0.2, 1.0, 30.0, 600.0])
async def test_worlds_accept_the_heartbeats_of_every_timeout(timeout_s: float) -> None:
    settings = ServeSettings(heartbeat_timeout_s=timeout_s)
    async with WorldManager(**settings.heartbeats):
        assert settings.heartbeats["heartbeat_timeout_s"] == timeout_s
