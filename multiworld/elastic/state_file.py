"""Stores the views of a rendezvous server on the disk, so that the process can be killed at any time and restarted.

The file is a JSON object that maps world names to views. Each write replaces the whole file: it is written beside the old one and renamed.
"""

import asyncio
import json
import os
from pathlib import Path

from multiworld.elastic.protocol.messages import View, decode, encode


class StateFile:
    """The views by world name, in memory and in a file.

    Args:
        path: the file; None stores nothing on the disk.
        write_timeout_s: seconds that `flush` waits for the disk.
    """

    def __init__(self, path: Path | None, write_timeout_s: float) -> None:
        self._path = path
        self._write_timeout_s = write_timeout_s
        self._views: dict[str, str] = {}
        self._saved = True  # the last write, or the one in progress, includes all changes
        self._writing: asyncio.Future[None] | None = None

    def load(self) -> dict[str, View]:
        """Return the stored views. Raises OSError, and ValueError when the file is not a state file."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            self._views = dict(json.loads(self._path.read_bytes()))
            return {name: _view(text) for name, text in self._views.items()}
        except (ValueError, TypeError, AttributeError) as error:
            detail = f"{self._path} does not hold the state of a rendezvous server; move it away to start without it"
            raise ValueError(detail) from error

    def store(self, name: str, view: View) -> None:
        """Store this view with the next `flush`."""
        self._views[name], self._saved = encode(view).decode(), False

    def remove(self, name: str) -> None:
        """Remove this world with the next `flush`."""
        if self._views.pop(name, None) is not None:
            self._saved = False

    async def flush(self) -> None:
        """Wait until all changes are on the disk. After a failed write, the next call writes them again.

        Raises:
            RuntimeError: no thread can be started.
            OSError: the write failed.
            TimeoutError: the disk does not respond.
        """
        if self._path is None:
            return
        while self._writing is not None or not self._saved:
            if self._writing is None:
                data, self._saved = json.dumps(self._views).encode(), True
                self._writing = asyncio.ensure_future(asyncio.to_thread(_replace, self._path, data))
            writing = self._writing
            await asyncio.wait((writing,), timeout=self._write_timeout_s)
            if not writing.done():
                raise TimeoutError(f"the disk did not respond within {self._write_timeout_s:g} s")
            if self._writing is writing:
                self._writing = None
            if writing.exception() is not None:
                self._saved = False
                writing.result()

    async def close(self) -> None:
        """Wait for a write in progress, so that it does not overlap with the writes of the next owner of the file."""
        if self._writing is not None:
            await asyncio.wait((self._writing,), timeout=self._write_timeout_s)


def _view(text: str) -> View:
    """Raises ValueError."""
    match decode(text.encode()):
        case View() as view:
            return view
    raise ValueError(f"not a view: {text[:60]}")


def _replace(path: Path, data: bytes) -> None:
    new_path = path.with_name(path.name + ".new")
    with new_path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new_path.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the rename survives a power failure
    finally:
        os.close(folder)
