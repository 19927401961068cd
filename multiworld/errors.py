"""The exceptions of the library, and the causes of a broken world.

    MultiWorldError
    ├── WorldError                  carries `world_name`
    │   ├── BrokenWorldException    a member failed; the world cannot be used any more: join again for the next generation
    │   │   └── WorldNotFoundError  this process opened no world of that name, or removed it: a bug of the caller; also a ValueError
    │   ├── WorldClosedError        this process closed the world and used it afterwards: a bug of the caller
    │   ├── WorldExistsError        a world of that name is open here: close it, or choose another name; also a ValueError
    │   ├── JoinError               the world did not form (rank 0 not reachable, refused, wrong secret); a retry may succeed
    │   └── ElasticError            this process left its elastic world; unfinished tensors have their original values; it may join again
    │       ├── EvictedError        the world continues without this process
    │       ├── RendezvousError     the rendezvous server cannot be reached or does not know the world
    │       ├── ViewChangeError     no view formed in time, or a call exceeded its time limit
    │       └── DesyncError         the members call different operations: a bug of the application
    └── AskError                    a query to another process got no answer; a retry may succeed

As in anyio, `broken` means that the world failed or another member left, and `closed` that this process closed it.
"""

from enum import StrEnum


class Cause(StrEnum):
    """Why a world broke. Logs, metrics and the control connection use the same words."""

    EXIT = "exit"  # the member's process ended: its control connection closed
    HANG = "hang"  # no heartbeat for `heartbeat_timeout_s`: the member is unresponsive (the service also: no answer to a batch)
    STALLED = "stalled"  # heartbeats arrive, but the member's event loop has not run for `loop_stall_timeout_s`
    TRANSPORT = "transport"  # a data connection failed while the control connection worked
    LEFT = "left"  # the member closed the world
    TIMEOUT = "timeout"  # an operation exceeded its caller's timeout
    ERROR = "error"  # the members disagree on an operation (which one, sizes, dtype), or the peer broke the protocol
    LOCAL = "local"  # the member itself failed: no memory, no thread, or its backend refused an operation
    ABORTED = "aborted"  # an operation was cancelled, or a member aborted the world


class MultiWorldError(Exception):
    """Base class of the exceptions of this library. Invalid arguments raise ValueError or TypeError instead."""


class WorldError(MultiWorldError):
    """Reports an error of one world.

    Attributes:
        world_name: the name of the world.
        message: the text without the name.
    """

    def __init__(self, world_name: str, message: str) -> None:
        super().__init__(world_name, message)  # args equal the parameters, so that pickling works
        self.world_name = world_name
        self.message = message

    def __str__(self) -> str:
        return f"world {self.world_name!r}: {self.message}"


class BrokenWorldException(WorldError):  # noqa: N818 - pymultiworld's users catch it by this name
    """A member of the world failed or left. Every pending and later operation of this world raises it; other worlds are not affected.

    The world cannot be used any more. Join again under the same name for the next generation.

    Attributes:
        cause: a `Cause`.
        rank: rank of the failed member in this world; -1 if it is not known.
        detail: what was observed; may be empty.
    """

    def __init__(self, world_name: str, cause: Cause | str = Cause.TRANSPORT, rank: int = -1, detail: str = "") -> None:
        """`cause` may also be a message without a `Cause`, for compatibility with pymultiworld; the cause is TRANSPORT then."""
        if isinstance(cause, Cause):
            member = f"rank {rank}" if rank >= 0 else "a member"
            super().__init__(world_name, f"{member}, cause {cause}" + (f" ({detail})" if detail else ""))
            self.args = (world_name, cause, rank, detail)
        else:
            super().__init__(world_name, cause)
            cause, detail = Cause.TRANSPORT, cause
        self.cause = cause
        self.rank = rank
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.world_name} broken: {self.message}"

    @property
    def _world_name(self) -> str:
        """Return the name of `world_name` in pymultiworld."""
        return self.world_name

    @property
    def _msg(self) -> str:
        """Return the name of `message` in pymultiworld."""
        return self.message


class WorldClosedError(WorldError):
    """This process closed the world. Join again to use it."""


class WorldNotFoundError(BrokenWorldException, ValueError):
    """This process opened no world of that name, or removed it. It has two bases because pymultiworld raises both types in this case."""

    def __str__(self) -> str:
        return f"world {self.world_name!r}: {self.message}"


class WorldExistsError(WorldError, ValueError):
    """This process has an open world of that name. The open world is not affected."""


class JoinError(WorldError):
    """The world did not form in time, or rank 0 refused this member. Everything is freed; a retry is safe."""


class ElasticError(WorldError):
    """This process is no longer a member of the elastic world. It may join again."""


class EvictedError(ElasticError):
    """The world continues without this process, which was frozen or disconnected, or did not ask for the next view in time."""


class RendezvousError(ElasticError):
    """The rendezvous server cannot be reached or does not know this world. A working view continues, but no other follows."""


class ViewChangeError(ElasticError):
    """No view formed in time, or a call exceeded its time limit."""


class DesyncError(ElasticError):
    """The members call different operations, pass different tensors, or some are one call ahead. A bug of the application."""


class AskError(MultiWorldError):
    """`ask` got no answer: the server is not reachable, refused the question, or failed. A wrong secret raises PermissionError instead."""
