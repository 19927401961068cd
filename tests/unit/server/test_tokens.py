"""The join token's file: made once, for its owner alone."""

import stat
from pathlib import Path

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.common.config import SettingsError
from multiworld_serving.common.config.tokens import read_token, write_new_token


def test_token_is_made_for_its_owner_alone_and_then_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert write_new_token(file)
    made = read_token(file)
    assert len(made.get_secret_value()) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not write_new_token(file)
    assert read_token(file) == made
    assert list(tmp_path.iterdir()) == [file], "no draft is left"


def test_token_is_refused_when_its_folder_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot write a join token to .*nowhere"):
        write_new_token(tmp_path / "nowhere" / "token")


def test_verb_makes_a_token_and_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    assert main(["token", str(file)]) == 0
    assert main(["token", str(file)]) == 0
    said = capsys.readouterr().out
    assert "a new join token" in said
    assert "already" in said
    assert read_token(file).get_secret_value() not in said


def test_verb_refuses_a_file_that_holds_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text("two words")
    assert main(["token", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
