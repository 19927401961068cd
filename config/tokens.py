"""The join token: read from a file, or made new."""

import secrets
from pathlib import Path

from pydantic import SecretStr

from config.errors import SettingsError

MAX_TOKEN_BYTES = 4096


MOST_TOKENS = 8


def read_token(path: Path, what: str = "join token") -> SecretStr:
    """The token that a file holds, surrounding white space removed; of several lines the first. Raises SettingsError as `read_tokens`."""
    return read_tokens(path, what)[0]


def read_tokens(path: Path, what: str = "join token") -> tuple[SecretStr, ...]:
    """The tokens that a file holds, one on a line: the first is ours, and who knows any of them is let in while they are rotated.

    Args:
        what: what one is called in errors.
    Raises:
        SettingsError: there is none, or one is not one word.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TOKEN_BYTES + 1)
        lines = [line.split() for line in raw.decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"cannot read the {what} from {path}: {why}") from error
    if len(raw) > MAX_TOKEN_BYTES or not 0 < len(lines) <= MOST_TOKENS or any(len(words) != 1 for words in lines):
        raise SettingsError(
            f"{path} must hold the {what} and nothing else, on one line, without spaces (while it is rotated, the former one "
            f"on a line below)"
        )
    return tuple(SecretStr(words[0]) for words in lines)


def new_token() -> SecretStr:
    """A token with 256 bits of randomness, safe in a URL and in a shell."""
    return SecretStr(secrets.token_urlsafe(32))
