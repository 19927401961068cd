"""Classifies errors of operations: a lost connection is attributed to the peer, any other error to this member."""

_REASON_CHARS = 500


class ConnectionLostError(RuntimeError):
    """A connection to another member failed.

    Attributes:
        peer: the rank of that member; -1 if it is not known.
    """

    def __init__(self, reason: str, peer: int = -1) -> None:
        super().__init__(reason)
        self.peer = peer


class MismatchError(Exception):
    """The members start different operations.

    Attributes:
        rank: a member that differs from others.
        detail: both sides of the mismatch as text.
    """

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(rank, detail)
        self.rank = rank
        self.detail = detail


def described(error: BaseException) -> str:
    """Return the error as one line of text."""
    if isinstance(error, ConnectionLostError):
        return str(error)
    reason = str(error).partition("\n")[0][:_REASON_CHARS]  # torch appends a stack trace
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
