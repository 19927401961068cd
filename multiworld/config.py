"""The settings of one member of a world, and of its heartbeats."""

from dataclasses import dataclass

from multiworld.membership.acceptor import Acceptor
from multiworld.ops.validation import WorldFacts
from multiworld.transport.segments import SegmentPool

HEARTBEAT_TIMEOUT_S = 5.0
"""Default. One call in C, such as the import of a large extension, may hold the GIL for seconds, and our heartbeats need the GIL."""
_MIN_STALL_HEARTBEATS = 4
"""Lower limit of `loop_stall_timeout_s` in heartbeats: a running event loop may increment its count one or two heartbeats late."""


@dataclass(frozen=True, slots=True)
class HeartbeatConfig:
    """Heartbeats are sent every `interval_s`; a peer from which nothing arrives for `timeout_s` is unresponsive (`Cause.HANG`).

    Attributes:
        loop_stall_timeout_s: a peer whose event loop has not run for this long is stalled (`Cause.STALLED`), and our heartbeats carry
            the count of our event loop. None turns both off.
    """

    interval_s: float = 0.2
    timeout_s: float = HEARTBEAT_TIMEOUT_S
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig(WorldFacts):
    """Holds the settings of one member of a world. Raises ValueError for an invalid rank, size or port.

    Attributes:
        generation: the generation of `name` to join; 0 lets rank 0 choose.
        addr, port: where rank 0 listens; the others connect there.
        secret: the shared secret of the handshake; may be empty.
        heartbeat: heartbeat interval and timeouts.
        timeout_s: seconds that forming the world may take.
        verify_collectives: compare the fingerprints of every collective before its data is sent (multiworld/collectives/fingerprint.py).
            The same at all members.
        bind_host: the local address of the connections that we open; empty lets the kernel choose.
        segments: the shared memory of this process.
        local_acceptor: accepts data connections from members on this host, on a Unix socket; None uses TCP for them, too.
    """

    generation: int
    addr: str
    port: int
    secret: bytes
    heartbeat: HeartbeatConfig
    timeout_s: float
    segments: SegmentPool
    verify_collectives: bool = False
    bind_host: str = ""
    local_acceptor: Acceptor | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"world {self.name!r}: rank {self.rank} does not exist in a world of size {self.size}")
        if not 0 <= self.port <= 65535:
            raise ValueError(
                f"world {self.name!r}: {self.port} is not a port: expected 0 to 65535, or -1 for the default"
            )
