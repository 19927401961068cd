"""Monitors the members of one world over control connections: one between rank 0 and each other rank.

When all ranks have joined, rank 0 sends `Start`. The same connections carry heartbeats, the keys of the group's rendezvous, failure reports
and leave messages. If a rank is lost before it, another process may join with that rank; after it, its loss breaks the world. This
module has the common part and the side of rank 0; member.py has the side of the other ranks. All of it runs on the control loop's thread.

A member that leaves sends `Left`. After that, a lost connection is not a failure.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from multiworld.control.connection import ControlConnection
from multiworld.control.frames import Address, Frame, FrameError, Heartbeat, Left, MemberFailed, Start, StoreSet
from multiworld.control.handshake import Hello
from multiworld.control.loop import ControlLoop
from multiworld.errors import Cause
from multiworld.texts import shown

logger = logging.getLogger(__name__)

_MIN_STALL_HEARTBEATS = 4
"""Lower limit of `loop_stall_timeout_s` in heartbeats: a running event loop may increment its count one or two heartbeats late."""


class MonitoredWorld(Protocol):
    """Receives the events of a monitor. Called on the control loop's thread; must not block."""

    def on_all_joined(self, start: Start) -> None:
        """All ranks have joined."""

    def on_store_set(self, key: str, value: bytes) -> None: ...

    def on_member_failed(self, rank: int, cause: Cause, detail: str) -> None: ...

    def on_member_left(self, rank: int) -> None: ...

    def on_join_failed(self, reason: str, *, final: bool) -> None:
        """Joining failed: rank 0 refused us or cannot be reached. Unless `final`, the monitor retries."""


@dataclass(frozen=True, slots=True)
class HeartbeatConfig:
    """Heartbeats are sent every `interval_s`; a peer from which nothing arrives for `timeout_s` is unresponsive (`Cause.HANG`).

    Attributes:
        loop_stall_timeout_s: a peer whose event loop has not run for this long is stalled (`Cause.STALLED`), and our heartbeats carry
            the count of our event loop. None turns both off.
    """

    interval_s: float = 0.2
    timeout_s: float = 1.0
    loop_stall_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < self.timeout_s:
            raise ValueError(
                f"heartbeat_interval_s must be over 0 and under heartbeat_timeout_s, got {self.interval_s} and {self.timeout_s}"
            )
        if (
            self.loop_stall_timeout_s is not None
            and self.loop_stall_timeout_s < _MIN_STALL_HEARTBEATS * self.interval_s
        ):
            raise ValueError(
                f"loop_stall_timeout_s must be at least {_MIN_STALL_HEARTBEATS} times heartbeat_interval_s ({self.interval_s}), "
                f"got {self.loop_stall_timeout_s}"
            )


class MembershipMonitor(ABC):
    """One member's view of the other members of one world. Sends heartbeats and reports members that fail or leave.

    Rank 0 uses `HostSession`, every other rank `MemberSession`.

    Attributes:
        member: our own world, rank, size and generation.
        started: whether all ranks have joined.
        connections: the control connections, by the rank of the peer.
    """

    def __init__(
        self, control_loop: ControlLoop, world: MonitoredWorld, member: Hello, heartbeat: HeartbeatConfig
    ) -> None:
        self.member = member
        self.started = False
        self.connections: dict[int, ControlConnection] = {}
        self.detected_after_s: float | None = None
        """For the last lost member: seconds without data from it, or without a run of its event loop, at the time of detection."""
        self._control_loop = control_loop
        self._world = world
        self._heartbeat = heartbeat
        self._member_left = False  # after that, a lost connection is not a failure
        self._closed = False
        self._heartbeat_timer: asyncio.TimerHandle = control_loop.call_at_multiple(
            heartbeat.interval_s, self._send_heartbeats
        )

    # -- requests of the world, by ControlLoop.call_soon ----------------------------------------------------------------------

    def publish(self, key: str, value: bytes) -> None:
        self._broadcast(StoreSet(key, value).encode())

    def announce_failure(self, rank: int, cause: Cause, detail: str) -> None:
        """Send `MemberFailed` to the connected members and close the connections."""
        self._broadcast(MemberFailed(rank, cause, shown(detail)).encode())
        self.close()

    def leave(self) -> None:
        """Send `Left`. The connections stay open until `close`, so that no member finds a lost connection first."""
        self._member_left = True
        self._broadcast(Left(self.member.rank).encode())

    def close(self) -> None:
        """Close all control connections of this world. No event is reported after this."""
        self._closed = True
        self._heartbeat_timer.cancel()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def silence_s(self) -> float:
        """Return the longest time in seconds since data from a connected member arrived; 0 without connections."""
        return max((self._control_loop.now_s - each.last_received_s for each in self.connections.values()), default=0.0)

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _broadcast(self, data: bytes, *, exclude: ControlConnection | None = None) -> None:
        for connection in list(self.connections.values()):
            if connection is not exclude:
                connection.send(data)

    def _send_heartbeats(self) -> None:
        if self._closed:
            return
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
            connection.send(MemberFailed(rank, cause, shown(detail)).encode())
        connection.close()
        self.detected_after_s = after_s
        self._on_connection_lost(rank, cause, detail)

    def on_lost(self, connection: ControlConnection, reason: str) -> None:
        for rank, known in list(self.connections.items()):
            if known is connection:
                self.detected_after_s = self._control_loop.now_s - connection.last_received_s
                self._on_connection_lost(rank, Cause.EXIT, reason)

    @abstractmethod
    def _on_connection_lost(self, rank: int, cause: Cause, detail: str) -> None:
        """The connection to `rank` is closed."""

    def _on_common_frame(self, connection: ControlConnection, frame: Frame) -> None:
        """Handle a frame that both sides handle the same way. Raises FrameError for any other frame."""
        match frame:
            case Heartbeat(count):
                if count is not None:
                    now_s, max_gap_s = self._control_loop.now_s, 2 * self._heartbeat.interval_s
                    connection.stall_clock.on_heartbeat(count, now_s, max_gap_s)
            case StoreSet(key, value):
                self._world.on_store_set(key, value)
            case MemberFailed(rank, cause, detail):
                self._world.on_member_failed(rank, cause, shown(detail))
            case Left(rank):
                self._member_left = True
                self._world.on_member_left(rank)
            case _:
                raise FrameError(
                    f"unexpected {type(frame).__name__} on a control connection of world {self.member.world!r}"
                )


class HostSession(MembershipMonitor):
    """Rank 0's monitor: admits the other ranks, relays frames between them, and detects their failures."""

    def __init__(
        self, control_loop: ControlLoop, world: MonitoredWorld, member: Hello, heartbeat: HeartbeatConfig
    ) -> None:
        super().__init__(control_loop, world, member, heartbeat)
        self._addresses = {0: Address(member.host, member.port, member.local)}

    def admit(self, rank: int, connection: ControlConnection, address: Address) -> None:
        """Take over the control connection of `rank`, which has this address. The last missing rank starts the world."""
        connection.owner = self
        self.connections[rank] = connection
        self._addresses[rank] = address
        self.start_if_complete()

    def start_if_complete(self) -> None:
        if self.started or len(self.connections) < self.member.size - 1:
            return
        self.started = True
        addresses = tuple(self._addresses[rank] for rank in range(self.member.size))
        start = Start(self.member.generation, self.member.formation, addresses)
        self._broadcast(start.encode())
        self._world.on_all_joined(start)

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank in range(1, self.member.size) if rank not in self.connections]

    def on_frame(self, connection: ControlConnection, frame: Frame) -> None:
        if isinstance(frame, StoreSet | MemberFailed | Left):
            self._broadcast(frame.encode(), exclude=connection)
        self._on_common_frame(connection, frame)

    def _on_connection_lost(self, rank: int, cause: Cause, detail: str) -> None:
        self.connections.pop(rank, None)
        if not self.started:
            logger.debug("world=%s rank=%d was lost before the start: %s", self.member.world, rank, detail)
        elif not self._member_left:
            self._world.on_member_failed(rank, cause, detail)
