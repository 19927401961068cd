"""Commands for members in the torture test of elastic worlds: calls that are hit by faults (tests/chaos/elastic_torture.py)."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld import WorldError
from multiworld.collectives.channel import CollectiveChannel
from multiworld.elastic import ElasticManager, ElasticRendezvous
from multiworld.elastic.rendezvous_link import link_name
from multiworld.world import World
from tests.chaos.elastic_model import operand

_PAUSE_S = 0.3


class ElasticTorturePart:
    """Each public method is a command."""

    elastic: ElasticManager

    def __init__(self) -> None:
        self._rendezvous: ElasticRendezvous | None = None
        self._victim: Victim | None = None

    async def torture_host(self, state_file: str, **settings: Any) -> int:
        """Run the rendezvous server and return its port."""
        self._rendezvous = ElasticRendezvous(state_file=Path(state_file), **settings)
        await self._rendezvous.__aenter__()
        return self._rendezvous.port

    async def torture_view(self, world: str) -> dict[str, Any]:
        assert self._rendezvous is not None
        here = self._rendezvous
        return {
            "members": sorted(here.view(world).ids()),
            "waiting": here.waiting(world),
            "connected": here.connected(world),
        }

    async def torture_configure(self, world: str, **settings: Any) -> None:
        torch.set_num_threads(1)
        self.elastic = ElasticManager(**settings)
        self._victim = Victim(self.elastic, world)

    async def torture_reduce(
        self, member: int, call: dict[str, Any], results: str, fault: dict[str, Any] | None
    ) -> dict[str, Any]:
        """All-reduce, then write the contents of the tensors to the file `results`."""
        op = call["op"]
        tensors = [
            operand(call["key"], member, index, dtype, count, op)
            for index, (dtype, count) in enumerate(call["tensors"])
        ]
        assert self._victim is not None
        world = self.elastic.world(self._victim.world)

        async def reduce() -> dict[str, Any]:
            outcome = await world.all_reduce_multiple_with_retry(
                tensors,
                getattr(ReduceOp, op),
                max_in_flight=call["max_in_flight"],
            )
            return {"success": outcome.success, "contributors": list(outcome.contributors), "retries": outcome.retries}

        reply = await self._victim.suffer(fault, reduce())
        _write(Path(results), tensors)
        return reply

    async def torture_update(self, fault: dict[str, Any] | None) -> dict[str, Any]:
        assert self._victim is not None
        world = self.elastic.world(self._victim.world)

        async def update() -> dict[str, Any]:
            return {"view": await world.update_membership(timeout_s=90.0)}

        return await self._victim.suffer(fault, update())

    async def torture_waits(self) -> list[str]:
        """The stack of each task and each other thread of this member."""
        tasks = ["\n".join(_stack(task)) for task in asyncio.all_tasks()]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads = [
            f"thread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)[-3:])
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        ]
        return tasks + threads


def _stack(task: asyncio.Task[Any]) -> list[str]:
    waits, coroutine = [], task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        waits.append(f"{frame.f_code.co_qualname} line {frame.f_lineno}")
        coroutine = coroutine.cr_await  # type: ignore[union-attr]
    return [*waits, repr(coroutine)]


class Victim:
    """A member that is hit by a fault during a call or at its end."""

    def __init__(self, elastic: ElasticManager, world: str) -> None:
        self.world = world
        self._elastic = elastic
        self._fault: dict[str, Any] | None = None
        self._events_left = 0
        self._call: asyncio.Task[dict[str, Any]] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._count_events()

    async def suffer(self, fault: dict[str, Any] | None, call: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the result of the call, or its error."""
        self._fault, self._events_left = fault, fault["after_events"] if fault else 0
        timer = None
        if fault and not fault["after_events"]:
            timer = asyncio.get_running_loop().call_later(fault["after_s"], self._strike)
        self._call = asyncio.create_task(call)
        try:
            reply = await self._call
        except (WorldError, asyncio.CancelledError) as error:
            reply = {"error": type(error).__name__, "message": str(error)}
        if timer is not None:
            timer.cancel()
        self._strike()
        if fault and fault["kind"] in ("leave", "cancel"):
            await (self._leaving or self._elastic.leave(self.world))
        return reply

    def _count_events(self) -> None:
        """Trigger the fault after so many messages and exchanges have started."""
        post = CollectiveChannel.post_send

        def counted(channel: CollectiveChannel, *arguments: Any) -> None:
            self._on_event()
            post(channel, *arguments)

        CollectiveChannel.post_send = counted  # type: ignore[method-assign,assignment]

    def _on_event(self) -> None:
        if self._events_left:
            self._events_left -= 1
            if not self._events_left:
                self._strike()

    def _strike(self) -> None:
        fault, self._fault = self._fault, None
        if fault is None:
            return
        worlds = self._elastic._managers[self.world].worlds
        match fault["kind"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "pause":
                _pause()
            case "leave":
                self._leaving = asyncio.create_task(self._elastic.leave(self.world))
            case "cancel" if self._call is not None:
                self._call.cancel()
            case "cut" if self.world in worlds:
                _cut(worlds[self.world], fault["choice"])
            case "sever":
                link = link_name(self.world, self._elastic.world(self.world).member_id)
                if link in worlds:
                    _cut(worlds[link], fault["choice"])


def _cut(world: World, choice: int) -> None:
    """Shut down one of our connections, as a network failure would: a peer connection or the control connection."""
    connections = world._monitor.connections.values() if world._monitor is not None else ()
    socks = [*(line._sock for line in world._operations._connections.values()), *(each._sock for each in connections)]
    if socks:
        with contextlib.suppress(OSError):
            socks[choice % len(socks)].shutdown(socket.SHUT_RDWR)


def _pause() -> None:
    """Stop this process briefly."""
    waker = subprocess.Popen(["sh", "-c", f"sleep {_PAUSE_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def _write(path: Path, tensors: list[Tensor]) -> None:
    path.write_bytes(b"".join(each.view(torch.uint8).numpy().tobytes() for each in tensors if each.numel()))
