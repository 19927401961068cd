"""Keys that callers show: made new, and known by their SHA-256 alone, as lines `NAME:HASH`.

A plain digest is enough because keys are random: there is nothing to guess that a slow hash would have to slow down.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from config.errors import SettingsError

MAX_FILE_BYTES = 2**20
_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-fA-F]{64})")
_EXPECTED = "expected NAME:HASH, as `multiworld key NAME` makes it"


@dataclass(frozen=True, slots=True)
class Key:
    """A key that is known: whose it is, and its digest."""

    name: str
    digest: bytes


class KeyRing:
    """Keys that may do the same things. Names are for the log."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def holder(self, key: bytes) -> str | None:
        """Whose key this is; None when nobody's. Takes as long for a wrong key as for any right one."""
        given, found = hashlib.sha256(key).digest(), None
        for known in self._keys:
            if hmac.compare_digest(known.digest, given):
                found = known.name
        return found


def hashed(key: str) -> str:
    """The HASH of a line."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> KeyRing:
    """The keys of a file: one NAME:HASH a line; empty lines and lines that begin with # do not count.

    Raises:
        SettingsError: it cannot be read, holds no key, or a line is no entry; the line's text is never told.
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
    return _ring(
        ((f"line {number} of {path}", line) for number, line in lines if line and not line.startswith("#")), str(path)
    )


def keys_of_text(text: str, where: str) -> KeyRing:
    """The keys of a text with spaces, commas or line breaks between its entries. Raises SettingsError as `read_keys` does."""
    entries = re.split(r"[\s,]+", text.strip())
    return _ring(((f"entry {number} of {where}", entry) for number, entry in enumerate(entries, start=1)), where)


def _ring(entries: Iterable[tuple[str, str]], where: str) -> KeyRing:
    keys: dict[str, Key] = {}
    for place, entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise SettingsError(f"{place} is no key: {_EXPECTED}")
        name, digest = match[1], bytes.fromhex(match[2])
        if name in keys:
            raise SettingsError(f"{place}: there is a key of the name {name} already; give each its own")
        if any(known.digest == digest for known in keys.values()):
            raise SettingsError(f"{place}: the key of {name} is there already under another name")
        keys[name] = Key(name, digest)
    if not keys:
        raise SettingsError(f"{where} holds no key: {_EXPECTED}")
    return KeyRing(keys.values())
