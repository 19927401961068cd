"""Monitors the members of one world over control connections: one between rank 0 and each other rank.

When all ranks have joined, rank 0 sends `Start`. The same connections carry heartbeats, the keys of the group's rendezvous, failure reports
and leave messages, which rank 0 relays. If a rank is lost before the start, another process may join with that rank. After it, the loss
breaks the world. All of it runs on the control loop's thread.

A member that leaves sends `Left`. After that, a lost connection is not a failure.
"""

import asyncio
import logging
import socket
from typing import Protocol

from multiworld.config import HeartbeatConfig
from multiworld.control.connection import ControlConnection
from multiworld.control.frames import Frame, FrameError, Heartbeat, Left, MemberFailed, Start, StoreSet
from multiworld.control.handshake import Hello
from multiworld.control.loop import ControlLoop
from multiworld.errors import Cause
from multiworld.execution.store import ControlStore
from multiworld.membership.acceptor import RejectedError
from multiworld.texts import one_line

logger = logging.getLogger(__name__)


class MonitoredWorld(Protocol):
    """Receives the events of a monitor. Called on the control loop's thread; must not block."""

    def fail(self, cause: Cause, rank: int, detail: str = "") -> None: ...


class MembershipMonitor:
    """One member's view of the other members of one world. Sends heartbeats and reports members that fail or leave.

    Rank 0 admits the others (see `AdmissionTarget`) and relays frames between them. Every other rank has one connection, to rank 0.

    Attributes:
        key: see `AdmissionTarget`.
        started: whether all ranks have joined.
        connections: the control connections, by the rank of the peer.
        detected_after_s: for the last lost member: seconds without data from it, or without a run of its event loop, when it was lost.

    Args:
        member: our own world, rank and size, and at rank 0 the generation and the address of data connections.
        store: gets the keys of the rendezvous of NCCL; None without NCCL.
    """

    def __init__(
        self,
        control_loop: ControlLoop,
        world: MonitoredWorld,
        member: Hello,
        heartbeat: HeartbeatConfig,
        store: ControlStore | None = None,
    ) -> None:
        self.key: tuple[str, int | None] = member.world, None
        self.started = False
        self.connections: dict[int, ControlConnection] = {}
        self.detected_after_s: float | None = None
        self._control_loop = control_loop
        self._world = world
        self._member = member
        self._heartbeat = heartbeat
        self._store = store
        self._addresses = {0: member.address}
        self._start: asyncio.Future[Start] = control_loop.loop.create_future()
        self._member_left = False  # after that, a lost connection is not a failure
        self._heartbeat_timer: asyncio.TimerHandle = control_loop.call_at_multiple(
            heartbeat.interval_s, self._send_heartbeats
        )

    # -- joining -------------------------------------------------------------------------------------------------------------

    async def join(self, sock: socket.socket) -> Start:
        """Wait until rank 0, which has admitted us, starts the world. Raises ConnectionError if the connection is lost before."""
        self.connections[0] = ControlConnection(self._control_loop, sock, self)
        return await self._start

    async def host(self) -> Start:
        """At rank 0: wait until all other ranks are admitted."""
        self._start_if_complete()
        return await self._start

    def missing(self) -> list[int]:
        """At rank 0: return the ranks that have not joined."""
        return [rank for rank in range(1, self._member.size) if rank not in self.connections]

    def accepts(self, hello: Hello) -> bool:
        """See `AdmissionTarget`. A member without a generation waits for the next one if this one has started."""
        ours = self._member
        if hello.generation > ours.generation or (self.started and not hello.generation):
            return False
        if hello.generation and (hello.generation < ours.generation or self.started):
            raise RejectedError(
                f"generation {hello.generation} has formed already; the current one is {ours.generation}"
            )
        if hello.size != ours.size or not 0 < hello.rank < ours.size:
            raise RejectedError(f"rank {hello.rank} of {hello.size} cannot join a world of size {ours.size}")
        if hello.settings != ours.settings:
            raise RejectedError(
                f"the settings differ: rank 0 has {ours.settings}; rank {hello.rank} has {hello.settings}"
            )
        if hello.rank in self.connections:
            raise RejectedError(f"rank {hello.rank} is taken", retry=True)
        return True

    def admit(self, hello: Hello, sock: socket.socket) -> None:
        """Take over the control connection of a rank. The last missing rank starts the world."""
        self.connections[hello.rank] = ControlConnection(self._control_loop, sock, self)
        self._addresses[hello.rank] = hello.address
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if self.started or self.missing():
            return
        self.started = True
        addresses = tuple(self._addresses[rank] for rank in range(self._member.size))
        start = Start(self._member.generation, self._member.formation, addresses)
        self._broadcast(start.encode())
        self._start.set_result(start)

    # -- requests of the world, by ControlLoop.call_soon ----------------------------------------------------------------------

    def publish(self, key: str, value: bytes) -> None:
        self._broadcast(StoreSet(key, value).encode())

    def announce_failure(self, rank: int, cause: Cause, detail: str) -> None:
        """Send `MemberFailed` to the connected members and close the connections."""
        self._broadcast(MemberFailed(rank, cause, one_line(detail)).encode())
        self.close()

    def leave(self) -> None:
        """Send `Left`. The connections stay open until `close`, so that no member finds a lost connection first."""
        self._member_left = True
        self._broadcast(Left(self._member.rank).encode())

    def close(self) -> None:
        """Close all control connections of this world. No event is reported after this."""
        self._heartbeat_timer.cancel()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def silence_s(self) -> float:
        """Return the longest time in seconds since data from a connected member arrived; 0 without connections."""
        now_s, connections = self._control_loop.now_s, tuple(self.connections.values())
        return max((now_s - each.last_received_s for each in connections), default=0.0)

    # -- frames and failures ---------------------------------------------------------------------------------------------------

    def _broadcast(self, data: bytes, *, exclude: ControlConnection | None = None) -> None:
        for connection in list(self.connections.values()):
            if connection is not exclude:
                connection.send(data)

    def on_frame(self, connection: ControlConnection, frame: Frame) -> None:
        """Handle a frame. Raises FrameError if its kind is not valid in this state."""
        match frame:
            case Heartbeat(count):
                if count is not None:
                    now_s, max_gap_s = self._control_loop.now_s, 2 * self._heartbeat.interval_s
                    connection.stall_clock.on_heartbeat(count, now_s, max_gap_s)
            case Start() if self._member.rank and not self.started and not self._start.done():
                if len(frame.addresses) != self._member.size:
                    raise FrameError(f"{len(frame.addresses)} addresses in a world of {self._member.size}")
                self.started = True
                self._start.set_result(frame)
            case StoreSet() | MemberFailed() | Left() if self.started:
                self._broadcast(frame.encode(), exclude=connection)
                self._on_report(frame)
            case _:
                raise FrameError(
                    f"unexpected {type(frame).__name__} on a control connection of world {self._member.world!r}"
                )

    def _on_report(self, frame: StoreSet | MemberFailed | Left) -> None:
        match frame:
            case StoreSet(key, value):
                if self._store is not None:
                    self._store.receive(key, value)
            case MemberFailed(rank, cause, detail):
                self._world.fail(cause, rank, one_line(detail))
            case Left(rank):
                self._member_left = True
                self._world.fail(Cause.LEFT, rank)

    def _send_heartbeats(self) -> None:
        self._heartbeat_timer = self._control_loop.call_at_multiple(self._heartbeat.interval_s, self._send_heartbeats)
        heartbeat = self._control_loop.loop_counter.heartbeat()
        for rank, connection in list(self.connections.items()):
            silent_s = self._control_loop.now_s - connection.last_received_s
            stalled_s, limit_s = connection.stall_clock.stalled_s, self._heartbeat.loop_stall_timeout_s
            if silent_s > self._heartbeat.timeout_s:
                self._fail_member(rank, Cause.HANG, silent_s, f"no data received for {silent_s:.2f} s")
            elif limit_s is not None and stalled_s > limit_s:
                self._fail_member(rank, Cause.STALLED, stalled_s, f"its event loop has not run for {stalled_s:.2f} s")
            else:
                connection.send(heartbeat)

    def _fail_member(self, rank: int, cause: Cause, after_s: float, detail: str) -> None:
        connection = self.connections[rank]
        if self.started:  # if the member resumes, it learns why it was removed
            connection.send(MemberFailed(rank, cause, one_line(detail)).encode())
        connection.close()
        self._on_connection_lost(rank, cause, after_s, detail)

    def on_lost(self, connection: ControlConnection, reason: str) -> None:
        for rank, known in list(self.connections.items()):
            if known is connection:
                silent_s = self._control_loop.now_s - connection.last_received_s
                self._on_connection_lost(rank, Cause.EXIT, silent_s, reason)

    def _on_connection_lost(self, rank: int, cause: Cause, after_s: float, detail: str) -> None:
        """The connection to `rank` is closed."""
        self.connections.pop(rank, None)
        self.detected_after_s = after_s
        if self.started:
            if not self._member_left:
                self._world.fail(cause, rank, detail)
        elif self._member.rank and not self._start.done():
            self._start.set_exception(ConnectionError(f"the connection to rank 0 was lost: {detail}"))
            self._start = self._control_loop.loop.create_future()
        else:
            logger.debug("world=%s rank=%d was lost before the start: %s", self._member.world, rank, detail)
