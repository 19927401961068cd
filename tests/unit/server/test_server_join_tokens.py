"""Accepted join tokens follow the token file; an unreadable file changes nothing."""

import re
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.common.config import SettingsError, load
from multiworld_serving.server.auth.join_tokens import JoinTokens
from multiworld_serving.server.settings import ServeSettings


class Listener:
    def __init__(self) -> None:
        self.secrets: tuple[bytes, ...] = ()

    def let_in(self, *secrets: bytes) -> None:
        self.secrets = secrets


def access(door: Listener, **options: Any) -> JoinTokens:
    return JoinTokens(load(ServeSettings, options).with_token(), door.let_in)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("former\n")
    return path


def test_token_is_rotated_in_three_steps(file: Path) -> None:
    door = Listener()
    made = access(door, token_file=str(file), external_workers=True)
    assert door.secrets == made.admin_tokens() == (b"former",)
    for content, expected in (("new\nformer\n", (b"new", b"former")), ("new", (b"new",))):
        file.write_text(content)
        made.use(made.read())
        assert door.secrets == made.admin_tokens() == expected


def test_local_workers_keep_the_initial_token(file: Path) -> None:
    door = Listener()
    made = access(door, token_file=str(file))
    file.write_text("new")
    made.use(made.read())
    assert door.secrets == (b"new", b"former")


@pytest.mark.parametrize("content", ["", "two words", "\n".join("abcdefghi")])
def test_former_tokens_stay_when_the_file_is_invalid(file: Path, content: str) -> None:
    door = Listener()
    made = access(door, token_file=str(file), external_workers=True)
    file.write_text(content)
    with pytest.raises(SettingsError, match=re.escape(str(file))):
        made.read()
    assert door.secrets == made.admin_tokens() == (b"former",)


def test_admin_verbs_need_no_token_when_it_was_generated() -> None:
    door = Listener()
    assert access(door).admin_tokens() == ()
    assert len(door.secrets[0]) > 30
