"""What members of an elastic world and its rendezvous say to each other. Pure: no socket here.

member → rendezvous     Ask, Leave
rendezvous → member     View, Void, Unchanged, Evicted
"""

import json
from dataclasses import asdict, dataclass

MAX_MESSAGE_BYTES = 1 << 20
"""Longest message; a view of a thousand members is a tenth of it."""


class MessageError(ValueError):
    """Bytes that are no message: the other side speaks something else."""


@dataclass(frozen=True, slots=True)
class Seating:
    """A member, and where it listens when it is rank 0 of an epoch.

    Attributes:
        id: its own for as long as it is a member; who joins again has another one.
    """

    id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A member wants to know how it goes on after `epoch`.

    Attributes:
        boundary: it stands between two operations, and newcomers may be let in; else `epoch` is broken, or did not form.
        closed: how many rounds it knows to be closed (multiworld/elastic/rounds.py).
        boundaries: how many boundaries it has passed.
        accused: the id of the member that it lost, "" where it cannot tell.
    """

    epoch: int
    boundary: bool
    closed: int
    boundaries: int
    accused: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """A member goes on purpose."""


@dataclass(frozen=True, slots=True)
class View:
    """Who makes up an epoch; a member's rank is its place in `members`, the one of longest standing first.

    Attributes:
        closed: how many rounds are closed, the most that any of them knows.
        boundaries: how many boundaries are passed: who stands at an earlier one has missed that, and may go on.
    """

    epoch: int
    members: tuple[Seating, ...]
    closed: int = 0
    boundaries: int = 0

    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    def rank_of(self, member_id: str) -> int:
        return self.ids().index(member_id)


@dataclass(frozen=True, slots=True)
class Void:
    """A member of `epoch` is lost: give it up, and ask."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Unchanged:
    """All stand at the boundary, or have, and nobody waits to be let in: `epoch` goes on."""

    epoch: int
    boundaries: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The world goes on without this member."""

    reason: str


Message = Ask | Leave | View | Void | Unchanged | Evicted
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Ask, Leave, View, Void, Unchanged, Evicted)}
_FIELDS: dict[str, type] = {
    "epoch": int,
    "closed": int,
    "boundaries": int,
    "boundary": bool,
    "accused": str,
    "reason": str,
}


def encode(message: Message) -> bytes:
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def decode(data: bytes) -> Message:
    """Raises MessageError when the bytes are no message."""
    try:
        fields = json.loads(data)
        kind = _KINDS[fields.pop("kind")]
        if kind is View:
            fields["members"] = tuple(seating(each) for each in fields["members"])
        message = kind(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MessageError(f"not a message: {data[:60]!r}") from error
    if any(type(fields[name]) is not kind_of for name, kind_of in _FIELDS.items() if name in fields):
        raise MessageError(f"not a message: a field of {data[:60]!r} has the wrong type")
    return message


def seating(fields: dict[str, object]) -> Seating:
    """Raises MessageError for what is none."""
    match fields:
        case {"id": str(member_id), "host": str(host), "port": int(port)} if len(fields) == 3 and 0 < port < 65536:
            return Seating(member_id, host, port)
    raise MessageError(f"not a member: {fields!r:.100}")
