"""The messages between members of an elastic world and its rendezvous server. Pure: encoding and decoding only.

member → server     Join, NextViewRequest
server → member     Admitted, Refused, View, ViewInvalidated, BoundaryPassed, Evicted
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from multiworld.texts import MAX_HOST_CHARS, is_name


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
class Join:
    """A member asks for a link to the rendezvous server, before it is connected. The reply is Admitted, Refused or Evicted.

    Attributes:
        world: name of the elastic world.
        resume: it is a member already and has lost its link.
    """

    world: str
    member: MemberInfo
    resume: bool


@dataclass(frozen=True, slots=True)
class Admitted:
    """The member may open its link. It becomes a member of the world with the first view that includes it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The member cannot join, and a retry will not help."""

    reason: str


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
    """The world continues without this member, which closes its link."""

    reason: str


Message = Join | Admitted | Refused | NextViewRequest | View | ViewInvalidated | BoundaryPassed | Evicted
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__args__}


def encode(message: Message) -> bytes:
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def decode(data: bytes | str) -> Message:
    """Parse a message. Raises MessageError if the data is not a valid one."""
    try:
        values = json.loads(data)
        message: Message = _build(_KINDS[values.pop("kind")], values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MessageError(f"not a message: {data[:60]!r}") from error
    return message


def _build(kind: type[Any], values: dict[str, Any]) -> Any:
    types = {field.name: field.type for field in fields(kind)}
    return kind(**{name: _checked(types[name], value) for name, value in values.items()})


def _checked(kind: Any, value: Any) -> Any:
    """Convert the value of a field to the type of the field. Raises one of the errors that `decode` translates."""
    if kind == tuple[MemberInfo, ...]:
        return tuple(_checked(MemberInfo, each) for each in value)
    if kind is MemberInfo:
        member = _build(MemberInfo, value)
        if not (is_name(member.id) and is_name(member.host, MAX_HOST_CHARS) and 0 < member.port < 65536):
            raise ValueError(f"not a member: {value!r:.100}")
        return member
    if type(value) is not kind:
        raise TypeError(f"not of type {kind}: {value!r:.100}")
    return value
