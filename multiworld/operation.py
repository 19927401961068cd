"""One pending operation of a world: the future that its caller awaits, and what c10d holds for it."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import Work

from multiworld.process_group import FOREVER


@dataclass(slots=True, eq=False)
class Operation:
    """
    Attributes:
        name: of the operation, for messages.
        peer: the rank that it depends on, -1 for a collective.
        work: None when c10d refused the operation at once.
        tensors: kept alive until c10d has let go of them, whatever the caller does.
    """

    name: str
    peer: int
    work: Work | None
    tensors: Any
    timeout_s: float | None
    future: asyncio.Future[None]
    started_s: float = field(default_factory=time.monotonic)

    def wait(self) -> RuntimeError | None:
        """Block until c10d is done with it. Gives the error instead of raising it, without its traceback (which holds tensors)."""
        assert self.work is not None
        try:
            self.work.wait(FOREVER if self.timeout_s is None else timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            return error.with_traceback(None)
        return None

    def resolve(self, error: BaseException | None) -> None:
        """Wake the caller, from any thread. Harmless when it has gone away, or its loop has."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.future.get_loop().call_soon_threadsafe(_settle, self.future, error)


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
