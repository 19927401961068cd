"""API keys, stored as SHA-256 digests in lines `NAME:HASH`, or `NAME:HASH:MODEL,MODEL` for a key of some models.

A fast hash is sufficient because keys are random and cannot be guessed.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from multiworld_serving.common.config.errors import SettingsError

_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-fA-F]{64})(?::([^\s:,]+(?:,[^\s:,]+)*))?")
_EXPECTED = "expected NAME:HASH, as `multiworld key NAME` prints it"


class KeySet(dict[bytes, str]):
    """Keys with the same permission: their names, which are for logs, by SHA-256 digest.

    Attributes:
        models: the models of each key that is limited to some, by the name of the key.
    """

    def __init__(self, names: Mapping[bytes, str] | None = None) -> None:
        super().__init__(names or {})
        self.models: dict[str, frozenset[str]] = {}

    def name_of(self, key: bytes) -> str | None:
        """The name of this key; None if it is unknown.

        How long the look-up takes says nothing about the keys, because a caller cannot choose a digest.
        """
        return self.get(hashlib.sha256(key).digest())


def hash_key(key: str) -> str:
    """The hexadecimal SHA-256 of a key: the HASH of a line."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> KeySet:
    """Read the keys of a file: one NAME:HASH per line; empty lines and lines that begin with # are ignored.

    Raises:
        SettingsError: the file cannot be read, contains no key, or a line is invalid. The message never contains the line's text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"cannot read the keys in {path}: {why}") from error
    return parse_keys(text, str(path))


def parse_keys(text: str, where: str) -> KeySet:
    """Parse the lines of a file of keys. Raises SettingsError as `read_keys` does."""
    keys = KeySet()
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise SettingsError(f"line {number} of {where} is not a key: {_EXPECTED}")
        name, digest = match[1], bytes.fromhex(match[2])
        if digest in keys or name in keys.values():
            raise SettingsError(f"line {number} of {where}: {name}, or its key, is already listed")
        keys[digest] = name
        if match[3]:
            keys.models[name] = frozenset(match[3].split(","))
    if not keys:
        raise SettingsError(f"{where} contains no key: {_EXPECTED}")
    return keys
