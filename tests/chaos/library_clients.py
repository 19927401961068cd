"""Load of the client library, which knows several frontends."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from multiworld_client import AsyncClient, Client, Prediction
from multiworld_serving.testing.load.images import photo
from tests.waiting import wait_until

WAIT_S = 150.0
PHOTO = photo(width=64, height=64)
PAUSE_S = 0.1
"""Between the requests of a client: processes that start have CPU time."""


@dataclass
class Calls:
    """Calls of clients that ran while the block of a test did; failures are the exceptions that they raised."""

    answered: int = 0
    retried: int = 0
    failures: list[Exception] = field(default_factory=list)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call, or keep its exception, whatever its type."""
        try:
            yield
            self.answered += 1
        except Exception as error:  # noqa: BLE001
            self.failures.append(error)

    def count(self, prediction: Prediction) -> None:
        """Count the prediction of a call that was retried."""
        self.retried += prediction.tries > 1

    def until_answered(self, more: int) -> None:
        """Wait for this many further answers."""
        wanted = self.answered + more
        wait_until(lambda: self.answered >= wanted or bool(self.failures))


@contextlib.contextmanager
def clients(*urls: str) -> Iterator[Calls]:
    """Two threads that share a `Client` and two tasks that share an `AsyncClient` send requests while the block lasts."""
    calls, stop = Calls(), threading.Event()

    def threads_call(client: Client) -> None:
        while not stop.wait(PAUSE_S):
            with calls.counted():
                calls.count(client.predict(PHOTO))

    async def task_calls(client: AsyncClient) -> None:
        while not stop.is_set():
            await asyncio.sleep(PAUSE_S)
            with calls.counted():
                calls.count(await client.predict(PHOTO))

    async def tasks_call() -> None:
        async with AsyncClient(urls, timeout_s=WAIT_S) as client:
            await asyncio.gather(*(task_calls(client) for _ in range(2)))

    with Client(urls, timeout_s=WAIT_S) as client:
        threads = [threading.Thread(target=threads_call, args=(client,)) for _ in range(2)]
        threads.append(threading.Thread(target=asyncio.run, args=(tasks_call(),)))
        for thread in threads:
            thread.start()
        try:
            yield calls
        finally:
            stop.set()
            for thread in threads:
                thread.join()
