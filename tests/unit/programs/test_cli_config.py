"""`multiworld config` shows settings and their sources; `multiworld key` creates keys that the service accepts."""

import json
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.common.config import SettingsError
from multiworld_serving.common.config.keys import hash_key, keys_of_text, read_keys
from multiworld_serving.common.config.settings import declaration
from multiworld_serving.server.settings import ServeSettings

FILE = """
log_format = "json"
[serve]
stages = 4
replicas = 3
[worker]
leader = "10.0.0.1:8001"
"""


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MULTIWORLD_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("service.toml").write_text(FILE)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """Each setting in the JSON output."""
    assert main(["config", "--json", *arguments]) == 0
    return {line["name"]: line for line in json.loads(capsys.readouterr().out)}


def test_config_shows_the_source_of_each_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIWORLD_REPLICAS", "5")
    lines = told(capsys, "--config", "service.toml", "--set", "window=7", "--set", "--image-size=64")
    found = {
        name: (lines[name]["value"], lines[name]["origin"]) for name in ("stages", "replicas", "window", "image_size")
    }
    assert found == {
        "stages": ("4", "file service.toml"),
        "replicas": ("5", "environment"),
        "window": ("7", "command line"),
        "image_size": ("64", "command line"),
    }
    assert (lines["log_format"]["origin"], lines["top_k"]["origin"]) == ("file service.toml", "default")
    shown = {name for name, field in ServeSettings.model_fields.items() if not declaration(field)["hidden"]}
    assert lines.keys() == shown
    assert lines["timeout_s"]["allowed"] == "a number above 0 up to 3,600"
    assert (lines["timeout_s"]["option"], lines["timeout_s"]["variable"]) == ("--timeout-s", "MULTIWORLD_TIMEOUT_S")


def test_config_shows_worker_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", "secret")
    lines = told(capsys, "worker", "--config", "service.toml")
    assert (lines["leader"]["value"], lines["leader"]["origin"]) == ("10.0.0.1:8001", "file service.toml")
    assert "exit_with_parent" not in lines


def test_config_masks_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", "open-sesame")
    monkeypatch.setenv("MULTIWORLD_API_KEYS", f"a:{hash_key('k')}")
    for form in ([], ["--json"]):
        assert main(["config", *form]) == 0
        out = capsys.readouterr().out
        assert "open-sesame" not in out
        assert hash_key("k") not in out
        assert "**********" in out


def test_config_prints_a_table_of_changed_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--changed", "--config", "service.toml"]) == 0
    out = capsys.readouterr().out
    assert "stages" in out
    assert "file service.toml" in out
    assert "queue_limit" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "stagse=3"], "did you mean stages?"),
        (["--set", "stages=0"], "--stages 0: must be a whole number from 1"),
        (["--set", "token=abc"], "unknown setting token"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["worker"], "--leader is missing"),
        (["worker", "--set", "leader=a:1"], "no join token"),
        (["--set", "external_workers=true"], "no join token"),
        (["somebody"], "somebody"),
        (["--set", "model=resnet19"], "did you mean resnet18"),
        (["--set", "model=./nowhere"], "--model ./nowhere: there is no such file or folder"),
        (["--set", "model=resnet18", "--set", "stages=11"], "resnet18 has 10 blocks"),
        (["--set", "weights=nowhere.pth"], "--weights nowhere.pth: there is no such file"),
        (["--set", "labels=nowhere.txt"], "--labels nowhere.txt: there is no such file"),
        (["--set", "api_keys_file=nowhere"], "nowhere"),
        (["--set", "tls_cert_file=nowhere", "--set", "tls_key_file=nowhere"], "nowhere"),
        (["--set", "handler=nowhere.py:Handler"], "nowhere.py"),
    ],
)
def test_config_rejects_what_the_program_would_reject(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["config", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_config_rejects_an_unknown_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIWORLD_STAGSE", "3")
    assert main(["config"]) == 2
    assert "did you mean MULTIWORLD_STAGES?" in capsys.readouterr().err


def test_key_matches_its_stored_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("alice", "bob"):
        assert main(["key", name, "--add-to", "api.keys"]) == 0
        key = capsys.readouterr().out.strip()
        assert read_keys(Path("api.keys")).name_of(key.encode()) == name
        assert key not in Path("api.keys").read_text()
    assert len(list(read_keys(Path("api.keys")))) == 2
    assert main(["key", "alice", "--add-to", "api.keys"]) == 2
    assert "already has a key named alice" in capsys.readouterr().err


def test_key_is_written_to_a_new_file_that_only_the_owner_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "alice", "--add-to", "api.keys", "--out", "alice.key"]) == 0
    key = Path("alice.key").read_text().strip()
    assert Path("alice.key").stat().st_mode & 0o777 == 0o600
    assert read_keys(Path("api.keys")).name_of(key.encode()) == "alice"
    assert capsys.readouterr().out == "alice.key: the key of alice\n"
    assert main(["key", "bob", "--add-to", "api.keys", "--out", "alice.key"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["key", "alice", "--add-to", "api.keys", "--out", "other.key"]) == 2
    assert not Path("other.key").exists(), "a key that was not added would be useless"


def test_key_prints_its_line_without_a_key_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "ops", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert keys_of_text(made["line"], "test").name_of(made["key"].encode()) == "ops"
    assert main(["key", "ops"]) == 0
    key, line = capsys.readouterr().out.split()
    assert line == f"ops:{hash_key(key)}"
    assert main(["key", "no name"]) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "contains no key"),
        ("# nothing\n\n", "contains no key"),
        ("alice:secret\n", "line 1 of"),
        (f"alice:{hash_key('a')}\nalice:{hash_key('b')}\n", "line 2 of"),
        (f"alice:{hash_key('a')}\nbob:{hash_key('a')}\n", "the key of bob is already listed"),
        (f"{hash_key('a')}\n", "expected NAME:HASH"),
    ],
)
def test_unreadable_keys_are_refused_without_being_shown(text: str, says: str) -> None:
    Path("bad.keys").write_text(text)
    with pytest.raises(SettingsError, match=says) as refused:
        read_keys(Path("bad.keys"))
    assert "secret" not in str(refused.value)
    assert hash_key("a") not in str(refused.value)
