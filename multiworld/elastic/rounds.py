"""How the members of an epoch agree on which operations of a round are finished. Pure: bytes in, decisions out.

A *round* is one call: some operations that all members do together. Each member keeps a flag for each operation: finished here. In every
epoch, before operations run and after they have, the members exchange their flags, and an operation counts as finished when it is at
all of them. The rules, and why they give the same bits everywhere:

1. What has finished at some members only is done again by all, from the originals, which nobody has let go of.
2. Nobody runs an operation in an epoch before everybody there has exchanged flags. So whatever finishes in an epoch, all of its members
   ran with the same flags before them, and has the same result at whoever has finished it.
3. Flags that were exchanged at some members only (a member died meanwhile) do no harm: who has them drops what was not finished at all,
   runs the rest, and cannot finish any, for it takes all members.
4. A round is closed for who sees that everything is finished at all. The originals may go then, for all members have all results. Who has
   closed a round says so before the next epoch is decided (`Ask.closed`), and the view says it to all: who has not closed it yet
   closes it then, with what it has.
5. Nobody can be more than one round ahead, as closing a round takes all members.
"""

import hashlib
import struct
from typing import Literal

from multiworld.errors import MultiWorldError

_HEAD = struct.Struct("!QQ16s16s")


class RoundMismatch(MultiWorldError):  # noqa: N818 - it is caught inside, and told as DesyncError
    """The members are not doing the same.

    Attributes:
        rank: the first that stands against rank 0.
    """

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(rank, detail)
        self.rank = rank
        self.detail = detail


class Round:
    """One member's part in it.

    Args:
        number: how many rounds were closed before it.
        count: how many operations it has.
        signature: what the operations are, in words; the same at all members.
    """

    def __init__(self, number: int, count: int, signature: str) -> None:
        self.number = number
        self.finished = [False] * count
        self._signature = hashlib.blake2b(signature.encode(), digest_size=16).digest()

    @property
    def complete(self) -> bool:
        return all(self.finished)

    @property
    def unfinished(self) -> list[int]:
        return [index for index, finished in enumerate(self.finished) if not finished]

    def finish(self, index: int) -> None:
        """Operation `index` is finished here; its result is kept beside the original."""
        self.finished[index] = True

    def is_closed(self, closed: int) -> bool:
        """Whether somebody has closed it, going by how many rounds are closed. Raises RoundMismatch when that cannot be."""
        if closed > self.number and not self.complete:
            raise RoundMismatch(0, f"round {self.number} is closed elsewhere, but is not finished here")
        return closed > self.number

    # -- the exchange ----------------------------------------------------------------------------------------------------------

    def head(self) -> bytes:
        """What each member says first, of fixed length: which round, which operations, which of them are finished."""
        flags = hashlib.blake2b(self.flags(), digest_size=16).digest()
        return _HEAD.pack(self.number, len(self.finished), self._signature, flags)

    def flags(self) -> bytes:
        """One bit an operation, padded with ones."""
        bits = self.finished + [True] * (-len(self.finished) % 8)
        return bytes(sum(bit << place for place, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8))

    def judge(self, heads: list[bytes]) -> Literal["agreed", "compare"]:
        """Whether all have the same flags, or have to show them. Raises RoundMismatch, the same at all members."""
        said = [_HEAD.unpack(head) for head in heads]
        first = said[0]
        for rank, (number, count, signature, _) in enumerate(said):
            if number != first[0]:
                raise RoundMismatch(rank, f"it is in round {number}, rank 0 in round {first[0]}")
            if (count, signature) != first[1:3]:
                raise RoundMismatch(rank, f"its {count} operations are not those of rank 0, {first[1]}")
        return "agreed" if all(head[3] == first[3] for head in said) else "compare"

    def settle(self, flags: list[bytes]) -> None:
        """Take as finished what is finished at all."""
        common = bytearray(flags[0])
        for each in flags[1:]:
            for at, byte in enumerate(each):
                common[at] &= byte
        self.finished = [bool(common[index // 8] >> index % 8 & 1) for index in range(len(self.finished))]
