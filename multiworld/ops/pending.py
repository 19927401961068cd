"""The pending operations of one world, and how they complete or fail."""

import threading
from collections.abc import Sequence
from typing import Protocol

from multiworld.errors import Cause, WorldError
from multiworld.execution.failures import ConnectionLostError, described
from multiworld.ops.operation import Operation


class OperationWorld(Protocol):
    """The world, as its operations use it. All methods may be called from any thread."""

    name: str
    rank: int

    def ending(self) -> WorldError | None:
        """A new instance of the error that the world ended with; None while the world is usable."""

    def fail(self, cause: Cause, rank: int, detail: str = "") -> None:
        """Break the world. `rank` is the member that caused it, -1 if unknown."""
        ...

    def on_connection_failed(self, peer: int, detail: str) -> None:
        """A connection to `peer` was lost, of this library or of c10d."""

    def on_protocol_error(self, peer: int, detail: str) -> None:
        """`peer` violated the protocol, or its fingerprint does not match."""

    def on_local_failure(self, detail: str) -> None:
        """This member failed, for example because it lacks memory or a thread. No peer failed."""

    def on_drained(self) -> None:
        """`draining` is set and the last pending operation has completed or failed."""


class PendingOperations:
    """The operations of a world that have neither completed nor failed. All methods may be called from any thread.

    Args:
        lock: the lock of the world.
    """

    def __init__(self, world: OperationWorld, lock: threading.RLock) -> None:
        self.draining = False
        """A member left: pending operations may still complete. Operations that fail get their error when the world is torn down."""
        self._world = world
        self._lock = lock
        self._pending: set[Operation] = set()
        self._copying_back: set[Operation] = set()
        self._failed: list[Operation] = []  # they get the error of the world when it has ended

    @property
    def busy(self) -> bool:
        """Whether an operation is pending."""
        return bool(self._pending)

    def copy_back(self, operation: Operation) -> None:
        """Copy the results to the caller's tensors, if necessary.

        Raises RuntimeError if the operation has already failed; nothing is written then.
        """
        if operation.plan.copy_back is None:
            return
        with self._lock:
            if operation not in self._pending:
                raise RuntimeError("the world has ended")
            self._copying_back.add(operation)
        operation.plan.copy_back()

    def complete(self, operation: Operation) -> None:
        """The operation succeeded and its results are in the caller's tensors."""
        # Does not take the lock, because another thread may hold it while posting. The order matters: code that sets `draining` then
        # reads `busy`, so `_pending` must change before `draining` is read here.
        self._pending.discard(operation)
        self._copying_back.discard(operation)
        operation.works = []
        operation.resolve(None)
        if self.draining and not self._pending:
            self._world.on_drained()

    def fail(self, operations: Sequence[Operation], peer: int, error: Exception) -> None:
        """Fail the operations and break the world. Their callers get the error of the world, when it is known.

        A ConnectionLostError is attributed to `peer`. Any other error (no memory, no thread, refused by the backend) is a failure of this
        member.
        """
        error = error.with_traceback(None)  # a traceback keeps tensors alive
        with self._lock:
            self._pending.difference_update(operations)
            self._copying_back.difference_update(operations)
            ending = self._world.ending()
            if ending is None or self.draining:
                self._failed += operations
            drained = self.draining and not self._pending
        for operation in operations:
            operation.works = []
        if drained:
            self._world.on_drained()
        if ending is None:
            detail = f"{operations[0].name}: {described(error)}"
            if isinstance(error, ConnectionLostError):
                self._world.on_connection_failed(peer, detail)
            else:
                self._world.on_local_failure(detail)
        elif not self.draining:
            self._resolve(operations)

    def fail_all(self, *, except_copying_back: bool = False) -> None:
        """Resolve all operations with the error of the ended world. Idempotent.

        Args:
            except_copying_back: keep the operations whose results are being copied to the caller's tensors.
        """
        with self._lock:
            self.draining = False
            if not except_copying_back:
                self._copying_back = set()
            operations, self._failed = [*self._failed, *(self._pending - self._copying_back)], []
            self._pending &= self._copying_back
        self._resolve(operations)

    def on_timeout(self, operation: Operation) -> None:
        """The caller's timeout has expired."""
        if operation in self._pending:
            detail = f"{operation.name} took longer than {operation.timeout_s:g} s"
            self._world.fail(Cause.TIMEOUT, operation.peer, detail)

    def on_cancelled(self, operation: Operation) -> WorldError | None:
        """The caller was cancelled, or its event loop shuts down: break the world. Returns the error that the world ended with."""
        self._world.fail(Cause.ABORTED, self._world.rank, f"{operation.name} cancelled")
        return self._world.ending()

    def _resolve(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            operation.works = []
            operation.resolve(self._world.ending())
