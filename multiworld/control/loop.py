"""The control loop: one thread that serves all control connections of a process, with an asyncio event loop of its own. It never blocks.

Sockets are non-blocking and callbacks are short, so the loop never waits for a peer, a world or the application. An event loop of the
application that is blocked for seconds breaks no world, unless it is registered for monitoring. Then the heartbeats carry a count that this
event loop increments, and a peer whose count does not change for too long is `stalled`. Time in which this process itself did not run
(SIGSTOP, no CPU time) does not count towards the heartbeat timeouts of its peers, up to a limit.
"""

import asyncio
import contextlib
import logging
import math
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from multiworld.control.frames import HEARTBEAT_BYTES, Heartbeat
from multiworld.execution.threads import DaemonThread

logger = logging.getLogger(__name__)

_STALL_S = 0.25
"""A longer delay of one iteration counts as a stall of this process. Shorter ones need no correction: data is read before timers run."""


class LoopCounter:
    """Increments a count while the registered event loop runs."""

    def __init__(self) -> None:
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def register(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        """Increment the count on `loop` every `interval_s` seconds. Call it on that loop. Does nothing while a registered loop is open."""
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
            self._tick(loop, interval_s)

    def stop(self) -> None:
        """Stop counting. Callable from any thread."""
        self._loop = None

    def heartbeat(self) -> bytes:
        """Return the encoded heartbeat to send now. Callable from any thread."""
        if self._loop is None or self._loop.is_closed():
            return HEARTBEAT_BYTES
        return Heartbeat(self._count).encode()

    def _tick(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        if self._loop is loop:
            self._count += 1
            loop.call_later(interval_s, self._tick, loop, interval_s)


class ServedConnection(Protocol):
    """A connection that the loop serves. See `ControlConnection`."""

    def credit_stall(self, stalled_s: float) -> None: ...

    def close(self, flush_s: float) -> None: ...


class _StallDetector(selectors.EpollSelector):
    """A selector that measures how long this process did not run (SIGSTOP, no CPU time, no GIL).

    Attributes:
        now_s: when the current iteration of the loop began, by `time.monotonic`.
    """

    def __init__(self, on_stall: Callable[[float], None]) -> None:
        super().__init__()
        self.now_s = time.monotonic()
        self._on_stall = on_stall

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began_s = time.monotonic()
        ready = super().select(timeout)
        ended_s = time.monotonic()
        planned_s = math.inf if timeout is None else max(0.0, timeout)
        stalled_s = began_s - self.now_s + max(0.0, ended_s - began_s - planned_s)
        self.now_s = ended_s
        if stalled_s > _STALL_S:
            self._on_stall(stalled_s)
        return ready


class ControlLoop:
    """Serves sockets, timers and tasks on one daemon thread. `start`, `stop` and `call_soon` may be called from other threads.

    Attributes:
        loop: the event loop of the thread.
        connections: the open control connections.
        loop_counter: counts the ticks of the application's event loop; heartbeats carry the count.
    """

    def __init__(self) -> None:
        self.connections: set[ServedConnection] = set()
        self.loop_counter = LoopCounter()
        self._selector = _StallDetector(self._credit_stall)
        self._runner = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._selector))
        self.loop = self._runner.get_loop()
        self.loop.set_exception_handler(_log)
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def now_s(self) -> float:
        """When the current iteration began, by `time.monotonic`."""
        return self._selector.now_s

    @property
    def running(self) -> bool:
        """Return whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. Does nothing if it was started. It cannot start again after `stop`.

        Raises RuntimeError when no thread is available; the loop is closed then.
        """
        if self._thread is not None:
            return
        self._thread = DaemonThread(self._run, "multiworld-control")
        try:
            self._thread.start()
        except BaseException:
            self._thread = None
            self._close()
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """Run the queued calls, end the thread, and close all connections. Waits at most `timeout_s` for the thread."""
        self.loop_counter.stop()
        if self._thread is not None:
            self.call_soon(self._stop)
            self._thread.join(timeout_s)
        else:
            self._close()

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Run `call(*args)` on the control loop's thread, in the order of the calls. Never after `stop`. Callable from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(call, *args)

    # -- on the control loop's thread ------------------------------------------------------------------------------------

    def call_at_multiple(self, interval_s: float, call: Callable[..., object]) -> asyncio.TimerHandle:
        """Call when the clock next reaches a multiple of `interval_s`.

        Timers with equal intervals fire together, in all worlds and in all processes of a host, so a process that has many worlds wakes
        up once for the heartbeats of all of them.
        """
        return self.loop.call_at((self.loop.time() // interval_s + 1) * interval_s, call)

    def _credit_stall(self, stalled_s: float) -> None:
        for connection in self.connections:
            connection.credit_stall(stalled_s)

    def _run(self) -> None:
        while not self._stopping:
            with contextlib.suppress(MemoryError):  # the next iteration retries
                self.loop.run_forever()
        self._close()

    def _stop(self) -> None:
        self._stopping = True
        self.loop.stop()

    def _close(self) -> None:
        for connection in list(self.connections):
            connection.close(0.0)
        self._runner.close()  # ends the tasks and closes the loop


def _log(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error("control loop: %s", context["message"], exc_info=context.get("exception"))
