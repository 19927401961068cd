"""How the members of a view agree on the finished operations of a round. Pure: bytes in, decisions out.

A *round* is one call: the operations that all members run together. Each member has a flag per operation: finished on this member. In
every view, before and after operations run, the members exchange their flags. An operation counts as finished when it is finished on all
members. The rules, and why they give the same bits on all members:

1. All members run an operation again that finished on only some of them, from the originals, which all members still have.
2. No member runs an operation in a view before all of its members have exchanged flags. So all members of a view run the same set of
   operations, and an operation that finishes has the same result on every member on which it finishes.
3. A member may die during the exchange, so that only some members complete it. Those clear the flags that are not set on all members and
   run these operations, but cannot finish any of them, because that takes all members. The next view compares the flags again.
4. A member commits the round when it sees that all operations finished on all members. All members have all results then, so the
   originals may be overwritten. The member reports the committed round before the next view is decided (`NextViewRequest.committed`), and
   the view reports it to all members. A member that has not committed the round yet commits it then, with the results that it has.
5. No member can be more than one round ahead, because committing a round takes all members.
"""

import hashlib
import struct

from multiworld.execution.failures import MismatchError

_SUMMARY = struct.Struct("!QQ16s16s")


class Round:
    """One member's flags of a round.

    Args:
        number: number of rounds committed before this one.
        count: number of operations.
        signature: describes the operations; must be equal on all members.
    Attributes:
        finished: for each operation, whether it finished on this member. Its result is kept beside the original.
    """

    def __init__(self, number: int, count: int, signature: str) -> None:
        self.number = number
        self.finished = [False] * count
        self._signature = hashlib.blake2b(signature.encode(), digest_size=16).digest()

    @property
    def complete(self) -> bool:
        """Return whether all operations are finished."""
        return all(self.finished)

    @property
    def unfinished(self) -> list[int]:
        """Indices of the unfinished operations."""
        return [index for index, finished in enumerate(self.finished) if not finished]

    def is_committed(self, committed: int) -> bool:
        """Return whether any member has committed this round, given the number of committed rounds.

        Raises MismatchError if it is committed but operations are unfinished on this member.
        """
        if committed > self.number and not self.complete:
            raise MismatchError(
                0, f"another member has committed round {self.number}, which is not finished on this member"
            )
        return committed > self.number

    # -- the exchange --------------------------------------------------------------------------------------------------

    def summary(self) -> bytes:
        """Return the data of the first exchange, of fixed length: number, operations, digest of the flags."""
        flags = hashlib.blake2b(self.flags(), digest_size=16).digest()
        return _SUMMARY.pack(self.number, len(self.finished), self._signature, flags)

    def flags(self) -> bytes:
        """Return one byte per operation."""
        return bytes(self.finished)

    def flags_agree(self, summaries: list[bytes]) -> bool:
        """Return whether all members have the same flags; if not, they must exchange them.

        Raises MismatchError if the rounds differ. All members raise it.
        """
        fields = [_SUMMARY.unpack(summary) for summary in summaries]
        first = fields[0]
        for rank, (number, count, signature, _) in enumerate(fields):
            if number != first[0]:
                raise MismatchError(rank, f"it is in round {number}, rank 0 is in round {first[0]}")
            if (count, signature) != first[1:3]:
                raise MismatchError(rank, "its operation or its tensors differ from those of rank 0")
        return all(flags == first[3] for *_, flags in fields)

    def intersect(self, flags: list[bytes]) -> None:
        """Mark as finished the operations that all members have flagged, and only those."""
        self.finished = [all(of_all_members) for of_all_members in zip(*flags, strict=True)]
