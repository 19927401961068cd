"""Mutual exclusion of administrative operations on the workers, such as a rolling restart and a version rollout."""

from collections.abc import Iterator
from contextlib import contextmanager

from multiworld_serving.server.administration import OperationInProgressError


class ExclusiveOperation:
    """A lock that fails instead of waiting, and names the operation that holds it."""

    def __init__(self) -> None:
        self._holder: str | None = None

    @property
    def busy(self) -> bool:
        """Whether an operation is in progress."""
        return self._holder is not None

    @contextmanager
    def acquire(self, operation: str) -> Iterator[None]:
        """Hold the lock during the block. Raises OperationInProgressError if it is held."""
        if self._holder is not None:
            raise OperationInProgressError(f"{self._holder} is in progress; wait until it has ended, then try again")
        self._holder = operation
        try:
            yield
        finally:
            self._holder = None
