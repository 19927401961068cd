"""Starts the collectives of a world, after their fingerprints are compared if `verify_collectives` is set."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from multiworld.collectives.channel import NUMBERED_FROM, CollectiveChannel
from multiworld.collectives.fingerprint import CollectiveFingerprint, Mismatch
from multiworld.errors import WorldError
from multiworld.execution.blocking_pool import BlockingPool
from multiworld.execution.cuda import on_stream
from multiworld.ops.operation import Algorithm, Collective, Operation
from multiworld.transport.connection import PeerConnection


class CollectiveHost(Protocol):
    """The operations of the world, as the scheduler uses them. May be called from any thread."""

    def check(self) -> None:
        """Raises WorldError when the world has ended and pending operations must stop."""

    def post(self, operation: Operation) -> None:
        """Hand a collective without an algorithm to NCCL. Called under the lock. Raises RuntimeError when no thread can start."""

    def on_transferred(self, operation: Operation) -> None:
        """The algorithm completed; the results are in the buffers of the plan."""

    def on_cancelled(self, operation: Operation) -> object:
        """The algorithm was cancelled before it completed: the world must break."""

    def on_protocol_error(self, peer: int, detail: str) -> None:
        """The fingerprint of `peer` differs: the world must break."""

    def fail(self, operations: Sequence[Operation], peer: int, error: Exception) -> None:
        """The operations failed with `error`."""
        ...


class CollectiveScheduler:
    """Starts collectives, with `verify_collectives` after their fingerprints match. They begin in the order in which `start` is called.

    Args:
        lock: the lock of the world.
        pool: runs copies from a device.
        verify_collectives: whether to compare fingerprints before every collective.
    """

    def __init__(
        self, host: CollectiveHost, lock: threading.RLock, pool: BlockingPool, *, verify_collectives: bool
    ) -> None:
        self._host = host
        self._lock = lock
        self._pool = pool
        self._verify = verify_collectives
        self._started = 0
        self._awaiting_check: deque[tuple[Operation, Collective]] = deque()

    def start(self, operation: Operation, plan: Collective, connections: Mapping[int, PeerConnection]) -> None:
        """Start a collective, or the comparison of its fingerprint. Call it under the world's lock.

        Raises RuntimeError when a connection is lost, WorldError when the world has ended.
        """
        if plan.number is None:
            number = self._started % NUMBERED_FROM
            self._started += 1
        else:
            number = NUMBERED_FROM + plan.number
        operation.channel = CollectiveChannel(operation, connections, number, self._lock, self._host.check)
        if self._verify and connections:
            self._awaiting_check.append((operation, plan))
            on_compared = partial(self._on_compared, operation)
            CollectiveFingerprint(operation.channel, plan, on_compared).begin()
        else:
            self._begin(operation, plan)

    def _on_compared(self, operation: Operation, mismatch: Mismatch | None) -> None:
        """Begin the verified collectives that are next in order. Called under the world's lock, on any thread."""
        if mismatch is not None:
            self._host.on_protocol_error(mismatch.rank, mismatch.detail)
            return
        operation.verified = True
        while self._awaiting_check and self._awaiting_check[0][0].verified:
            following, plan = self._awaiting_check.popleft()
            try:
                self._begin(following, plan)
            except Exception as error:  # noqa: BLE001 - see `WorldOperations.fail`
                self._host.fail([following], following.peer, error)

    def _begin(self, operation: Operation, plan: Collective) -> None:
        if plan.algorithm is None:
            self._host.post(operation)
        elif plan.staged:
            self._pool.run(partial(self._load, operation, plan.algorithm))
        else:
            self._run(operation, plan.algorithm())

    def _load(self, operation: Operation, load: Callable[[], Algorithm]) -> None:
        """Copy the data from the device, then run the algorithm. Runs on a thread of the blocking pool."""
        try:
            with on_stream(operation.stream):
                algorithm = load()
        except Exception as error:  # noqa: BLE001 - see `WorldOperations.fail`
            self._host.fail([operation], operation.peer, error)
        else:
            self._run(operation, algorithm)

    def _run(self, operation: Operation, algorithm: Algorithm) -> None:
        """Run the algorithm on the event loop of the caller. May be called from any thread."""
        loop = operation.future.get_loop()

        def begin() -> None:
            if operation.done():
                return
            try:
                # Not loop.create_task: an eager task factory would run the algorithm now, inside a callback of a connection.
                operation.task = asyncio.Task(self._follow(operation, algorithm), loop=loop)
            except Exception as error:  # noqa: BLE001 - see `WorldOperations.fail`
                self._host.fail([operation], operation.peer, error)

        if asyncio._get_running_loop() is loop:
            begin()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the operation fails when the world ends
                loop.call_soon_threadsafe(begin)

    async def _follow(self, operation: Operation, algorithm: Algorithm) -> None:
        """Await the algorithm and report its outcome."""
        assert operation.channel is not None
        try:
            await algorithm(operation.channel)
        except WorldError:
            pass  # the world has ended and fails its pending operations
        except Exception as error:  # noqa: BLE001 - see `WorldOperations.fail`
            self._host.fail([operation], operation.peer, error)
        except asyncio.CancelledError:
            if not operation.done():  # the event loop is shutting down
                self._host.on_cancelled(operation)
            raise
        else:
            self._host.on_transferred(operation)
        finally:
            operation.task = operation.channel = None
