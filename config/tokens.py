"""The join token: read from a file, or made new."""

import secrets
from pathlib import Path

from pydantic import SecretStr

from config.errors import SettingsError

MAX_TOKEN_BYTES = 4096


def read_token(path: Path, what: str = "join token") -> SecretStr:
    """The token that a file holds, surrounding white space removed. Raises SettingsError unless it is one word.

    Args:
        what: what it is called in errors.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TOKEN_BYTES + 1)
        lines = raw.decode().split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"cannot read the {what} from {path}: {why}") from error
    if len(raw) > MAX_TOKEN_BYTES or len(lines) != 1:
        raise SettingsError(f"{path} must hold the {what} and nothing else, on one line, without spaces")
    return SecretStr(lines[0])


def new_token() -> SecretStr:
    """A token with 256 bits of randomness, safe in a URL and in a shell."""
    return SecretStr(secrets.token_urlsafe(32))
