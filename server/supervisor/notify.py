"""Signs of life of the child processes, by the protocol that systemd uses for services of Type=notify; see sd_notify(3).

The event loop of a child that has started sends WATCHDOG=1 regularly, and READY=1 when it serves; see `common.config.process`.
"""

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Self

from multiworld_serving.common.config.process import ERROR_FIELD, STATUS_FIELD
from multiworld_serving.common.service.capacity_report import CAPACITY_FIELD, CapacityReport

WATCHDOG_S = 2.0
"""The event loops of the children send twice in this time."""
CREDENTIALS = struct.Struct("iII")
"""The process id, user id and group id of a sender; see unix(7)."""
_MESSAGE_BYTES = 1 << 16
"""Enough for a report that names 1,024 workers of 64 stages; a longer message is cut off and not understood."""
_SO_PASSCRED = 16


def unix_socket(kind: socket.SocketKind) -> tuple[socket.socket, str]:
    """A socket of this machine and its name, which disappears with this process. A name with "@" is not a file; see sd_notify(3)."""
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    sock.bind("")  # the kernel chooses the name
    name = sock.getsockname()
    return sock, "@" + (name.decode() if isinstance(name, bytes) else name)[1:]


class NotifyListener:
    """Receives the messages of child processes. Closes its socket at the end of its `with` block.

    Attributes:
        environment: variables that a child needs.
        first_heard: set when a child has sent its first message.
    """

    def __init__(self) -> None:
        self._socket, name = unix_socket(socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_PASSCRED, 1)
        self.environment: Mapping[str, str] = {
            "NOTIFY_SOCKET": name,
            "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6)),
        }
        self.first_heard = asyncio.Event()
        self._refusals: dict[int, str] = {}
        self._errors: dict[int, str] = {}
        self._heard_s: dict[int, float] = {}
        self._ready: set[int] = set()
        self._reports: dict[int, tuple[float, CapacityReport]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Receive messages on the running event loop while the block runs."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._receive)
        try:
            yield
        finally:
            loop.remove_reader(self._socket)

    def silent_s(self, pid: int) -> float:
        """Seconds since the last message of a child; 0 if it never sent one."""
        self._receive()  # what arrived while this process was blocked
        return time.monotonic() - self._heard_s[pid] if pid in self._heard_s else 0.0

    def capacity(self, pid: int, max_age_s: float) -> CapacityReport | None:
        """The last report of a leader; None if it is older than `max_age_s`."""
        at_s, report = self._reports.get(pid, (float("-inf"), None))
        return report if time.monotonic() - at_s <= max_age_s else None

    def heard(self, pid: int) -> bool:
        """Whether a child has ever sent a message: it does so when it has started."""
        return pid in self._heard_s

    def is_ready(self, pid: int) -> bool:
        """Whether a child has said that it serves."""
        return pid in self._ready

    def forget(self, pid: int) -> tuple[str, str]:
        """Forget a child that has ended: its pid may be reused.

        Returns:
            Why it cannot start with its settings, and the unexpected error with which it ended; empty if it sent none.
        """
        self._receive()
        self._heard_s.pop(pid, None)
        self._ready.discard(pid)
        self._reports.pop(pid, None)
        return self._refusals.pop(pid, ""), self._errors.pop(pid, "")

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                message, ancillary, _, _ = self._socket.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                        pid, uid, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
                        if uid == os.getuid():
                            self._take(pid, message.decode(errors="replace"))

    def _take(self, pid: int, text: str) -> None:
        for field, last_words in ((STATUS_FIELD, self._refusals), (ERROR_FIELD, self._errors)):
            if text.startswith(field):  # the last message of a program
                last_words[pid] = text.removeprefix(field)
                return
        if pid not in self._heard_s:
            self.first_heard.set()
        self._heard_s[pid] = now_s = time.monotonic()
        if text == "READY=1":
            self._ready.add(pid)
        report = (
            CapacityReport.from_json(text.removeprefix(CAPACITY_FIELD)) if text.startswith(CAPACITY_FIELD) else None
        )
        if report is not None:
            self._reports[pid] = (now_s, report)
