"""The one thread that serves every lifeline of a process, and so sees every failure. It never blocks.

Nothing here waits for a peer, a world or the application: sockets are non-blocking, callbacks are short, and an event loop that
stands still for seconds loses no world. When this process itself was stopped or starved, the time in which it could not have
heard anybody is not held against its peers.
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
from typing import Any

from multiworld.lifeline import Lifeline

logger = logging.getLogger(__name__)

_STALL_S = 0.25
"""A round of the loop later than this was a stall of ours. Shorter ones need no forgiveness: what came meanwhile is read first."""
_IDLE_S = 60.0


def _nothing() -> None: ...


class Timer:
    """A call that is due; `cancel` may be called on the watchdog's thread only."""

    __slots__ = ("args", "call", "cancelled")

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.call = call
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.call, self.args = _nothing, ()  # it stays queued until it is due, and must not keep a world alive so long


class WatchDog:
    """Runs sockets and timers on one daemon thread. `start` and `stop` own it; only `call_soon` may be called from elsewhere."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()
        self.lifelines: set[Lifeline] = set()
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_current_thread(self) -> bool:
        """Whether it is the watchdog's own thread that asks."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start the thread. A watchdog runs once: after `stop` make another."""
        if self._thread is not None:
            return
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakeups)
        self._thread = threading.Thread(target=self._run, name="multiworld-watchdog", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether its thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread, wait for that, and free its sockets. What was asked by `call_soon` before is still done."""
        if self._thread is not None:
            self.call_soon(self._stop)
            self._thread.join(timeout_s)
        else:
            self._free()

    # -- from any thread -------------------------------------------------------------------------------------------------

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Run `call(*args)` on the watchdog's thread, in the order of asking."""
        self._calls.append((call, args))
        with contextlib.suppress(OSError):  # full: it is awake already; closed: there is nobody to wake
            self._wake_in.send(b"\0")

    # -- on the watchdog's thread ----------------------------------------------------------------------------------------

    def call_later(self, delay_s: float, call: Callable[..., object], *args: Any) -> Timer:
        timer = Timer(call, args)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._sequence), timer))
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
                self._round()
        finally:
            self._free()

    def _round(self) -> None:
        began_s = time.monotonic()
        timeout_s = min(_IDLE_S, self._timers[0][0] - began_s) if self._timers else _IDLE_S
        timeout_s = 0.0 if self._calls else max(0.0, timeout_s)
        ready = self._selector.select(timeout_s)
        self._forgive_own_stall(began_s, timeout_s)
        for key, mask in ready:
            if key.fd in self._selector.get_map():  # an earlier callback of this round may have closed it
                self._guarded(key.data, mask)
        for _ in range(len(self._calls)):
            call, args = self._calls.popleft()
            self._guarded(call, *args)
        while self._timers and self._timers[0][0] <= self.now_s:
            _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self._guarded(timer.call, *timer.args)

    def _forgive_own_stall(self, began_s: float, planned_s: float) -> None:
        """Move `last_heard_s` of all by as long as we were away: stopped (SIGSTOP), starved, or without the GIL."""
        now_s = time.monotonic()
        away_s = began_s - self.now_s + max(0.0, now_s - began_s - planned_s)
        self.now_s = now_s
        if away_s > _STALL_S:
            for lifeline in self.lifelines:
                lifeline.last_heard_s += away_s

    def _guarded(self, call: Callable[..., object], *args: Any) -> None:
        try:
            call(*args)
        except Exception:
            logger.exception("watchdog: %r failed", call)

    def _drain_wakeups(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _stop(self) -> None:
        self._stopping = True

    def _free(self) -> None:
        for lifeline in list(self.lifelines):
            lifeline.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
        self._timers.clear()
