"""Starts the collectives of a world that use its connections, if wanted after their fingerprints are compared."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from multiworld.collectives.channel import CollectiveChannel
from multiworld.collectives.fingerprint import CollectiveFingerprint, Mismatch
from multiworld.errors import WorldError
from multiworld.execution.blocking_pool import BlockingPool
from multiworld.execution.cuda import on_stream
from multiworld.ops.operation import Algorithm, Operation
from multiworld.transport.connection import PeerConnection


class CollectiveHost(Protocol):
    """The executor of the world, as the scheduler uses it. May be called from any thread."""

    def check(self) -> None:
        """Raises WorldError when the world has ended and pending operations must stop."""

    def post(self, operation: Operation) -> None:
        """Hand a collective without an algorithm to c10d. Called under the world's lock. Raises RuntimeError when c10d refuses."""

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
        self._awaiting_check: deque[Operation] = deque()

    def handles(self, operation: Operation, connections: Mapping[int, PeerConnection]) -> bool:
        """Whether this collective must be started with `start`: it has an algorithm, or its fingerprint must be compared."""
        return operation.plan.algorithm is not None or (self._verify and bool(connections))

    def start(self, operation: Operation, connections: Mapping[int, PeerConnection]) -> None:
        """Start a collective, or the comparison of its fingerprint. Call it under the world's lock.

        Raises RuntimeError when a connection is lost, WorldError when the world has ended.
        """
        operation.channel = CollectiveChannel(operation, connections, self._started, self._lock, self._host.check)
        self._started += 1
        if self._verify and connections:
            self._awaiting_check.append(operation)
            on_compared = partial(self._on_compared, operation)
            CollectiveFingerprint(operation.channel, operation.plan, on_compared).begin()
        else:
            self._begin(operation)

    def _on_compared(self, operation: Operation, mismatch: Mismatch | None) -> None:
        """Begin the verified collectives that are next in order. Called under the world's lock, on any thread."""
        if mismatch is not None:
            self._host.on_protocol_error(mismatch.rank, mismatch.detail)
            return
        operation.verified = True
        while self._awaiting_check and self._awaiting_check[0].verified:
            following = self._awaiting_check.popleft()
            try:
                self._begin(following)
            except Exception as error:  # noqa: BLE001 - see `PendingOperations.fail`
                self._host.fail([following], following.peer, error)

    def _begin(self, operation: Operation) -> None:
        if operation.plan.algorithm is None:
            self._host.post(operation)
        elif operation.plan.staged:
            self._pool.run(partial(self._load, operation))
        else:
            self._run(operation, operation.plan.algorithm())

    def _load(self, operation: Operation) -> None:
        """Copy the data from the device, then run the algorithm. Runs on a thread of the blocking pool."""
        assert operation.plan.algorithm is not None
        try:
            with on_stream(operation.stream):
                algorithm = operation.plan.algorithm()
        except Exception as error:  # noqa: BLE001 - see `PendingOperations.fail`
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
            except Exception as error:  # noqa: BLE001 - see `PendingOperations.fail`
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
        except Exception as error:  # noqa: BLE001 - see `PendingOperations.fail`
            self._host.fail([operation], operation.peer, error)
        except asyncio.CancelledError:
            if not operation.done():  # the event loop is shutting down
                self._host.on_cancelled(operation)
            raise
        else:
            self._host.on_transferred(operation)
        finally:
            operation.task = operation.channel = None
