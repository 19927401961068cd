"""One epoch as the all-reduces of it see it."""

from dataclasses import dataclass, field

from torch import Tensor

from multiworld.operation import Operation
from multiworld.world_communicator import WorldCommunicator


@dataclass(slots=True)
class Traffic:
    """Bytes of tensors that this member has sent and received; of what failed, those of the messages that had been whole."""

    sent: int = 0
    received: int = 0

    def add(self, other: "Traffic") -> None:
        self.sent += other.sent
        self.received += other.received


@dataclass(frozen=True, slots=True)
class Epoch:
    """The world of an epoch: an ordinary one of that name, which nobody else uses.

    Attributes:
        number: the epoch.
    """

    communicator: WorldCommunicator
    world_name: str
    number: int
    rank: int
    size: int


@dataclass(slots=True)
class Post:
    """The messages of one all-reduce: all under one tag, so that they stay in order. Use it as `with`, and what was sent is counted."""

    epoch: Epoch
    tag: int
    traffic: Traffic = field(default_factory=Traffic)
    _sending: list[tuple[Operation, int]] = field(default_factory=list)

    def __enter__(self) -> "Post":
        return self

    def __exit__(self, *_: object) -> None:
        self.traffic.sent += sum(size for sending, size in self._sending if sending.status == "done")

    def send(self, tensor: Tensor, rank: int) -> None:
        """Start to send; `sent` waits for all that were started."""
        epoch = self.epoch
        sending = epoch.communicator.isend(tensor, rank, epoch.world_name, tag=self.tag)
        self._sending.append((sending, tensor.nbytes))

    def expect(self, tensor: Tensor, rank: int) -> Operation:
        """Start to receive; await it with `arrived`."""
        epoch = self.epoch
        return epoch.communicator.irecv(tensor, rank, epoch.world_name, tag=self.tag)

    async def arrived(self, receiving: Operation, tensor: Tensor) -> None:
        await receiving
        self.traffic.received += tensor.nbytes

    async def sent(self) -> None:
        for sending, _ in self._sending:
            await sending
