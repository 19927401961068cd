"""A thread that waits for one message serves its connection itself. This saves two switches between threads for each message."""

import os
import select
import threading
import time

from multiworld.execution.outcome import Outcome
from multiworld.transport.connection import PeerConnection


class _Waiter:
    """What one thread waits with: for a socket, or for the end of an operation on another thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)

    def __del__(self) -> None:
        os.close(self._event)

    def wake(self, _: object) -> None:
        """End the current or the next wait. Called when an operation is done, on any thread."""
        if threading.get_ident() != self._thread:
            os.eventfd_write(self._event, 1)

    def wait(self, fd: int, limit_s: float | None) -> None:
        """Wait until a socket is readable, `wake` is called, or `limit_s` has passed."""
        self._poll.register(fd, select.POLLIN)
        try:
            ready = self._poll.poll(None if limit_s is None else max(0.0, 1e3 * limit_s))
        finally:
            self._poll.unregister(fd)
        if any(each == self._event for each, _ in ready):
            os.eventfd_read(self._event)


_waiters = threading.local()
# A forked child shares the events of its parent and must not use them.
os.register_at_fork(after_in_child=lambda: vars(_waiters).pop("own", None))


def await_transfer(connection: PeerConnection | None, outcome: Outcome, limit_s: float | None) -> None:
    """Serve `connection` on this thread until the outcome of a message is known, or until `limit_s` seconds have passed.

    Returns earlier when there is no connection any more, or when another thread serves it. The caller waits for the outcome then.
    """
    if connection is None or not connection.claim():
        return
    until_s = None if limit_s is None else time.monotonic() + limit_s
    try:
        if not (waiter := getattr(_waiters, "own", None)):
            waiter = _waiters.own = _Waiter()
        outcome.add_done_callback(waiter.wake)
        fd = connection.sock.fileno()
        while connection.end_reason is None and not outcome.done():
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            waiter.wait(fd, left_s)
            connection.on_event(select.EPOLLIN)
    finally:
        connection.release()
