"""Who is let in follows the token's file; a file that cannot be read changes nothing."""

import logging
from pathlib import Path
from typing import Any

import pytest

from config import load
from server.access import Access
from server.settings import ServeSettings


class Door:
    def __init__(self) -> None:
        self.secrets: tuple[bytes, ...] = ()

    def let_in(self, *secrets: bytes) -> None:
        self.secrets = secrets


def access(door: Door, **options: Any) -> Access:
    return Access(load(ServeSettings, options).with_token(), door.let_in)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("former\n")
    return path


def test_token_is_rotated_in_three_steps(file: Path) -> None:
    door = Door()
    made = access(door, token_file=str(file), external_workers=True)
    assert door.secrets == made.operators() == (b"former",)
    for content, expected in (("new\nformer\n", (b"new", b"former")), ("new", (b"new",))):
        file.write_text(content)
        made.reload()
        assert door.secrets == made.operators() == expected


def test_local_workers_know_the_token_of_the_start_and_stay_welcome(file: Path) -> None:
    door = Door()
    made = access(door, token_file=str(file))
    file.write_text("new")
    made.reload()
    assert door.secrets == (b"new", b"former")


@pytest.mark.parametrize("content", ["", "two words", "\n".join("abcdefghi")])
def test_former_tokens_stay_when_the_file_is_no_good(
    file: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door()
    made = access(door, token_file=str(file), external_workers=True)
    file.write_text(content)
    with caplog.at_level(logging.ERROR):
        made.reload()
    assert door.secrets == (b"former",)
    assert str(file) in caplog.text


def test_operators_need_no_token_when_we_made_it_up() -> None:
    door = Door()
    assert access(door).operators() == ()
    assert len(door.secrets[0]) > 30
