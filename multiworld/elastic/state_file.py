"""Stores the views of a rendezvous server on the disk, so that the process can be killed at any time and restarted.

The file is a JSON object that maps world names to views. Each write replaces the whole file: it is written beside the old one and renamed.
"""

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from multiworld.elastic.protocol.messages import View


class StateFile:
    """A file with the views by world name.

    Args:
        path: the file; None stores nothing on the disk.
        write_timeout_s: seconds that `save` waits for the disk.
    """

    def __init__(self, path: str | Path | None, write_timeout_s: float) -> None:
        self._path = None if path is None else Path(path)
        self._write_timeout_s = write_timeout_s
        self._writer = ThreadPoolExecutor(1, "multiworld-state-file")  # one write at a time

    def load(self) -> dict[str, View]:
        """Return the stored views. Raises OSError, and ValueError when the file is not a state file."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, View])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            detail = f"{self._path} does not hold the state of a rendezvous server; move it away to start without it"
            raise ValueError(detail) from error

    async def save(self, views: Mapping[str, View]) -> None:
        """Write these views and wait until they are on the disk.

        Raises:
            RuntimeError: no thread can be started.
            OSError: the write failed, or, as TimeoutError, the disk does not respond.
        """
        if self._path is None:
            return
        data = msgspec.json.encode(views)
        writing = asyncio.get_running_loop().run_in_executor(self._writer, _replace, self._path, data)
        try:
            await asyncio.wait_for(writing, self._write_timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the disk did not respond within {self._write_timeout_s:g} s") from None

    def close(self) -> None:
        """Free the thread when a write in progress has ended."""
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
