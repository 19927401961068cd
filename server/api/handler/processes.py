"""Starts the processes of a handler, asks them, and replaces those that end or do not return in time."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from multiworld_serving.common.config import UserError
from multiworld_serving.server.api.handler.exchange import Kind, receive, send
from multiworld_serving.server.errors import HandlerError, HandlerInputError

logger = logging.getLogger(__name__)

_PROGRAM = "multiworld_serving.server.api.handler.program"
_LOAD_S = 60.0
"""Longest time for loading a handler."""
_MAX_TEXT_CHARS = 1000


class _Process:
    """One process with the user's handler. Raises HandlerError if it cannot be loaded."""

    def __init__(self, where: str) -> None:
        ours, theirs = socket.socketpair()
        self._sock = ours
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - this program, and the user's own file
                    [sys.executable, "-m", _PROGRAM, str(theirs.fileno()), where],
                    stdin=subprocess.PIPE,  # tells the process when this one has ended
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            ours.close()
            raise HandlerError(f"the handler's process cannot be started: {error}") from error
        try:
            kind, content = self._exchange(time.monotonic() + _LOAD_S)
        except HandlerError:
            self.kill()
            raise
        if kind is not Kind.RESULT:
            self.kill()
            raise HandlerError(content.decode(errors="replace"))

    def ask(self, kind: Kind, content: bytes, timeout_s: float) -> tuple[Kind, bytes]:
        """Send a message and wait for its reply. Raises HandlerError if the process ends or is late: it must be killed then."""
        until_s = time.monotonic() + timeout_s
        try:
            self._sock.settimeout(max(0.001, timeout_s))
            send(self._sock, kind, content)
        except OSError as error:
            raise HandlerError(f"the handler's process does not read: {error}") from error
        return self._exchange(until_s)

    def _exchange(self, until_s: float) -> tuple[Kind, bytes]:
        timeout_s = max(0.001, until_s - time.monotonic())
        self._sock.settimeout(timeout_s)
        try:
            return receive(self._sock)
        except TimeoutError as error:
            raise HandlerError(f"the handler did not return within {timeout_s:.3g} s") from error
        except (EOFError, ValueError, struct.error, OSError) as error:
            raise HandlerError(f"the handler's process has ended or failed: {error}") from error

    def kill(self) -> None:
        """End the process."""
        self._sock.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


class HandlerProcesses:
    """As many processes as calls are made at once. Use as a context: the first process starts on entry, others on demand.

    Args:
        where: FILE.py:CLASS.
        timeout_s: longest time of one call.
    """

    def __init__(self, where: str, timeout_s: float) -> None:
        file, separator, name = where.rpartition(":")
        self._where = f"{Path(file).absolute()}{separator}{name}" if separator else where
        self._timeout_s = timeout_s
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        self._closed = False

    def __enter__(self) -> Self:
        """Raises UserError if the handler cannot be loaded."""
        try:
            self._idle.put(_Process(self._where))
        except HandlerError as error:
            raise UserError(f"--handler {self._where}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the idle processes; one that is busy ends with its call."""
        self._closed = True
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait().kill()

    def call(self, kind: Kind, content: bytes, *, deadline_s: float) -> bytes:
        """Ask a process, on the calling thread.

        Args:
            deadline_s: of the request, by `time.monotonic()`.
        Raises:
            HandlerInputError: decode raised ValueError.
            HandlerError: another error, or the process ended or did not return in time; it is replaced.
        """
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = _Process(self._where)
        try:
            reply, result = process.ask(kind, content, min(self._timeout_s, deadline_s - time.monotonic()))
        except HandlerError:
            process.kill()
            raise
        if self._closed:
            process.kill()
        else:
            self._idle.put(process)
        if reply is Kind.RESULT:
            return result
        text = result.decode(errors="replace")
        if reply is Kind.INVALID:
            raise HandlerInputError(text[:_MAX_TEXT_CHARS] or "the handler does not accept this body")
        raise HandlerError(f"the handler raised an error:\n{text}")
