"""Stores the views of a rendezvous server on the disk, so that the process can be killed at any time and restarted.

The file is a JSON object that maps world names to views. Each write replaces the whole file: it is written beside the old one and renamed.
"""

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from multiworld.elastic.protocol.messages import View


class StateFile:
    """The views by world name, in memory and in a file.

    Args:
        path: the file; None stores nothing on the disk.
        write_timeout_s: seconds that `flush` waits for the disk.
    """

    def __init__(self, path: Path | None, write_timeout_s: float) -> None:
        self._path = path
        self._write_timeout_s = write_timeout_s
        self._views: dict[str, View] = {}
        self._writer = ThreadPoolExecutor(1, "multiworld-state-file")  # one write at a time

    def load(self) -> dict[str, View]:
        """Return the stored views. Raises OSError, and ValueError when the file is not a state file."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            self._views = msgspec.json.decode(self._path.read_bytes(), type=dict[str, View])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            detail = f"{self._path} does not hold the state of a rendezvous server; move it away to start without it"
            raise ValueError(detail) from error
        return self._views.copy()

    def store(self, name: str, view: View) -> None:
        """Store this view with the next `flush`."""
        self._views[name] = view

    def remove(self, name: str) -> None:
        """Remove this world with the next `flush`."""
        self._views.pop(name, None)

    async def flush(self) -> None:
        """Write all views and wait until they are on the disk.

        Raises:
            RuntimeError: no thread can be started.
            OSError: the write failed, or, as TimeoutError, the disk does not respond.
        """
        if self._path is None:
            return
        data = msgspec.json.encode(self._views)
        writing = asyncio.get_running_loop().run_in_executor(self._writer, _replace, self._path, data)
        try:
            await asyncio.wait_for(writing, self._write_timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the disk did not respond within {self._write_timeout_s:g} s") from None

    async def close(self) -> None:
        """Write the last changes, and wait for a write in progress, so that it does not overlap with those of the next owner."""
        with contextlib.suppress(OSError, RuntimeError):
            await self.flush()
        self._writer.shutdown(wait=False)


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
