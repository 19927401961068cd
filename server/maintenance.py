"""One piece of work on the workers at a time: two that do not know of each other would take each other's for failures."""

from collections.abc import Iterator
from contextlib import contextmanager


class MaintenanceError(Exception):
    """Something else is under way. Try again when it has ended; nothing has changed."""


class Maintenance:
    """Says whether something is under way, and what."""

    def __init__(self) -> None:
        self._what: str | None = None

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Hold others off while the block lasts. Raises MaintenanceError."""
        if self._what is not None:
            raise MaintenanceError(f"{self._what} is under way; wait for its end, then ask again")
        self._what = what
        try:
            yield
        finally:
            self._what = None
