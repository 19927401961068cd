"""The settings that a service passes on to its processes, as JSON."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from multiworld import WorldManager
from multiworld_serving.cli.main import main
from multiworld_serving.common.config.errors import SettingsError, UserError
from multiworld_serving.common.config.settings import Settings, to_json
from multiworld_serving.common.config.sources import load
from multiworld_serving.common.service.model_files import served_name
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings, ServeSettings
from multiworld_serving.server.supervisor.model_settings import by_name
from multiworld_serving.server.supervisor.programs import frontend_values, leader_values, memory_file

PORTS: dict[str, Any] = {"http_port": 0, "join_port": 0, "admin_port": 0}


LOCAL = {"local_token": SecretStr("of-the-service")}


def passed_on(settings: ServeSettings, cls: type[Settings], **changes: object) -> Any:
    """The settings that a program of this service gets."""
    values = leader_values(settings, 0) if cls is LeaderSettings else frontend_values(settings, 0)
    return cls.model_validate_json(to_json({**values, **LOCAL, **changes}))


@pytest.mark.parametrize("cls", [LeaderSettings, FrontendSettings])
def test_program_has_the_settings_of_the_service(cls: type[Settings]) -> None:
    given = ServeSettings(
        **PORTS, queue_limit=17, join_timeout_s=3.5, log_format="json", model="resnet18", trace_ratio=0.5
    )
    changes = {"leader": "127.0.0.1:1"} if cls is FrontendSettings else {}
    found = passed_on(given, cls, **changes)
    own = {"local_token", "name", *changes}
    for name in cls.model_fields.keys() & ServeSettings.model_fields.keys() - own:
        assert getattr(found, name) == getattr(given, name), name
    assert found.secret == b"of-the-service"


def test_leader_accepts_the_tokens_that_the_file_has_now(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("former\n")
    settings = load(ServeSettings, {**PORTS, "token_file": str(file), "external_workers": True}).with_token()
    assert settings.secret == b"former"
    leader = passed_on(settings, LeaderSettings)
    frontend = passed_on(settings, FrontendSettings, leader="127.0.0.1:1")
    assert set(leader.accepted_secrets) == {b"former", b"of-the-service"}
    for content, tokens in (("new\nformer\n", (b"new", b"former")), ("new", (b"new",))):
        file.write_text(content)
        assert leader.accepted_secrets == (*tokens, b"of-the-service")
    assert frontend.secret == b"of-the-service", "a change of the file cannot lock our own processes out"


def test_frontend_with_a_token_file_has_settings_for_each_model(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("open-sesame")
    settings = load(FrontendSettings, {"token_file": str(file), "leader": "a=h:1,b=h:2"}).with_token()
    assert {name: (each.leader, each.secret) for name, each in settings.models.items()} == {
        "a": ("h:1", b"open-sesame"),
        "b": ("h:2", b"open-sesame"),
    }


def test_file_of_settings_is_in_memory_and_only_this_user_can_read_it() -> None:
    settings = ServeSettings(**PORTS).model_copy(update=LOCAL)
    with contextlib.ExitStack() as stack:
        path = Path(memory_file(stack, "settings", to_json(leader_values(settings, 0))))
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


@pytest.mark.parametrize("timeout_s", [0.2, 1.0, 30.0, 600.0])
async def test_worlds_accept_the_heartbeats_of_every_timeout(timeout_s: float) -> None:
    settings = ServeSettings(heartbeat_timeout_s=timeout_s)
    async with WorldManager(**settings.heartbeats):
        assert settings.heartbeats["heartbeat_timeout_s"] == timeout_s


def models_of(toml: str, folder: Path, **options: object) -> dict[str, ServeSettings]:
    file = folder / "service.toml"
    file.write_text(toml)
    settings = load(ServeSettings, {**PORTS, **options}, config_file=file)
    return {served_name(each): each for each in settings.groups}


TWO = """
[serve]
replicas = 3
[[models]]
name = "images"
source = "resnet18"
stages = 1
[[models]]
name = "text"
source = "some.bundle"
leaders = 2
timeout_s = 5
"""


def test_each_model_has_its_own_settings_and_those_of_the_service(tmp_path: Path) -> None:
    found = models_of(TWO, tmp_path)
    assert list(found) == ["images", "text"]
    images, text = found.values()
    assert (images.model_source, images.stages, images.replicas, images.leaders) == ("resnet18", 1, 3, 1)
    assert (text.model_source, text.stages, text.replicas, text.leaders, text.timeout_s) == ("some.bundle", 2, 3, 2, 5)


def test_printed_settings_end_with_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "service.toml").write_text(TWO)
    assert main(["serve", "--config", str(tmp_path / "service.toml"), "--print-settings"]) == 0
    common, *tables = capsys.readouterr().out.split("\n[[models]]\n")
    assert "replicas = 3\n" in common
    assert "\nmodel = " not in common
    assert tables[1] == "name = text\nsource = some.bundle\nleaders = 2\ntimeout_s = 5\n"


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ('[[models]]\nsource = "resnet18"', "name = None"),
        ('[[models]]\nname = "a/b"\nsource = "resnet18"', "name = 'a/b'"),
        ('[[models]]\nname = "a"', "source of the model a is missing"),
        ('[[models]]\nname = "a"\nsource = "x"\nstages = 0', "model a=x: stages = 0: must be a whole number from 1"),
        (
            '[[models]]\nname = "a"\nsource = "x"\nhttp_port = 1',
            "http_port of the model a=x: this setting belongs into [serve]",
        ),
        (
            '[[models]]\nname = "a"\nsource = "x"\nstagez = 1',
            "unknown setting stagez of the model a=x: did you mean stages?",
        ),
        ("models = 3", "must be tables"),
        ('[[models]]\nname = "a"\nsource = "x"\n[serve]\nmodel = "resnet18"', "mutually exclusive"),
    ],
)
def test_invalid_table_of_a_model_is_refused_with_its_name(toml: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        models_of(toml, tmp_path)
    assert says in str(raised.value)


def test_models_of_the_command_line_may_have_names(tmp_path: Path) -> None:
    (tmp_path / "broken.bundle").write_text("")
    found = load(ServeSettings, {**PORTS, "model": f"resnet18,large=resnet50,{tmp_path}/broken.bundle"}).groups
    assert [served_name(each) for each in found] == ["resnet18", "large", "broken"]
    assert [each.join_port for each in load(ServeSettings, {"model": "a,b"}).groups] == [8001, 0]
    with pytest.raises(UserError, match="two models have the name 'a'"):
        by_name(load(ServeSettings, {**PORTS, "model": "a=resnet18,a=resnet50"}).groups)


def test_frontend_has_the_leaders_and_limits_of_each_model() -> None:
    given = "a=127.0.0.1:1,127.0.0.1:2,b=127.0.0.1:3"
    settings = FrontendSettings(leader=given, model_settings={"b": {"timeout_s": 7.0}})
    found = {name: (",".join(map(str, each.leaders)), each.timeout_s) for name, each in settings.models.items()}
    assert found == {"a": ("127.0.0.1:1,127.0.0.1:2", 30.0), "b": ("127.0.0.1:3", 7.0)}
    for wrong in ("127.0.0.1:1,b=127.0.0.1:2", "=127.0.0.1:1", "a=nowhere"):
        with pytest.raises(SettingsError, match="--leader"):
            load(FrontendSettings, {"leader": wrong})
