"""Collects kept outputs of one worker that are not needed any more, so that not each of them is a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from multiworld_serving.common.wire.message import Message, MessageKind

_MAX_WAITING = 64
_MAX_WAIT_S = 0.1
"""Outputs are released when there are this many, or after this time if no batch is sent before."""


class ReleasedOutputs:
    """
    Args:
        post: sends a message to the worker.
    """

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._waiting: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, output: int) -> None:
        """Release the output with this id soon."""
        self._waiting.append(output)
        if len(self._waiting) >= _MAX_WAITING:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_MAX_WAIT_S, self._send)

    def take(self) -> tuple[int, ...]:
        """The outputs that wait, which the caller sends with another message or drops."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = tuple(self._waiting), []
        return waiting

    def _send(self) -> None:
        if waiting := self.take():
            self._post(Message(MessageKind.RELEASE, payload=torch.tensor(waiting)))
