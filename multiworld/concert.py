"""The collectives of a world that go over its lines, or are agreed on there before they begin."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from multiworld.agreement import Agreement, DisagreementError
from multiworld.errors import WorldError
from multiworld.exchange import Exchange
from multiworld.line import Line
from multiworld.operation import Operation
from multiworld.streams import on_stream
from multiworld.waiters import Waiters


class ConcertHost(Protocol):
    """The traffic of the world. May be called from any thread."""

    def check(self) -> None:
        """Raises WorldError when the world has ended and nothing may go on."""

    def post(self, operation: Operation) -> None:
        """Hand a collective that has no script to c10d. Under the world's lock. Raises RuntimeError."""

    def on_done(self, operation: Operation) -> None:
        """Its data is where the operation's buffer is."""

    def on_abandoned(self, operation: Operation) -> None:
        """It was stopped half-way: the world must break."""

    def on_dissent(self, rank: int, detail: str) -> None:
        """The members are about to do different things: the world must break."""

    def fail(self, operations: Sequence[Operation], peer: int, error: RuntimeError) -> None: ...


class Concert:
    """
    Args:
        lock: the world's.
        checked: whether every collective is agreed on first; they begin in the order in which they were started.
    """

    def __init__(self, host: ConcertHost, lock: threading.RLock, waiters: Waiters, *, checked: bool) -> None:
        self._host = host
        self._lock = lock
        self._waiters = waiters
        self._checked = checked
        self._started = 0
        self._conferring: deque[Operation] = deque()

    def concerns(self, operation: Operation, lines: Mapping[int, Line]) -> bool:
        """Whether this collective is to be started here."""
        return operation.plan.script is not None or (self._checked and bool(lines))

    def start(self, operation: Operation, lines: Mapping[int, Line]) -> None:
        """Under the world's lock. Raises RuntimeError when a line is lost, WorldError when the world has ended."""
        operation.exchange = Exchange(operation, lines, self._started, self._lock, self._host.check)
        self._started += 1
        if self._checked and lines:
            self._conferring.append(operation)
            Agreement(operation.exchange, operation.plan.signature, partial(self._on_heard, operation)).begin()
        else:
            self._begin(operation)

    def _on_heard(self, operation: Operation, dissent: DisagreementError | None) -> None:
        """All members have said what they are about to do. Under the world's lock, on any thread."""
        if dissent is not None:
            self._host.on_dissent(dissent.rank, dissent.detail)
            return
        operation.agreed = True
        while self._conferring and self._conferring[0].agreed:
            following = self._conferring.popleft()
            try:
                self._begin(following)
            except RuntimeError as refusal:
                self._host.fail([following], following.peer, refusal.with_traceback(None))

    def _begin(self, operation: Operation) -> None:
        if operation.plan.script is None:
            self._host.post(operation)
        elif operation.plan.staged:
            self._waiters.run(partial(self._load, operation))
        else:
            assert operation.plan.buffer is not None
            self._perform(operation, operation.plan.buffer())

    def _load(self, operation: Operation) -> None:
        """Bring its data from its device, and begin. On a thread of the world's own."""
        assert operation.plan.buffer is not None
        try:
            with on_stream(operation.stream):
                data = operation.plan.buffer()
        except RuntimeError as error:
            self._host.fail([operation], operation.peer, error.with_traceback(None))
        else:
            self._perform(operation, data)

    def _perform(self, operation: Operation, data: Tensor) -> None:
        """Have the loop of whoever started it do it. From any thread."""
        loop = operation.future.get_loop()

        def begin() -> None:
            if not operation.done():
                operation.task = loop.create_task(self._follow_script(operation, data))

        if asyncio._get_running_loop() is loop:
            begin()
        else:
            with contextlib.suppress(RuntimeError):  # it is closed: the world's end will settle the operation
                loop.call_soon_threadsafe(begin)

    async def _follow_script(self, operation: Operation, data: Tensor) -> None:
        assert operation.plan.script is not None
        assert operation.exchange is not None
        try:
            await operation.plan.script(operation.exchange, data)
        except RuntimeError as error:
            self._host.fail([operation], operation.peer, error.with_traceback(None))
        except WorldError:
            pass  # it has ended, and settles what was under way
        except asyncio.CancelledError:
            if not operation.done():  # its loop ends
                self._host.on_abandoned(operation)
            raise
        else:
            self._host.on_done(operation)
        finally:
            operation.task = operation.exchange = None
