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

MAX_FILE_BYTES = 2**20
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
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"cannot read the keys in {path}: {why}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise SettingsError(f"{path} is longer than {MAX_FILE_BYTES} bytes: {_EXPECTED}, one a line")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    return _key_set(
        ((f"line {number} of {path}", line) for number, line in lines if line and not line.startswith("#")), str(path)
    )


def keys_of_text(text: str, where: str) -> KeySet:
    """Parse keys that are separated by spaces, commas or line breaks. Raises SettingsError as `read_keys` does."""
    entries = re.split(r"[\s,]+", text.strip())
    return _key_set(((f"entry {number} of {where}", entry) for number, entry in enumerate(entries, start=1)), where)


def _key_set(entries: Iterable[tuple[str, str]], where: str) -> KeySet:
    keys: dict[str, Key] = {}
    for place, entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise SettingsError(f"{place} is not a key: {_EXPECTED}")
        name, digest = match[1], bytes.fromhex(match[2])
        if name in keys:
            raise SettingsError(f"{place}: duplicate key name {name}; give each key its own name")
        if any(known.digest == digest for known in keys.values()):
            raise SettingsError(f"{place}: the key of {name} is already listed under another name")
        keys[name] = Key(name, digest)
    if not keys:
        raise SettingsError(f"{where} contains no key: {_EXPECTED}")
    return KeySet(keys.values())
