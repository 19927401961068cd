"""How the ranks of one world find each other and stay in touch: rank 0 keeps the roster, every other rank holds one lifeline to it.

Once all ranks are seated, rank 0 says START; then the keys of the group's rendezvous, heartbeats, "rank 2 is gone" and goodbyes go
over the same connections. A rank that is lost before START leaves its seat free for whoever takes it; after START it breaks the
world. Everything here, and in membership.py, which is the part of every rank but 0, runs on the watchdog's thread.
"""

import contextlib
import ipaddress
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from multiworld.errors import Cause
from multiworld.frames import HEARTBEAT_BYTES, Frame, FrameError, Kind
from multiworld.handshake import Hello
from multiworld.lifeline import Lifeline
from multiworld.watchdog import Timer, WatchDog

logger = logging.getLogger(__name__)


class WatchedWorld(Protocol):
    """What a watch tells its world. Called on the watchdog's thread: must return at once."""

    def on_all_here(self, epoch: int, local_host: str) -> None:
        """All ranks are seated; `local_host` is our own address as the others reach it."""

    def on_stored(self, key: str, value: bytes) -> None: ...

    def on_gone(self, rank: int, cause: Cause, detail: str) -> None: ...

    def on_left(self, rank: int) -> None: ...

    def on_all_settled(self) -> None:
        """Somebody left, and nobody has an operation pending any more."""

    def on_refused(self, reason: str, *, final: bool) -> None:
        """The host will not have us. Unless `final` we go on trying."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Heartbeats are sent every `interval_s`; a peer that is silent for `timeout_s` counts as hung."""

    interval_s: float = 0.2
    timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < self.timeout_s:
            raise ValueError(
                f"heartbeat_interval_s must be over 0 and under heartbeat_timeout_s, got {self.interval_s} and {self.timeout_s}"
            )


def number(field: bytes) -> int:
    """A decimal number of a frame. Raises FrameError."""
    try:
        return int(field)
    except ValueError as error:
        raise FrameError(f"not a number: {field[:20]!r}") from error


def _gone(rank: int, cause: Cause, detail: str) -> bytes:
    return Frame(Kind.GONE, (str(rank).encode(), cause.encode(), detail.encode())).encode()


class Watch(ABC):
    """One member's watch over one world. `lifelines` maps the rank at the other end to the connection."""

    def __init__(self, watchdog: WatchDog, world: WatchedWorld, seat: Hello, pulse: Pulse) -> None:
        self.seat = seat
        self.started = False
        self.lifelines: dict[int, Lifeline] = {}
        self.lost_after_s: float | None = None
        """How long the member that was lost last had been silent by then."""
        self._watchdog = watchdog
        self._world = world
        self._pulse = pulse
        self._over = False  # somebody left: a lost lifeline is no failure any more
        self._detached = False
        self._beat_timer: Timer = watchdog.call_later(pulse.interval_s, self._beat)

    # -- what the world asks for, by WatchDog.call_soon --------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        self._tell(Frame(Kind.PUT, (key.encode(), value)).encode())

    def gone(self, rank: int, cause: Cause, detail: str) -> None:
        """Tell the others that the world is broken, and let go of them."""
        self._tell(_gone(rank, cause, detail))
        self.detach()

    def leave(self) -> None:
        """Say goodbye. `on_all_settled` follows once nobody has anything pending."""
        self._over = True
        self._tell(Frame(Kind.LEFT, (str(self.seat.rank).encode(),)).encode())

    @abstractmethod
    def settle(self) -> None:
        """We have no operation pending any more, after somebody left."""

    def detach(self) -> None:
        """Close every connection of this world. Nothing is reported any more."""
        self._detached = True
        self._beat_timer.cancel()
        for lifeline in self.lifelines.values():
            lifeline.close()
        self.lifelines.clear()

    def silence_s(self) -> float:
        """Longest time for which some member has not been heard."""
        return max((self._watchdog.now_s - line.last_heard_s for line in self.lifelines.values()), default=0.0)

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _tell(self, data: bytes, *, but: Lifeline | None = None) -> None:
        for lifeline in list(self.lifelines.values()):
            if lifeline is not but:
                lifeline.send(data)

    def _beat(self) -> None:
        if self._detached:
            return
        self._beat_timer = self._watchdog.call_later(self._pulse.interval_s, self._beat)
        for rank, lifeline in list(self.lifelines.items()):
            silent_s = self._watchdog.now_s - lifeline.last_heard_s
            if silent_s > self._pulse.timeout_s:
                if self.started:  # should it ever wake, it learns why it was given up
                    lifeline.send(_gone(rank, Cause.HANG, f"silent for {silent_s:.2f} s"))
                lifeline.close()
                self.lost_after_s = silent_s
                self._lost(rank, Cause.HANG, f"nothing heard for {silent_s:.2f} s")
            else:
                lifeline.send(HEARTBEAT_BYTES)

    def on_lost(self, lifeline: Lifeline, reason: str) -> None:
        for rank, known in list(self.lifelines.items()):
            if known is lifeline:
                self.lost_after_s = self._watchdog.now_s - lifeline.last_heard_s
                self._lost(rank, Cause.EXIT, reason)

    @abstractmethod
    def _lost(self, rank: int, cause: Cause, detail: str) -> None:
        """The connection to `rank` is closed."""

    def _hear(self, lifeline: Lifeline, frame: Frame) -> None:
        """What means the same at both ends."""
        match frame.kind, frame.fields:
            case Kind.HEARTBEAT, _:
                pass
            case Kind.PUT, (key, value):
                self._world.on_stored(key.decode(errors="replace"), value)
            case Kind.GONE, (rank, cause, detail):
                try:
                    told = Cause(cause.decode(errors="replace"))
                except ValueError as error:
                    raise FrameError(f"unknown cause {cause[:20]!r}") from error
                self._world.on_gone(number(rank), told, detail.decode(errors="replace"))
            case Kind.LEFT, (rank,):
                self._over = True
                self._world.on_left(number(rank))
            case _:
                raise FrameError(f"unexpected {frame.kind.name} on a lifeline of world {self.seat.world!r}")


class Roster(Watch):
    """Rank 0's watch: seats the others, relays between them, and judges who is gone."""

    def __init__(self, watchdog: WatchDog, world: WatchedWorld, seat: Hello, pulse: Pulse) -> None:
        super().__init__(watchdog, world, seat, pulse)
        self._settled: set[int] = set()

    def admit(self, rank: int, lifeline: Lifeline) -> None:
        """Give `rank` its seat; the last one starts the world."""
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
        """The ranks whose seats are free."""
        return [rank for rank in range(1, self.seat.size) if rank not in self.lifelines]

    def settle(self) -> None:
        self._mark_settled(self.seat.rank)

    def on_frame(self, lifeline: Lifeline, frame: Frame) -> None:
        if frame.kind is Kind.SETTLED:
            self._mark_settled(next(rank for rank, known in self.lifelines.items() if known is lifeline))
            return
        if frame.kind in (Kind.PUT, Kind.GONE, Kind.LEFT):
            self._tell(frame.encode(), but=lifeline)
        self._hear(lifeline, frame)

    def _mark_settled(self, rank: int) -> None:
        self._settled.add(rank)
        if self._settled >= {self.seat.rank, *self.lifelines}:
            self._tell(Frame(Kind.DONE).encode())
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
    """Sorts our own addresses: one that only this machine reaches comes last, as not all members may be on it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback, host
    return False, host
