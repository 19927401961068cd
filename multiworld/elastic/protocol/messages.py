"""The messages between members of an elastic world and its rendezvous server. Pure: encoding and decoding only.

member → server     NextViewRequest, Leave
server → member     View, ViewInvalidated, BoundaryPassed, Evicted
"""

import json
from dataclasses import asdict, dataclass

from multiworld.texts import MAX_HOST_CHARS, is_name, shown

MAX_MESSAGE_BYTES = 1 << 20
"""Maximum length of a message; a view of a thousand members takes a tenth of it."""


class MessageError(ValueError):
    """Protocol error: the bytes are not a valid message."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A member and the address at which it listens when it is rank 0 of a view.

    Attributes:
        id: unique and constant during the membership; a process that joins again has a new id.
        host, port: address as the other members reach it.
    """

    id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class NextViewRequest:
    """A member asks for the view that follows `view_number`.

    Attributes:
        at_boundary: the member is between two operations, and new members may be admitted; otherwise the view broke or did not form.
        committed: number of rounds that it knows to be committed (multiworld/elastic/protocol/rounds.py).
        boundaries: number of boundaries that it has passed.
        suspect: id of the member that it lost; "" if it does not know.
    """

    view_number: int
    at_boundary: bool
    committed: int
    boundaries: int
    suspect: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """A member leaves on purpose."""


@dataclass(frozen=True, slots=True)
class View:
    """The agreed list of members, ordered by rank. The oldest member comes first.

    Attributes:
        number: only increases.
        committed: number of committed rounds, the maximum over what its members know.
        boundaries: number of passed boundaries; a member that waits at an earlier one has missed the decision and may continue.
    """

    number: int
    members: tuple[MemberInfo, ...]
    committed: int = 0
    boundaries: int = 0

    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    def rank_of(self, member_id: str) -> int:
        """Return the rank of a member. Raises ValueError if it is not in this view."""
        return self.ids().index(member_id)


@dataclass(frozen=True, slots=True)
class ViewInvalidated:
    """A member of this view is lost. The receiver ends the view and asks for the next one."""

    view_number: int


@dataclass(frozen=True, slots=True)
class BoundaryPassed:
    """All members are at the boundary, or have passed it, and no new member waits: this view continues."""

    view_number: int
    boundaries: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The world continues without this member."""

    reason: str


Message = NextViewRequest | Leave | View | ViewInvalidated | BoundaryPassed | Evicted
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (NextViewRequest, Leave, View, ViewInvalidated, BoundaryPassed, Evicted)
}
_TYPES: dict[str, type] = {
    "number": int,
    "view_number": int,
    "committed": int,
    "boundaries": int,
    "at_boundary": bool,
    "suspect": str,
    "reason": str,
}


def encode(message: Message) -> bytes:
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def decode(data: bytes) -> Message:
    """Parse a message. Raises MessageError if the bytes are not a valid one."""
    try:
        fields = json.loads(data)
        kind = _KINDS[fields.pop("kind")]
        if kind is View:
            fields["members"] = tuple(parse_member(each) for each in fields["members"])
        if isinstance(fields.get("reason"), str):
            fields["reason"] = shown(fields["reason"])
        message = kind(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MessageError(f"not a message: {data[:60]!r}") from error
    if any(type(fields[name]) is not expected for name, expected in _TYPES.items() if name in fields):
        raise MessageError(f"not a message: a field of {data[:60]!r} has the wrong type")
    return message


def parse_member(fields: dict[str, object]) -> MemberInfo:
    """Parse a `MemberInfo`. Raises MessageError if the fields are invalid."""
    match fields:
        case {"id": str(member_id), "host": str(host), "port": int(port)} if (
            len(fields) == 3 and 0 < port < 65536 and is_name(member_id) and is_name(host, MAX_HOST_CHARS)
        ):
            return MemberInfo(member_id, host, port)
    raise MessageError(f"not a member: {fields!r:.100}")
