"""Frontends that are killed while clients send requests: the client library hides it from its callers."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from multiworld_client import AsyncClient, Client
from multiworld_serving.testing.load.images import photo
from tests.chaos.clients import TOKEN
from tests.services import external_frontend, small_service
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
WAIT_S = 60.0
PHOTO = photo(width=64, height=64)


@dataclass
class Calls:
    """Calls of clients that ran while the block of a test did; failures are the exceptions that they raised."""

    answered: int = 0
    retried: int = 0
    failures: list[Exception] = field(default_factory=list)

    def until_answered(self, more: int) -> None:
        """Wait for this many further answers."""
        wanted = self.answered + more
        wait_until(lambda: self.answered >= wanted or bool(self.failures))


@contextlib.contextmanager
def clients(*urls: str) -> Iterator[Calls]:
    """Four threads that share a `Client` and four tasks that share an `AsyncClient` send requests while the block lasts."""
    calls, stop = Calls(), threading.Event()

    def count(tries: int) -> None:
        calls.answered += 1
        calls.retried += tries > 1

    def threads_call(client: Client) -> None:
        while not stop.is_set():
            try:
                count(client.predict(PHOTO).tries)
            except Exception as error:  # noqa: BLE001 - errors that are not of the client count too
                calls.failures.append(error)

    async def task_calls(client: AsyncClient) -> None:
        while not stop.is_set():
            try:
                count((await client.predict(PHOTO)).tries)
            except Exception as error:  # noqa: BLE001 - errors that are not of the client count too
                calls.failures.append(error)

    async def tasks_call() -> None:
        async with AsyncClient(urls, timeout_s=WAIT_S) as client:
            await asyncio.gather(*(task_calls(client) for _ in range(4)))

    with Client(urls, timeout_s=WAIT_S) as client:
        threads = [threading.Thread(target=threads_call, args=(client,)) for _ in range(4)]
        threads.append(threading.Thread(target=asyncio.run, args=(tasks_call(),)))
        for thread in threads:
            thread.start()
        try:
            yield calls
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_no_call_fails_when_frontends_end_in_turn(tmp_path: Path) -> None:
    """One is killed and one is stopped, each with a URL of its own; then those of the last URL are killed."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with (
        small_service(frontends=2, token_file=token) as service,
        external_frontend(service, TOKEN, "first", tmp_path) as (first_url, first),
        external_frontend(service, TOKEN, "second", tmp_path) as (second_url, second),
        clients(first_url, second_url, service.url) as calls,
    ):
        calls.until_answered(20)
        first.kill()
        first.wait()
        calls.until_answered(20)
        second.terminate()
        second.wait()
        calls.until_answered(20)
        for slot in (0, 1):
            since = len(service.lines)
            os.kill(service.child_pids("frontend")[slot], signal.SIGKILL)
            said = f"frontend-{slot} serves"
            service.wait_for(lambda line, said=said: line.message.startswith(said), WAIT_S, after=since)  # type: ignore[misc]
            calls.until_answered(20)
    assert not calls.failures, calls.failures[:3]
    assert calls.retried
