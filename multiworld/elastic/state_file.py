"""Stores the views of a rendezvous server on the disk, so that the process can be killed at any time and restarted.

Each line is a JSON object that maps world names to views. Later lines override earlier ones, and null removes the world. A decision
appends one line, independently of the number of worlds. The file is rewritten with the first write after a start, after a failed write,
and when most of its lines are obsolete.
"""

import asyncio
import json
import os
from pathlib import Path

from multiworld.elastic.protocol.messages import View, decode, encode

_REWRITE_LINES = 1000
"""Lines after which the file is rewritten, or twice the number of worlds if that is more."""

_Change = dict[str, str | None]


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
        self._unsaved: _Change = {}
        self._lines = 0
        self._must_rewrite = True  # before the first write: the last line may be incomplete
        self._writing: asyncio.Future[None] | None = None
        self._timed_out = False

    def load(self) -> dict[str, View]:
        """Return the stored views. Raises OSError, and ValueError when the file is not a state file."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            self._views = _parse(self._path.read_bytes())
            return {name: _view(text) for name, text in self._views.items()}
        except (ValueError, TypeError, AttributeError) as error:
            detail = f"{self._path} does not hold the state of a rendezvous server; move it away to start without it"
            raise ValueError(detail) from error

    def store(self, name: str, view: View) -> None:
        """Store this view with the next `flush`."""
        self._change(name, encode(view).decode())

    def remove(self, name: str) -> None:
        """Remove this world with the next `flush`."""
        if name in self._views:
            self._change(name, None)

    async def flush(self) -> None:
        """Wait until all changes are on the disk. After a failed write, the next call writes them again.

        Raises:
            RuntimeError: no thread can be started.
            OSError: the write failed.
            TimeoutError: the disk does not respond; further calls raise it at once until the write ends.
        """
        if self._path is None:
            return
        while self._unsaved or self._writing is not None:
            if self._writing is None:
                self._writing = self._start_writing(self._path)
            await asyncio.wait((self._writing,), timeout=0 if self._timed_out else self._write_timeout_s)
            self._timed_out = not self._writing.done()
            if self._timed_out:
                raise TimeoutError(f"the disk did not respond within {self._write_timeout_s:g} s")
            writing, self._writing = self._writing, None
            writing.result()

    async def close(self) -> None:
        """Wait for a write in progress, so that it does not overlap with the writes of the next owner of the file."""
        if self._writing is not None:
            await asyncio.wait((self._writing,), timeout=self._write_timeout_s)

    def _change(self, name: str, text: str | None) -> None:
        if self._path is None:
            return
        self._unsaved[name] = text
        if text is None:
            self._views.pop(name, None)
        else:
            self._views[name] = text

    def _start_writing(self, path: Path) -> asyncio.Future[None]:
        change, self._unsaved = self._unsaved, {}
        rewrite = self._must_rewrite or self._lines > max(_REWRITE_LINES, 2 * len(self._views))
        self._lines = 1 if rewrite else self._lines + 1
        write = _rewrite if rewrite else _append
        content: _Change = {**self._views} if rewrite else change
        writing = asyncio.ensure_future(asyncio.to_thread(write, path, content))

        def finish(done: asyncio.Future[None]) -> None:
            self._must_rewrite = done.cancelled() or done.exception() is not None
            if self._must_rewrite:  # part of it may be written: the next attempt rewrites the file
                self._unsaved = change | self._unsaved

        writing.add_done_callback(finish)
        return writing


def _parse(data: bytes) -> dict[str, str]:
    """Raises ValueError or TypeError if `StateFile` did not write the data."""
    lines = data.split(b"\n")
    views: _Change = {}
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            change = json.loads(line)
        except ValueError:
            if number == 0 or number < len(lines) - 1:
                raise
            break  # the process ended during the write of the last line: that decision was not sent
        if not isinstance(change, dict):
            raise TypeError(f"not an object: {line[:60]!r}")
        views |= change
    return {name: text for name, text in views.items() if text is not None}


def _view(text: str) -> View:
    """Raises ValueError."""
    match decode(text.encode()):
        case View() as view:
            return view
    raise ValueError(f"not a view: {text[:60]}")


def _append(path: Path, change: _Change) -> None:
    with path.open("ab") as file:
        _write(file.fileno(), change)


def _rewrite(path: Path, views: _Change) -> None:
    new_path = path.with_name(path.name + ".new")
    with new_path.open("wb") as file:
        _write(file.fileno(), views)
    new_path.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the rename survives a power failure
    finally:
        os.close(folder)


def _write(fd: int, change: _Change) -> None:
    data = json.dumps(change).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]
    os.fsync(fd)
