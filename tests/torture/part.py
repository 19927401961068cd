"""The part of a member of the torture test in a round: it joins its worlds, runs their phases, and is hit by faults.

Mixed into `Script` (tests/integration/members.py): each public method is a command of the program that conducts the test.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import torch

from multiworld import BrokenWorldException, World, WorldClosedError, WorldError, WorldManager, WorldState
from multiworld.collectives import reductions
from multiworld.transport.shared import SharedPayloads
from tests.torture.data import WrongResultError, random_of
from tests.torture.operations import CollectivePart, MessagePart
from tests.torture.schedule import FAULT_TAG, MADE_OF_OPERATIONS, Fault, Phase, PlannedWorld, Round, plan_round

PATIENCE_S = 40.0
"""Time limit of operations in healthy worlds and of everything that must end. No test measures speed."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Parameter of mallopt(3)."""


class FaultError(Exception):
    """A planned fault did not fire."""


class TorturePart:
    """Each public method is a command."""

    manager: WorldManager

    def __init__(self) -> None:
        super().__init__()
        self._round = Round((), ())
        self._process = -1
        self._port = 0
        self._seed_and_round = ""
        self._joined: dict[str, World] = {}
        self._begun: set[int] = set()  # numbers of our faults that have started, and of those that have fired
        self._fired: list[int] = []
        self._striking: set[asyncio.Task[None]] = set()
        self._verified = 0

    async def torture_prepare(self, timeout_s: float) -> int:
        """Use a manager with this heartbeat timeout. Returns the port on which worlds can be hosted."""
        torch.set_num_threads(1)
        # Freed memory is returned to the kernel: memory that the allocator keeps would look like a leak.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        self.manager = WorldManager(heartbeat_timeout_s=timeout_s)
        self._port = self.manager.listen()
        return self._port

    async def torture_join(self, seed: int, number: int, process: int, ports: list[int]) -> None:
        """Join the worlds of a round."""
        self._round, self._process = plan_round(seed, number), process
        self._seed_and_round = f"{seed}/{number}"
        self._begun, self._fired, self._verified = set(), [], 0
        async with asyncio.TaskGroup() as group:
            for planned in self._mine():
                group.create_task(self._join(planned, ports[planned.members[0]]))

    async def torture_round(self) -> dict[str, Any]:
        """Run the round. Returns the end of each world, the fired faults, and the number of verified operations."""
        async with asyncio.TaskGroup() as group:
            tasks = {planned.name: group.create_task(self._live_through(planned)) for planned in self._mine()}
        return {
            "worlds": {name: task.result() for name, task in tasks.items()},
            "fired": self._fired,
            "verified": self._verified,
        }

    async def torture_end(self) -> int:
        """Close or remove all worlds of the round and wait until they are reclaimed. Returns the port."""
        rng = random_of(f"{self._seed_and_round}/{self._process}/end")
        names = [planned.name for planned in self._mine() if not planned.lasting]
        rng.shuffle(names)
        for name in names:
            world = self.manager.worlds.get(name)
            # The name of an ended world may stay: it is used again.
            if world is not None and (world.state is WorldState.READY or rng.random() < 0.5):
                self.manager.remove_world(name)
        for name in names:
            world = self._joined.pop(name)
            await _within(world.reclaimed.is_set, f"{world!r} is not reclaimed")
        return self._port

    async def torture_resources(self) -> dict[str, int]:
        """The resources of this process, without what it keeps for the next worlds."""
        from tests.integration.members import resources  # noqa: PLC0415 - which imports this module

        held = resources()
        # A lasting world keeps as many blocking threads as it ever needed at once.
        lasting = {f"multiworld-{planned.name}" for planned in self._mine() if planned.lasting}
        held["threads"] -= sum(thread.name in lasting for thread in threading.enumerate())
        # The first world that needs the local acceptor opens it, and it is kept. So are unused segments, with two descriptors each.
        held["fds"] -= any(not acceptor.port for acceptor in self.manager._listeners.acceptors.values())
        held["fds"] -= 2 * sum(map(len, self.manager._segments._kept.values()))
        # So are the rings of a lasting world, which its first long messages open.
        for world in [each for each in self.manager.worlds.values() if f"multiworld-{each.name}" in lasting]:
            for connection in world._operations._connections.values():
                if isinstance(shared := connection._payloads, SharedPayloads):
                    held["fds"] -= 2 * (shared._ring is not None) + (shared._peer_ring is not None)
        return held

    # -- one world ---------------------------------------------------------------------------------------------------------------

    def _mine(self) -> list[PlannedWorld]:
        return [planned for planned in self._round.worlds if self._process in planned.members]

    async def _join(self, planned: PlannedWorld, port: int) -> None:
        if planned.name in self._joined:  # a lasting one
            return
        rank, size = planned.members.index(self._process), len(planned.members)
        self._joined[planned.name] = await self.manager.initialize_world(
            planned.name, rank, size, port=port, timeout=PATIENCE_S, verify_collectives=planned.verified
        )

    async def _live_through(self, planned: PlannedWorld) -> dict[str, Any]:
        """Run all phases of a world. Returns how the world ended, if it did."""
        ended = None
        try:
            for index, phase in enumerate(planned.phases):
                self._arm(planned, index)
                await self._go_through(planned, index, phase)
            self._check_all_begun(planned)
            if self._round.must_break(planned):
                await self._await_end(planned)
        except WorldError as error:
            ended = _described(error)
        self._fire_what_is_left(planned)
        await _within(lambda: not self._unfired(planned), f"a fault in {planned.name} does not strike")
        if ended is not None:
            await self._check_ended(planned)
        return {"ended": ended}

    async def _go_through(self, planned: PlannedWorld, index: int, phase: Phase) -> None:
        """Start all operations of the phase, await and check them. Raises the WorldError of the first that failed."""
        rank = planned.members.index(self._process)
        started: list[tuple[asyncio.Future[None], CollectivePart | MessagePart | None]] = []
        rejection: BaseException | None = None
        try:
            for part in self._parts(planned, phase, rank):
                started.append((asyncio.ensure_future(part.start()), part))
            for fault in self._round.made_of_operations(planned, index):
                call = self._call_of(fault, planned, rank, [future for future, _ in started])
                if call is not None:
                    started.append((call, None))
        except WorldError as error:  # it ended while they were started
            rejection = error
        if started:
            _, late = await asyncio.wait([future for future, _ in started], timeout=PATIENCE_S)
            if late:
                raise TimeoutError(f"{len(late)} operations of {self._joined[planned.name]!r} stay pending: {late}")
        for future, check in started:
            failure = asyncio.CancelledError() if future.cancelled() else future.exception()
            if failure is None and check is not None:
                check.check()
                self._verified += 1
            rejection = rejection or failure
        if isinstance(rejection, asyncio.CancelledError):
            await self._await_end(planned)
        elif rejection is not None:
            raise rejection

    def _parts(self, planned: PlannedWorld, phase: Phase, rank: int) -> list[CollectivePart | MessagePart]:
        """In a random order that keeps the order of collectives and of the messages of each stream."""
        here, world, size = self.manager.communicator, planned.name, len(planned.members)
        queues: dict[object, list[CollectivePart | MessagePart]] = {}
        for collective in phase.collectives:
            queues.setdefault("collectives", []).append(CollectivePart(here, world, rank, size, collective))
        for message in phase.messages:
            if rank in (message.src, message.dst):
                part = MessagePart(here, world, rank, message)
                queues.setdefault(part.stream, []).append(part)
        rng = Random(f"{self._seed_and_round}/{planned.name}/{rank}/{len(queues)}")
        order = [key for key, queue in queues.items() for _ in queue]
        rng.shuffle(order)
        return [queues[key].pop(0) for key in order]

    async def _await_end(self, planned: PlannedWorld) -> None:
        """Wait for the end that a fault causes, and raise the world's error."""
        world = self._joined[planned.name]
        await _within(lambda: world.ending() is not None, f"{world!r} does not end, despite its faults")
        ending = world.ending()
        assert ending is not None
        raise ending

    async def _check_ended(self, planned: PlannedWorld) -> None:
        """Check that nothing is left of an ended world, and that its operations raise."""
        world = self._joined[planned.name]
        try:
            await world.start(reductions.barrier(world.facts))
        except (BrokenWorldException, WorldClosedError):
            await _within(world.reclaimed.is_set, f"{world!r} is not reclaimed")
        else:
            raise WrongResultError(f"a barrier was passed in {world!r}, which had ended")

    # -- faults ------------------------------------------------------------------------------------------------------------------

    def _unfired(self, planned: PlannedWorld) -> list[Fault]:
        """Our faults in this world that have not fired."""
        return [fault for fault in self._mine_of(planned) if fault.number not in self._fired]

    def _check_all_begun(self, planned: PlannedWorld) -> None:
        """Raises FaultError if one of our faults did not start in its phase."""
        for fault in self._mine_of(planned):
            if fault.number not in self._begun:
                raise FaultError(f"{fault} did not fire")

    def _mine_of(self, planned: PlannedWorld) -> list[Fault]:
        return [fault for fault in self._round.faults if (fault.world, fault.process) == (planned.name, self._process)]

    def _arm(self, planned: PlannedWorld, phase: int) -> None:
        """Start the faults of this phase after their delays."""
        for fault in self._unfired(planned):
            if fault.phase == phase and fault.kind not in MADE_OF_OPERATIONS:
                self._begun.add(fault.number)
                asyncio.get_running_loop().call_later(fault.delay_s, self._fire, fault)

    def _fire_what_is_left(self, planned: PlannedWorld) -> None:
        """Fire faults of later phases, which do not run because another fault has ended the world."""
        for fault in self._unfired(planned):
            if fault.number not in self._begun:
                self._fire(fault)

    def _fire(self, fault: Fault) -> None:
        async def strike() -> None:
            await getattr(self, f"_fire_{fault.kind}")(fault)
            self._fired.append(fault.number)

        task = asyncio.get_running_loop().create_task(strike())
        self._striking.add(task)
        task.add_done_callback(self._striking.discard)

    async def _fire_kill(self, _fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def _fire_exit(self, _fault: Fault) -> None:
        sys.exit(0)

    async def _fire_stop(self, _fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    _fire_pause = _fire_stop

    async def _fire_cleanup(self, _fault: Fault) -> None:
        await self.manager.aclose()
        self._port = self.manager.listen()

    async def _fire_close(self, fault: Fault) -> None:
        await self.manager.close_world(fault.world)

    async def _fire_leave(self, fault: Fault) -> None:
        self.manager.remove_world(fault.world)

    async def _fire_lose(self, fault: Fault) -> None:
        world = self._joined[fault.world]
        assert world._forming.monitor is not None
        _shut_down(world._forming.monitor.connections[fault.peer]._sock)

    def _call_of(
        self, fault: Fault, planned: PlannedWorld, rank: int, others: list[asyncio.Future[None]]
    ) -> asyncio.Future[None] | None:
        """The operation of this rank, which differs from that of the `others`, for a fault that consists of operations."""
        here, world, tag = self.manager.communicator, planned.name, FAULT_TAG + fault.number
        victim = planned.members.index(fault.process)
        strikes = rank == victim
        call: Awaitable[None]
        if fault.kind == "disagree":
            call = here.all_reduce(torch.zeros(5 if strikes else 4), world_name=world)
        elif fault.kind == "mismatch" and rank == fault.peer:
            call = here.recv(torch.zeros(4), victim, world, tag=tag)
        elif not strikes:
            return None
        elif fault.kind == "mismatch":
            call = here.send(torch.zeros(3), fault.peer, world, tag=tag)
        else:  # no rank sends that
            timeout_s = 0.05 + fault.delay_s if fault.kind == "timeout" else None
            call = here.recv(torch.zeros(1 << 18), fault.peer, world, tag=tag, timeout_s=timeout_s)
        future = asyncio.ensure_future(call)
        if strikes:
            self._begun.add(fault.number)
            future.add_done_callback(lambda _: self._fired.append(fault.number))
        if fault.kind == "cancel":
            for each in (*random_of(f"{self._seed_and_round}/cancelled").sample(others, len(others) // 2), future):
                asyncio.get_running_loop().call_later(fault.delay_s, each.cancel)
        elif fault.kind == "cut":
            _shut_down(self._joined[world]._operations._connections[fault.peer].sock)
        return future


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)


async def _within(holds: Callable[[], object], complaint: str) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    until_s = asyncio.get_running_loop().time() + PATIENCE_S
    while not holds():
        if asyncio.get_running_loop().time() > until_s:
            raise TimeoutError(f"{complaint} within {PATIENCE_S:g} s")
        await asyncio.sleep(0.005)


def _described(error: WorldError) -> list[Any]:
    if isinstance(error, BrokenWorldException):
        return [type(error).__name__, str(error.cause), error.rank, str(error)]
    return [type(error).__name__, "", -1, str(error)]
