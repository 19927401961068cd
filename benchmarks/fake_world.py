"""A world without a transport, for measuring one process alone."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class FakeWorld:
    """A world with a process that responds to a transfer with those of `react`. Each arrives in a turn of its own of the event loop.

    Attributes:
        others_s: CPU time of `react`.
    """

    name = "fake"

    def __init__(self, react: Callable[[memoryview], list[bytearray]]) -> None:
        self.others_s = 0.0
        self._react = react
        self._arrived: deque[bytearray] = deque()
        self._some = asyncio.Event()

    def put(self, transfers: list[bytearray]) -> None:
        self._arrived.extend(transfers)
        self._some.set()

    async def recv_view(self, _check: object, _peer: int) -> Any:
        await asyncio.sleep(0)
        while not self._arrived:
            self._some.clear()
            await self._some.wait()
        return SimpleNamespace(data=torch.frombuffer(self._arrived.popleft(), dtype=torch.uint8))

    def start_send_message(self, _header: bytes, payload: Tensor, _peer: int) -> Any:
        loop, started_s = asyncio.get_running_loop(), time.process_time()
        self.put(self._react(payload.numpy().data))
        self.others_s += time.process_time() - started_s
        return SimpleNamespace(add_done_callback=lambda done: loop.call_soon(done, None))
