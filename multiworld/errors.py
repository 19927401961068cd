"""What can go wrong with a world.

    MultiWorldError
    ├── WorldError                  carries `world_name`
    │   ├── BrokenWorldException    a member failed; the world is gone for good, join again under the next epoch
    │   │   └── WorldNotFoundError  no world of that name was opened here, or it was removed: a bug of the caller; also a ValueError
    │   ├── WorldClosedError        we closed it ourselves and used it afterwards: a bug of the caller
    │   ├── WorldExistsError        a world of that name is open here: close it, or choose another name; also a ValueError
    │   └── JoinError               the world did not form (nobody there, refused, wrong secret); trying again may help
    └── AskError                    a question to another process found no answer; asking again may help

`broken` means that somebody else failed, `closed` that we said goodbye (the words are anyio's).
"""

from enum import StrEnum


class Cause(StrEnum):
    """Why a world broke; the same words stand in logs, metrics and on the lifeline."""

    EXIT = "exit"  # the member's process is gone: its lifeline ended
    HANG = "hang"  # nothing heard for `heartbeat_timeout_s`: frozen, or cut off
    TRANSPORT = "transport"  # the group's connections failed while the member's lifeline was well
    LEFT = "left"  # the member said goodbye
    TIMEOUT = "timeout"  # an operation outlasted the time that its caller gave it
    ERROR = "error"  # the members disagree on an operation: which one, its sizes, its dtype
    ABORTED = "aborted"  # an operation was cancelled, or a member gave the world up on purpose


class MultiWorldError(Exception):
    """Root of everything that this library raises on purpose."""


class WorldError(MultiWorldError):
    """Something about one world."""

    def __init__(self, world_name: str, message: str) -> None:
        super().__init__(world_name, message)  # args mirror the signature, so that pickling works
        self.world_name = world_name
        self.message = message

    def __str__(self) -> str:
        return f"world {self.world_name!r}: {self.message}"


class BrokenWorldException(WorldError):  # noqa: N818 - pymultiworld's users catch it by this name
    """A member of the world failed. Every pending and later operation of this world raises it; no other world notices.

    The world never heals: join again under the same name, which makes the next epoch.

    Attributes:
        cause: a `Cause`.
        rank: rank of the member that failed, in this world; -1 where it cannot be told.
    """

    def __init__(self, world_name: str, cause: Cause | str = Cause.TRANSPORT, rank: int = -1, detail: str = "") -> None:
        """`cause` may also be a mere message, as pymultiworld's users make this exception."""
        who = f"rank {rank}" if rank >= 0 else "a member"
        told = isinstance(cause, Cause)
        super().__init__(world_name, f"{who}, cause {cause}" + (f" ({detail})" if detail else "") if told else cause)
        self.args = (world_name, cause, rank, detail) if told else (world_name, cause)
        self.cause = Cause(cause) if told else Cause.TRANSPORT
        self.rank = rank
        self.detail = detail if told else cause

    def __str__(self) -> str:
        return f"{self.world_name} broken: {self.message}"

    @property
    def _world_name(self) -> str:
        """pymultiworld's name of `world_name`."""
        return self.world_name

    @property
    def _msg(self) -> str:
        """pymultiworld's name of `message`."""
        return self.message


class WorldClosedError(WorldError):
    """The world was closed by this process."""


class WorldNotFoundError(BrokenWorldException, ValueError):
    """This process never opened a world of that name, or removed it. The two bases are what pymultiworld raises then."""

    def __str__(self) -> str:
        return f"world {self.world_name!r}: {self.message}"


class WorldExistsError(WorldError, ValueError):
    """This process has a world of that name already."""


class JoinError(WorldError):
    """The world did not form in time, or its host refused us. Nothing is left behind; trying again is safe."""


class AskError(MultiWorldError):
    """`ask` got no answer: nobody listens there, the secret is wrong, or the other side failed."""
