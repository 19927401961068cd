"""Starts the collectives of a world that use its connections, and checks fingerprints before collectives in checked mode."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from multiworld.collectives.channel import CollectiveChannel
from multiworld.collectives.fingerprint import CollectiveFingerprint, MismatchError
from multiworld.errors import WorldError
from multiworld.execution.blocking_pool import BlockingPool
from multiworld.execution.cuda import on_stream
from multiworld.ops.operation import Operation, Script
from multiworld.transport.connection import PeerConnection


class CollectiveHost(Protocol):
    """The executor of the world, as the scheduler uses it. May be called from any thread."""

    def check(self) -> None:
        """Raises WorldError when the world has ended and pending operations must stop."""

    def post(self, operation: Operation) -> None:
        """Hand a collective without a script to c10d. Called under the world's lock. Raises RuntimeError when c10d refuses."""

    def on_done(self, operation: Operation) -> None:
        """The script completed; the results are in the buffers of the plan."""

    def on_abandoned(self, operation: Operation) -> None:
        """The script was cancelled before it completed: the world must break."""

    def on_dissent(self, rank: int, detail: str) -> None:
        """The fingerprints of the members differ: the world must break."""

    def fail(self, operations: Sequence[Operation], peer: int, error: Exception) -> None:
        """The operations failed with `error`."""
        ...


class CollectiveScheduler:
    """Starts collectives, in checked mode after their fingerprints match. They begin in the order in which `start` is called.

    Args:
        lock: the lock of the world.
        waiters: runs copies from a device.
        checked: whether to compare fingerprints before every collective.
    """

    def __init__(self, host: CollectiveHost, lock: threading.RLock, waiters: BlockingPool, *, checked: bool) -> None:
        self._host = host
        self._lock = lock
        self._waiters = waiters
        self._checked = checked
        self._started = 0
        self._conferring: deque[Operation] = deque()

    def concerns(self, operation: Operation, lines: Mapping[int, PeerConnection]) -> bool:
        """Whether this collective must be started with `start`: it has a script, or its fingerprint must be compared."""
        return operation.plan.script is not None or (self._checked and bool(lines))

    def start(self, operation: Operation, lines: Mapping[int, PeerConnection]) -> None:
        """Start a collective, or the comparison of its fingerprint. Call it under the world's lock.

        Raises RuntimeError when a connection is lost, WorldError when the world has ended.
        """
        operation.exchange = CollectiveChannel(operation, lines, self._started, self._lock, self._host.check)
        self._started += 1
        if self._checked and lines:
            self._conferring.append(operation)
            plan, on_heard = operation.plan, partial(self._on_heard, operation)
            CollectiveFingerprint(operation.exchange, plan.signature, plan.splits_bytes, on_heard).begin()
        else:
            self._begin(operation)

    def _on_heard(self, operation: Operation, dissent: MismatchError | None) -> None:
        """All fingerprints are received: begin the collectives that are next in order. Under the world's lock, on any thread."""
        if dissent is not None:
            self._host.on_dissent(dissent.rank, dissent.detail)
            return
        operation.agreed = True
        while self._conferring and self._conferring[0].agreed:
            following = self._conferring.popleft()
            try:
                self._begin(following)
            except Exception as rejection:  # noqa: BLE001 - see `OperationExecutor.fail`
                self._host.fail([following], following.peer, rejection.with_traceback(None))

    def _begin(self, operation: Operation) -> None:
        if operation.plan.script is None:
            self._host.post(operation)
        elif operation.plan.staged:
            self._waiters.run(partial(self._load, operation))
        else:
            self._perform(operation, operation.plan.script())

    def _load(self, operation: Operation) -> None:
        """Copy the data from the device, then run the script. Runs on a thread of the blocking pool."""
        assert operation.plan.script is not None
        try:
            with on_stream(operation.stream):
                script = operation.plan.script()
        except Exception as error:  # noqa: BLE001 - see `OperationExecutor.fail`
            self._host.fail([operation], operation.peer, error.with_traceback(None))
        else:
            self._perform(operation, script)

    def _perform(self, operation: Operation, script: Script) -> None:
        """Run the script on the event loop of the caller. May be called from any thread."""
        loop = operation.future.get_loop()

        def begin() -> None:
            if operation.done():
                return
            try:
                # Not loop.create_task: an eager task factory would run the script now, inside a callback of a connection.
                operation.task = asyncio.Task(self._follow_script(operation, script), loop=loop)
            except Exception as error:  # noqa: BLE001 - see `OperationExecutor.fail`
                self._host.fail([operation], operation.peer, error.with_traceback(None))

        if asyncio._get_running_loop() is loop:
            begin()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the operation fails when the world ends
                loop.call_soon_threadsafe(begin)

    async def _follow_script(self, operation: Operation, script: Script) -> None:
        assert operation.exchange is not None
        try:
            await script(operation.exchange)
        except WorldError:
            pass  # the world has ended and fails its pending operations
        except Exception as error:  # noqa: BLE001 - see `OperationExecutor.fail`
            self._host.fail([operation], operation.peer, error.with_traceback(None))
        except asyncio.CancelledError:
            if not operation.done():  # the event loop is shutting down
                self._host.on_abandoned(operation)
            raise
        else:
            self._host.on_done(operation)
        finally:
            operation.task = operation.exchange = None
