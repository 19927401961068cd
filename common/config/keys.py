"""API keys, stored as SHA-256 digests in lines `NAME:HASH`.

A fast hash is sufficient because keys are random and cannot be guessed.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from multiworld_serving.common.config.errors import SettingsError

_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-fA-F]{64})")
_EXPECTED = "expected NAME:HASH, as `multiworld key NAME` prints it"


@dataclass(frozen=True, slots=True)
class Key:
    """Name and SHA-256 digest of a key."""

    name: str
    digest: bytes


class KeySet:
    """Keys with the same permission. Names are for logs."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def name_of(self, key: bytes) -> str | None:
        """The name of this key; None if it is unknown. Runs in constant time."""
        given, found = hashlib.sha256(key).digest(), None
        for known in self._keys:
            if hmac.compare_digest(known.digest, given):
                found = known.name
        return found


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
    keys: list[Key] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise SettingsError(f"line {number} of {where} is not a key: {_EXPECTED}")
        key = Key(match[1], bytes.fromhex(match[2]))
        if any(known.name == key.name or known.digest == key.digest for known in keys):
            raise SettingsError(f"line {number} of {where}: {key.name}, or its key, is already listed")
        keys.append(key)
    if not keys:
        raise SettingsError(f"{where} contains no key: {_EXPECTED}")
    return KeySet(keys)
