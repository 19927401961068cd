"""The messages between members of an elastic world and its rendezvous server. Pure: encoding and decoding only.

member → server     Join, NextViewRequest
server → member     Admitted, Refused, View, ViewInvalidated, NewMembersWait, Evicted
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from multiworld.texts import MAX_HOST_CHARS, MAX_NAME_CHARS

Name = Annotated[str, Meta(pattern=rf"\A[!-~]{{1,{MAX_NAME_CHARS}}}\Z")]
"""Printable ASCII characters without spaces."""


class MessageError(ValueError):
    """Protocol error: the bytes are not a valid message."""


class MemberInfo(Struct, frozen=True):
    """A member and the address at which it listens when it is rank 0 of a view.

    Attributes:
        id: unique and constant during the membership; a process that joins again has a new id.
        host, port: address as the other members reach it.
    """

    id: Name
    host: Annotated[str, Meta(pattern=rf"\A[!-~]{{1,{MAX_HOST_CHARS}}}\Z")]
    port: Annotated[int, Meta(gt=0, lt=65536)]


class _Tagged(Struct, frozen=True, tag=True, tag_field="kind"):
    """A message. The tag is the name of its class."""


class Join(_Tagged, frozen=True):
    """A member asks for a link to the rendezvous server, before it is connected. The reply is Admitted, Refused or Evicted.

    Attributes:
        world: name of the elastic world.
        resume: it is a member already and has lost its link.
    """

    world: Name
    member: MemberInfo
    resume: bool


class Admitted(_Tagged, frozen=True):
    """The member may open its link. It becomes a member of the world with the first view that includes it."""


class Refused(_Tagged, frozen=True):
    """The member cannot join, and a retry will not help."""

    reason: str


class NextViewRequest(_Tagged, frozen=True):
    """A member asks for the view that follows `view_number`.

    Attributes:
        at_boundary: the member is between two operations, and new members may be admitted; otherwise the view broke or did not form.
        committed: number of rounds that it knows to be committed (multiworld/elastic/protocol/rounds.py).
        suspect: id of the member that it lost; "" if it does not know.
    """

    view_number: int
    at_boundary: bool
    committed: int
    suspect: str = ""


class View(_Tagged, frozen=True):
    """The agreed list of members, ordered by rank. The oldest member comes first.

    Attributes:
        number: only increases.
        committed: number of committed rounds, the maximum over what its members know.
    """

    number: int
    members: tuple[MemberInfo, ...]
    committed: int = 0

    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    def rank_of(self, member_id: str) -> int:
        """Return the rank of a member. Raises ValueError if it is not in this view."""
        return self.ids().index(member_id)


class ViewInvalidated(_Tagged, frozen=True):
    """A member of this view is lost. The receiver ends the view and asks for the next one."""

    view_number: int


class NewMembersWait(_Tagged, frozen=True):
    """New members wait until the members of the current view are at a boundary."""


class Evicted(_Tagged, frozen=True):
    """The world continues without this member, which closes its link."""

    reason: str


Message = Join | Admitted | Refused | NextViewRequest | View | ViewInvalidated | NewMembersWait | Evicted
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


def decode(data: bytes | str) -> Message:
    """Parse a message. Raises MessageError if the data is not a valid one."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MessageError(f"not a message: {error}: {data[:60]!r}") from error
