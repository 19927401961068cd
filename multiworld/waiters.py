"""Threads for what may take its time: the agreement before a collective, NCCL, copies between devices and into odd strides.

All of it releases the GIL, so a waiting thread costs nothing but itself. Threads are made when needed, reused while their world
lives, and as many as operations are pending at once: a receive that stays pending must not hold up the completion of another.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Waiters:
    """The waiting threads of one world."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def run(self, wait: Callable[[], None]) -> None:
        """Run `wait`, which must not raise, on a thread of its own. Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the waiting threads are closed")
            if self._idle:
                self._idle.pop().put(wait)
                return
            inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            inbox.put(wait)
            thread = threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True)
            thread.start()
            self._threads.add(thread)

    def close(self, timeout_s: float) -> bool:
        """End the idle threads and wait for the busy ones. True when none is left."""
        with self._lock:
            self._closed = True
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()
            threads = list(self._threads)
        deadline = threading.TIMEOUT_MAX if timeout_s is None else timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline)
        return not any(thread.is_alive() for thread in threads)

    def _serve(self, inbox: SimpleQueue[Callable[[], None] | None]) -> None:
        try:
            while (wait := inbox.get()) is not None:
                wait()
                del wait  # a tensor or a group kept alive here would outlive its world
                with self._lock:
                    if self._closed:
                        return
                    self._idle.append(inbox)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
