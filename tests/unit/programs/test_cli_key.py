"""`multiworld key` creates keys that the service accepts, and `multiworld token` the file of a join token."""

import json
import stat
from pathlib import Path

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.common.config.keys import hash_key, parse_keys, read_keys
from multiworld_serving.common.config.tokens import read_token
from tests.refusals import refusal


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_key_matches_its_stored_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("alice", "bob"):
        assert main(["key", name, "--add-to", "api.keys"]) == 0
        key = capsys.readouterr().out.strip()
        assert read_keys(Path("api.keys")).name_of(key.encode()) == name
        assert key not in Path("api.keys").read_text()
    assert len(list(read_keys(Path("api.keys")))) == 2
    assert "already has a key named alice" in refusal(capsys, "key", "alice", "--add-to", "api.keys")[-1]


def test_key_is_written_to_a_new_file_that_only_the_owner_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "alice", "--add-to", "api.keys", "--out", "alice.key"]) == 0
    key = Path("alice.key").read_text().strip()
    assert Path("alice.key").stat().st_mode & 0o777 == 0o600
    assert read_keys(Path("api.keys")).name_of(key.encode()) == "alice"
    assert capsys.readouterr().out == "alice.key: the key of alice\n"
    assert "exists already" in refusal(capsys, "key", "bob", "--add-to", "api.keys", "--out", "alice.key")[-1]
    assert main(["key", "alice", "--add-to", "api.keys", "--out", "other.key"]) == 2
    assert not Path("other.key").exists(), "a key that was not added would be useless"


def test_key_prints_its_line_without_a_key_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "ops", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert parse_keys(made["line"], "test").name_of(made["key"].encode()) == "ops"
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
        (f"alice:{hash_key('a')}\nbob:{hash_key('a')}\n", "bob, or its key, is already listed"),
        (f"{hash_key('a')}\n", "expected NAME:HASH"),
    ],
)
def test_unreadable_keys_are_refused_without_being_shown(text: str, says: str) -> None:
    Path("bad.keys").write_text(text)
    with pytest.raises(SettingsError, match=says) as refused:
        read_keys(Path("bad.keys"))
    assert "secret" not in str(refused.value)
    assert hash_key("a") not in str(refused.value)


def test_token_file_is_created_for_its_owner_only_and_then_kept(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path("token")
    assert main(["token", str(file)]) == 0
    made = read_token(file)
    assert len(made.get_secret_value()) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert main(["token", str(file)]) == 0
    assert read_token(file) == made
    assert list(Path().iterdir()) == [file], "no temporary file is left"
    said = capsys.readouterr().out
    assert "a new join token" in said
    assert "already" in said
    assert made.get_secret_value() not in said
