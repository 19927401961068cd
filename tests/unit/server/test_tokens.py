"""The join token file: created once, readable by its owner only."""

import stat
from pathlib import Path

import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.common.config.tokens import new_token, read_token, write_secret


def test_token_file_is_created_for_its_owner_only_and_then_kept(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert write_secret(file, new_token().get_secret_value())
    made = read_token(file)
    assert len(made.get_secret_value()) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not write_secret(file, new_token().get_secret_value())
    assert read_token(file) == made
    assert list(tmp_path.iterdir()) == [file], "no temporary file is left"


def test_verb_creates_a_token_or_reports_the_existing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    assert main(["token", str(file)]) == 0
    assert main(["token", str(file)]) == 0
    said = capsys.readouterr().out
    assert "a new join token" in said
    assert "already" in said
    assert read_token(file).get_secret_value() not in said
