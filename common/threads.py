"""Threads that run while a block runs."""

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def thread_while(target: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run `target(ended)` in a thread while the block runs. At its end, sets `ended` and waits until the target returns."""
    ended = threading.Event()
    thread = threading.Thread(target=target, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
