"""Monitors the members of one world over one control connection between rank 0 and each other rank.

When all ranks have joined, rank 0 sends START. The keys of the group's rendezvous, heartbeats, failures and leave messages use the same
connections. If a rank is lost before START, another process may join with that rank; after START its loss breaks the world. This module
has the common part and the side of rank 0; member.py has the side of the other ranks. All of it runs on the control loop's thread.

A member that leaves sends LEFT. Each member sends DRAINED when it has no pending operation. When all have sent it, rank 0 sends CLOSE_ACK,
and the connections may close.
"""

import contextlib
import ipaddress
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from multiworld.control.connection import ControlConnection
from multiworld.control.frames import Frame, FrameError, Kind
from multiworld.control.handshake import Hello
from multiworld.control.loop import Timer, WatchDog
from multiworld.errors import Cause
from multiworld.texts import shown

logger = logging.getLogger(__name__)

_BEATS_OF_A_STALL = 4
"""Lower limit of `loop_stall_timeout_s` in heartbeats: a running event loop may increment its count one or two heartbeats late."""


class MonitoredWorld(Protocol):
    """Receives the events of a monitor. Called on the control loop's thread; must not block."""

    def on_all_here(self, epoch: int, local_host: str) -> None:
        """All ranks have joined. `local_host` is our own address as the others reach it."""

    def on_stored(self, key: str, value: bytes) -> None: ...

    def on_gone(self, rank: int, cause: Cause, detail: str) -> None: ...

    def on_left(self, rank: int) -> None: ...

    def on_all_settled(self) -> None:
        """A member left, and no member has a pending operation."""

    def on_refused(self, reason: str, *, final: bool) -> None:
        """Joining failed: rank 0 refused us or cannot be reached. Unless `final`, the monitor retries."""


@dataclass(frozen=True, slots=True)
class HeartbeatConfig:
    """Heartbeats are sent every `interval_s`; a peer from which nothing arrives for `timeout_s` counts as hung.

    Attributes:
        loop_stall_timeout_s: a peer whose event loop has not run for this long counts as stalled, and our heartbeats carry the count of
            our event loop. None turns both off.
    """

    interval_s: float = 0.2
    timeout_s: float = 1.0
    loop_stall_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < self.timeout_s:
            raise ValueError(
                f"heartbeat_interval_s must be over 0 and under heartbeat_timeout_s, got {self.interval_s} and {self.timeout_s}"
            )
        if self.loop_stall_timeout_s is not None and self.loop_stall_timeout_s < _BEATS_OF_A_STALL * self.interval_s:
            raise ValueError(
                f"loop_stall_timeout_s must be at least {_BEATS_OF_A_STALL} times heartbeat_interval_s ({self.interval_s}), "
                f"got {self.loop_stall_timeout_s}"
            )


def number(field: bytes) -> int:
    """Decode a decimal number of a frame. Raises FrameError."""
    try:
        return int(field)
    except ValueError as error:
        raise FrameError(f"not a number: {field[:20]!r}") from error


def _gone(rank: int, cause: Cause, detail: str) -> bytes:
    return Frame(Kind.MEMBER_FAILED, (str(rank).encode(), cause.encode(), shown(detail).encode())).encode()


class MembershipMonitor(ABC):
    """One member's monitor of one world. Sends heartbeats and reports a member whose heartbeats stop.

    Attributes:
        seat: our own world, rank, size and epoch.
        started: whether all ranks have joined.
        lifelines: the control connections, by the rank of the peer.
    """

    def __init__(self, watchdog: WatchDog, world: MonitoredWorld, seat: Hello, pulse: HeartbeatConfig) -> None:
        self.seat = seat
        self.started = False
        self.lifelines: dict[int, ControlConnection] = {}
        self.lost_after_s: float | None = None
        """Seconds for which the last lost member had sent nothing, or its event loop had not run, when it was lost."""
        self._watchdog = watchdog
        self._world = world
        self._pulse = pulse
        self._over = False  # a member left: a lost connection is not a failure any more
        self._detached = False
        self._beat_timer: Timer = watchdog.call_later(pulse.interval_s, self._beat)

    # -- requests of the world, by WatchDog.call_soon ----------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        self._tell(Frame(Kind.STORE_SET, (key.encode(), value)).encode())

    def gone(self, rank: int, cause: Cause, detail: str) -> None:
        """Send MEMBER_FAILED to the connected members and close the connections."""
        self._tell(_gone(rank, cause, detail))
        self.detach()

    def leave(self) -> None:
        """Send LEFT. `on_all_settled` follows when no member has a pending operation."""
        self._over = True
        self._tell(Frame(Kind.LEFT, (str(self.seat.rank).encode(),)).encode())

    @abstractmethod
    def settle(self) -> None:
        """Report that this member has no pending operation, after a member left."""

    def detach(self) -> None:
        """Close all control connections of this world. No event is reported after this."""
        self._detached = True
        self._beat_timer.cancel()
        for lifeline in self.lifelines.values():
            lifeline.close()
        self.lifelines.clear()

    def silence_s(self) -> float:
        """Return the longest time in seconds since data from a connected member arrived; 0 without connections."""
        return max((self._watchdog.now_s - line.last_heard_s for line in self.lifelines.values()), default=0.0)

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _tell(self, data: bytes, *, but: ControlConnection | None = None) -> None:
        for lifeline in list(self.lifelines.values()):
            if lifeline is not but:
                lifeline.send(data)

    def _beat(self) -> None:
        if self._detached:
            return
        self._beat_timer = self._watchdog.call_later(self._pulse.interval_s, self._beat)
        heartbeat = self._watchdog.loop_counter.heartbeat()
        for rank, lifeline in list(self.lifelines.items()):
            silent_s = self._watchdog.now_s - lifeline.last_heard_s
            stalled_s, limit_s = lifeline.stall_clock.stalled_s, self._pulse.loop_stall_timeout_s
            if silent_s > self._pulse.timeout_s:
                self._give_up(rank, Cause.HANG, silent_s, f"nothing heard for {silent_s:.2f} s")
            elif limit_s is not None and stalled_s > limit_s:
                self._give_up(rank, Cause.STALLED, stalled_s, f"its event loop has stood still for {stalled_s:.2f} s")
            else:
                lifeline.send(heartbeat)

    def _give_up(self, rank: int, cause: Cause, after_s: float, detail: str) -> None:
        lifeline = self.lifelines[rank]
        if self.started:  # if the member resumes, it reads why it was removed
            lifeline.send(_gone(rank, cause, detail))
        lifeline.close()
        self.lost_after_s = after_s
        self._lost(rank, cause, detail)

    def on_lost(self, lifeline: ControlConnection, reason: str) -> None:
        for rank, known in list(self.lifelines.items()):
            if known is lifeline:
                self.lost_after_s = self._watchdog.now_s - lifeline.last_heard_s
                self._lost(rank, Cause.EXIT, reason)

    @abstractmethod
    def _lost(self, rank: int, cause: Cause, detail: str) -> None:
        """The connection to `rank` is closed."""

    def _hear(self, lifeline: ControlConnection, frame: Frame) -> None:
        """Handle a frame that both sides handle the same way. Raises FrameError for any other frame."""
        match frame.kind, frame.fields:
            case Kind.HEARTBEAT, (count, *_):
                lifeline.stall_clock.hear(number(count), self._watchdog.now_s, 2 * self._pulse.interval_s)
            case Kind.HEARTBEAT, _:
                pass
            case Kind.STORE_SET, (key, value):
                self._world.on_stored(key.decode(errors="replace"), value)
            case Kind.MEMBER_FAILED, (rank, cause, detail):
                try:
                    told = Cause(cause.decode(errors="replace"))
                except ValueError as error:
                    raise FrameError(f"unknown cause {cause[:20]!r}") from error
                self._world.on_gone(number(rank), told, shown(detail.decode(errors="replace")))
            case Kind.LEFT, (rank,):
                self._over = True
                self._world.on_left(number(rank))
            case _:
                raise FrameError(f"unexpected {frame.kind.name} on a lifeline of world {self.seat.world!r}")


class HostSession(MembershipMonitor):
    """The monitor of rank 0: admits the other ranks, relays frames between them, and detects their failures."""

    def __init__(self, watchdog: WatchDog, world: MonitoredWorld, seat: Hello, pulse: HeartbeatConfig) -> None:
        super().__init__(watchdog, world, seat, pulse)
        self._settled: set[int] = set()

    def admit(self, rank: int, lifeline: ControlConnection) -> None:
        """Take over the control connection of `rank`. The last missing rank starts the world."""
        lifeline.owner = self
        self.lifelines[rank] = lifeline
        self.start_when_full()

    def start_when_full(self) -> None:
        if self.started or len(self.lifelines) < self.seat.size - 1:
            return
        self.started = True
        self._tell(Frame(Kind.START, (str(self.seat.epoch).encode(),)).encode())
        hosts = {lifeline.local_host for lifeline in self.lifelines.values()}
        self._world.on_all_here(self.seat.epoch, min(hosts, key=_nearness, default=""))

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank in range(1, self.seat.size) if rank not in self.lifelines]

    def settle(self) -> None:
        self._mark_settled(self.seat.rank)

    def on_frame(self, lifeline: ControlConnection, frame: Frame) -> None:
        if frame.kind is Kind.DRAINED:
            self._mark_settled(next(rank for rank, known in self.lifelines.items() if known is lifeline))
            return
        if frame.kind in (Kind.STORE_SET, Kind.MEMBER_FAILED, Kind.LEFT):
            self._tell(frame.encode(), but=lifeline)
        self._hear(lifeline, frame)

    def _mark_settled(self, rank: int) -> None:
        self._settled.add(rank)
        if self._settled >= {self.seat.rank, *self.lifelines}:
            self._tell(Frame(Kind.CLOSE_ACK).encode())
            self._world.on_all_settled()

    def _lost(self, rank: int, cause: Cause, detail: str) -> None:
        self.lifelines.pop(rank, None)
        if not self.started:
            logger.debug("world=%s rank=%d left its seat before the start: %s", self.seat.world, rank, detail)
        elif self._over:
            if self.seat.rank in self._settled:
                self._mark_settled(self.seat.rank)
        else:
            self._world.on_gone(rank, cause, detail)


def _nearness(host: str) -> tuple[bool, str]:
    """Sort key of our own addresses. Loopback addresses come last, because members on other machines cannot reach them."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback, host
    return False, host
