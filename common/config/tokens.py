"""Reads and creates join tokens."""

import os
import secrets
from pathlib import Path

from pydantic import SecretStr

from multiworld_serving.common.config.errors import SettingsError

MAX_TOKEN_BYTES = 4096


MAX_TOKENS = 8


def read_token(path: Path, what: str = "join token") -> SecretStr:
    """The first token in a file. Raises SettingsError as `read_tokens` does."""
    return read_tokens(path, what)[0]


def read_tokens(path: Path, what: str = "join token") -> tuple[SecretStr, ...]:
    """The tokens in a file, one per line: this process uses the first and accepts all of them, which allows rotation.

    Args:
        what: name of the secret in error messages.
    Raises:
        SettingsError: the file cannot be read, is empty, has more than MAX_TOKENS lines, or a line is not one word.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TOKEN_BYTES + 1)
        lines = [line.split() for line in raw.decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"cannot read the {what} from {path}: {why}") from error
    if len(raw) > MAX_TOKEN_BYTES or not 0 < len(lines) <= MAX_TOKENS or any(len(words) != 1 for words in lines):
        raise SettingsError(
            f"{path} must contain only the {what}, on one line, without spaces (during rotation, the previous one on the next "
            f"line)"
        )
    return tuple(SecretStr(words[0]) for words in lines)


def new_token() -> SecretStr:
    """A random token of 256 bits, safe in URLs and shells."""
    return SecretStr(secrets.token_urlsafe(32))


def write_secret(path: Path, secret: str) -> bool:
    """Write a token or key to a new file with mode 0600. Returns False if the file exists, which is left unchanged.

    The file appears atomically with its whole content. Raises SettingsError if it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secret + "\n")
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot write the secret to {path}: {error.strerror}") from error
    return True
