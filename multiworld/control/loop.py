"""The control loop: one thread that serves all control connections of a process. It never blocks.

Sockets are non-blocking and callbacks are short, so the loop never waits for a peer, a world or the application. An asyncio event loop
that is blocked for seconds breaks no world, unless it is registered for monitoring (see progress.py). Time in which this process itself
did not run (SIGSTOP, no CPU time) does not count towards the heartbeat timeouts of its peers, up to a limit.
"""

import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from multiworld.control.progress import LoopCounter
from multiworld.control.sockets import close_in_child
from multiworld.execution.threads import DaemonThread

logger = logging.getLogger(__name__)

_STALL_S = 0.25
"""A longer delay of one iteration counts as a stall of this process. Shorter ones need no correction: data is read before timers run."""
_IDLE_S = 60.0


def _nothing() -> None: ...


class MonitoredConnection(Protocol):
    """The part of a control connection that the loop uses."""

    def credit_stall(self, stalled_s: float) -> None:
        """This process did not run for `stalled_s` seconds, which should not count as silence of the peer."""

    def close(self) -> None: ...


class Timer:
    """A scheduled call. Call `cancel` on the control loop's thread only."""

    __slots__ = ("args", "call", "cancelled")

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.call = call
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.call, self.args = _nothing, ()  # it stays queued until it is due, and must not keep a world alive


class ControlLoop:
    """Serves sockets and timers on one daemon thread. `start`, `stop` and `call_soon` may be called from other threads."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()
        self.connections: set[MonitoredConnection] = set()
        self.loop_counter = LoopCounter()
        """Counts the ticks of this process's event loop; heartbeats carry the count."""
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake_out, self._wake_in = map(close_in_child, socket.socketpair())
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. Does nothing if it was started. It cannot start again after `stop`.

        Raises RuntimeError when no thread is available; the sockets are closed then.
        """
        if self._thread is not None:
            return
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakeups)
        self._thread = DaemonThread(self._run, "multiworld-control")
        try:
            self._thread.start()
        except BaseException:
            self._thread = None
            self._close_all()
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """Run the queued calls, end the thread, and close all sockets. Waits at most `timeout_s` for the thread."""
        self.loop_counter.stop()
        if self._thread is not None:
            self.call_soon(self._stop)
            self._thread.join(timeout_s)
        else:
            self._close_all()

    # -- from any thread -------------------------------------------------------------------------------------------------

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Run `call(*args)` on the control loop's thread, in the order of the calls."""
        self._calls.append((call, args))
        with contextlib.suppress(OSError):  # the buffer is full, so the loop wakes anyway, or the loop has ended
            self._wake_in.send(b"\0")

    # -- on the control loop's thread ------------------------------------------------------------------------------------

    def call_later(self, delay_s: float, call: Callable[..., object], *args: Any) -> Timer:
        return self._call_at(time.monotonic() + delay_s, call, args)

    def call_at_multiple(self, interval_s: float, call: Callable[..., object]) -> Timer:
        """Call when the clock next reaches a multiple of `interval_s`.

        Timers with equal intervals fire together, in all worlds and in all processes of a host, so a process that has many worlds wakes
        up once for the heartbeats of all of them.
        """
        return self._call_at((time.monotonic() // interval_s + 1) * interval_s, call, ())

    def _call_at(self, due_s: float, call: Callable[..., object], args: tuple[Any, ...]) -> Timer:
        timer = Timer(call, args)
        heapq.heappush(self._timers, (due_s, next(self._sequence), timer))
        return timer

    def register(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        self._selector.register(sock, events, callback)

    def modify(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        if self._selector.get_key(sock).events != events:
            self._selector.modify(sock, events, callback)

    def unregister(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def _run(self) -> None:
        try:
            while not self._stopping:
                with contextlib.suppress(MemoryError):  # the next iteration retries
                    self._run_once()
        finally:
            self._close_all()

    def _run_once(self) -> None:
        began_s = time.monotonic()
        timeout_s = min(_IDLE_S, self._timers[0][0] - began_s) if self._timers else _IDLE_S
        timeout_s = 0.0 if self._calls else max(0.0, timeout_s)
        ready = self._selector.select(timeout_s)
        self._discount_own_stall(began_s, timeout_s)
        for key, mask in ready:
            if key.fd in self._selector.get_map():  # not closed by an earlier callback of this iteration
                self._call_safely(key.data, mask)
        for _ in range(len(self._calls)):
            call, args = self._calls.popleft()
            self._call_safely(call, *args)
        while self._timers and self._timers[0][0] <= self.now_s:
            _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self._call_safely(timer.call, *timer.args)

    def _discount_own_stall(self, began_s: float, planned_s: float) -> None:
        """Do not count a stall of this process (SIGSTOP, no CPU time, no GIL) as silence of the peers."""
        now_s = time.monotonic()
        stalled_s = began_s - self.now_s + max(0.0, now_s - began_s - planned_s)
        self.now_s = now_s
        if stalled_s > _STALL_S:
            for connection in self.connections:
                connection.credit_stall(stalled_s)

    def _call_safely(self, call: Callable[..., object], *args: Any) -> None:
        try:
            call(*args)
        except Exception:
            with contextlib.suppress(Exception):  # logging may fail for lack of memory
                logger.exception("control loop: %r failed", call)

    def _drain_wakeups(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _stop(self) -> None:
        self._stopping = True

    def _close_all(self) -> None:
        for connection in list(self.connections):
            connection.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
        self._timers.clear()
