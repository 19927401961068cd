"""Settings from the command line, the environment, a TOML file and the defaults."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.common.config.settings import Settings
from multiworld_serving.common.config.sources import load, option, variable
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import ServeSettings
from multiworld_serving.common.settings.worker import WorkerSettings

PROGRAMS = (ServeSettings, WorkerSettings)
WriteToml = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("MULTIWORLD_"):
            monkeypatch.delenv(name)


@pytest.fixture
def toml(tmp_path: Path) -> WriteToml:
    def write(text: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return path

    return write


def serve(config_file: Path | None = None, **options: Any) -> ServeSettings:
    return load(ServeSettings, options, config_file=config_file, programs=PROGRAMS)


def worker(config_file: Path | None = None, **options: Any) -> WorkerSettings:
    return load(WorkerSettings, {"leader": "127.0.0.1:8001", **options}, config_file=config_file, programs=PROGRAMS)


def rejection(cls: type[Settings] = ServeSettings, config_file: Path | None = None, **options: Any) -> str:
    with pytest.raises(SettingsError) as raised:
        load(cls, options, config_file=config_file, programs=PROGRAMS)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_source_of_higher_precedence_wins(monkeypatch: pytest.MonkeyPatch, toml: WriteToml) -> None:
    path = toml("[serve]\nstages = 3\nreplicas = 3\nspares = 3\n")
    monkeypatch.setenv("MULTIWORLD_STAGES", "4")
    monkeypatch.setenv("MULTIWORLD_REPLICAS", "4")
    settings = serve(path, stages="5", replicas=None)
    assert (settings.stages, settings.replicas, settings.spares, settings.leaders) == (5, 4, 3, 1)


def test_each_program_uses_its_own_table_of_a_shared_file(toml: WriteToml) -> None:
    path = toml('[serve]\nstages = 4\ndevice = "cpu"\n[worker]\nthreads = 3\ndevice = "cuda:1"\n')
    assert (serve(path).stages, serve(path).device) == (4, "cpu")
    assert (worker(path).threads, worker(path).device) == (3, "cuda:1")


def test_empty_variables_and_those_of_kubernetes_services_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_STAGES", "")
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(f"MULTIWORLD_{name}", "10.0.0.1")
    assert (serve().stages, serve().http_port) == (2, 8000)


def test_unknown_variable_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_BATCH_TIMEOUT", "1")
    assert rejection().endswith("variable MULTIWORLD_BATCH_TIMEOUT: did you mean MULTIWORLD_BATCH_TIMEOUT_S?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages = 3", "unknown table stages in {path}; settings belong into a table, such as [serve]"),
        ("[serve]\nreplica = 3", "unknown setting replica in [serve] in {path}: did you mean replicas?"),
        ("[serve]\nlocal_token = 'x'", "unknown setting local_token in [serve] in {path}"),
        ("[wroker]\nthreads = 3", "unknown table wroker in {path}: did you mean worker?"),
        ("[serve]\nstages = 0", "stages = 0 in {path}: must be a whole number from 1 to 64"),
        ("[serve]\nmodel = 2", "model = 2 in [serve] in {path}: must be text"),
    ],
)
def test_file_with_invalid_settings_is_refused(toml: WriteToml, text: str, message: str) -> None:
    path = toml(text)
    assert rejection(config_file=path).startswith(message.format(path=path))


def test_missing_or_malformed_file_is_refused(toml: WriteToml, tmp_path: Path) -> None:
    assert "is not valid TOML" in rejection(config_file=toml("stages: 3"))
    assert "No such file" in rejection(config_file=tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("stages", "0", "a whole number from 1 to 64"),
        ("timeout_s", "0", "a number above 0 up to 3,600"),
        ("hang_timeout_s", "inf", "a number above 0 up to 3,600"),
        ("log_format", "xml", "one of text, json"),
        ("device", "gpu", "cpu, cuda or cuda:N"),
        ("external_workers", "perhaps", "true or false"),
    ],
)
def test_bad_value_is_quoted_in_the_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str) -> None:
    said: dict[str, Any] = {name: value}
    assert rejection(**said) == f"{option(name)} {value}: must be {allowed}"
    monkeypatch.setenv(variable(name), value)
    assert rejection() == f"{variable(name)}={value}: must be {allowed}"


@pytest.mark.parametrize(
    "leader",
    ["", "host", "host:", ":8001", "host:0", "host:65536", "host:x", "u@host:1", "host:1/x", "a:1,a:1", "a:1,"],
)
def test_leader_that_is_not_host_and_port_is_refused(leader: str) -> None:
    expected = f"--leader {leader}: must be HOST:PORT, such as node1:8001,node2:8001, each once"
    assert rejection(WorkerSettings, leader=leader) == expected
    assert rejection(WorkerSettings).startswith("--leader is missing: ")


def test_contradicting_settings_are_refused() -> None:
    assert rejection(http_port="8001").startswith("http_port and join_port are both 8001")
    assert rejection(http_port="8101", leaders="2").startswith("http_port and join_port of leader 1 are both 8101")
    assert "of leader 1 would be 65600; choose a lower" in rejection(join_port="65500", leaders="2")
    assert load(ServeSettings, {"join_port": "0", "leaders": "16"}).join_port_of(15) == 0
    assert serve(http_port="0", join_port="0", admin_port="0").http_port == 0


def test_secrets_are_masked_in_every_representation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", " open-sesame ")
    settings = serve()
    assert settings.token == SecretStr("open-sesame")
    assert "open-sesame" not in f"{settings} {settings!r} {settings.model_dump_json()}"


def test_token_is_needed_only_for_workers_from_elsewhere() -> None:
    assert serve().with_token().token is None
    with pytest.raises(SettingsError, match="openssl rand"):
        serve(external_workers=True).with_token()
    with pytest.raises(SettingsError, match="MULTIWORLD_TOKEN"):
        worker().with_token()


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"one\ntwo words", b"\xff\xfe", b"x" * 5000])
def test_token_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=str(file)):
        serve(token_file=str(file)).with_token()


def test_token_is_refused_without_being_shown_when_it_is_blank_or_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", "a")
    assert rejection(token_file="b") == "token and token_file are mutually exclusive: give one of them"
    monkeypatch.setenv("MULTIWORLD_TOKEN", "   ")
    assert rejection() == "MULTIWORLD_TOKEN=…: must be at least one character"


def test_advertised_address_uses_the_join_port_by_default_and_is_refused_when_it_is_invalid() -> None:
    told = {None: "", "leader.example": "leader.example:8001", "203.0.113.7:9": "203.0.113.7:9", "[::1]": "[::1]:8001"}
    assert {given: serve(advertise_host=given).advertised(8001) for given in told} == told
    for invalid in ("", "a b", "host:", "host:70000", "user@host", "http://host"):
        assert "must be HOST or HOST:PORT" in rejection(advertise_host=invalid)


def test_leaders_have_different_names_without_being_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-a")
    assert LeaderSettings().name == "machine-a-8001"
    assert LeaderSettings(join_port=9001).name == "machine-a-9001"
    assert LeaderSettings(join_port=0).name == f"machine-a-{os.getpid()}"
    monkeypatch.setattr(socket, "gethostname", lambda: "m" * 100)
    assert LeaderSettings().name == "m" * 59 + "-8001"


# -- leaders in a file, which changes while the process runs -------------------------------------------------------------------

OLD, NEW = Address("10.0.0.1", 8001), Address("10.0.0.2", 8001)


def leaders_in(file: Path) -> WorkerSettings:
    return WorkerSettings(leaders_file=file, token=SecretStr("of-this-test"))


def test_leader_is_looked_up_again_when_the_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "leaders"
    file.write_text(f"{OLD}\n10.0.0.9:8001\n")
    worker = leaders_in(file)
    assert worker.leaders == (OLD, ("10.0.0.9", 8001))
    file.write_text(f"{NEW}\n10.0.0.9:8001\n")
    assert worker.leaders[0] == NEW


@pytest.mark.parametrize(
    "content",
    ["", "10.0.0.2", "\n", "10.0.0.2:8001", "10.0.0.2:8001\n10.0.0.2:8001", "\udcff", None],
)
def test_leaders_stay_as_they_were_when_the_file_becomes_unusable(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file, valid = tmp_path / "leaders", f"{OLD}\n10.0.0.9:8001\n"
    file.write_text(valid)
    worker = leaders_in(file).with_token()
    known = worker.leaders
    for _ in range(2):
        file.unlink()
        if content is not None:
            file.write_bytes(content.encode(errors="surrogateescape"))
        assert (worker.leaders, worker.leaders) == (known, known)
        file.write_text(valid)
        assert (worker.leaders, worker.leaders) == (known, known)
    said = [record.getMessage() for record in caplog.records]
    assert [text.endswith("stay as they were") for text in said] == [True, False] * 2, "one line for each change"
    assert all(str(file) in text for text in said)


@pytest.mark.parametrize("content", ["", "10.0.0.2", None])
def test_leaders_are_refused_when_the_file_has_never_been_valid(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "leaders"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=r"leaders"):
        leaders_in(file).leaders  # noqa: B018
