"""One epoch as the all-reduces of it see it."""

from dataclasses import dataclass, field

from torch import Tensor

from multiworld import collectives, reductions
from multiworld.operation import Operation
from multiworld.reductions import AnyReduceOp
from multiworld.world import World


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
    """The world of an epoch, which nobody else uses.

    It is held itself, not by its name, which the next epoch has too: what begins late, of an epoch that is over, must fail there.

    Attributes:
        number: the epoch.
        world: None in an epoch of one member.
    """

    number: int
    rank: int
    size: int
    world: World | None

    def send(self, tensor: Tensor, rank: int, tag: int) -> Operation:
        assert self.world is not None
        return self.world.start_send(tensor, rank, tag=tag)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Operation:
        assert self.world is not None
        return self.world.start_recv(tensor, rank, tag=tag)

    async def all_reduce(self, tensor: Tensor, op: AnyReduceOp) -> None:
        assert self.world is not None
        await self.world.start(reductions.all_reduce(self.world.ranks, tensor, op)).finish()

    async def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        assert self.world is not None
        await self.world.start(collectives.all_gather_into_tensor(self.world.ranks, output, tensor)).finish()


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
        self._sending.append((self.epoch.send(tensor, rank, self.tag), tensor.nbytes))

    def expect(self, tensor: Tensor, rank: int) -> Operation:
        """Start to receive; await it with `arrived`."""
        return self.epoch.receive(tensor, rank, self.tag)

    async def arrived(self, receiving: Operation, tensor: Tensor) -> None:
        await receiving
        self.traffic.received += tensor.nbytes

    async def sent(self) -> None:
        for sending, _ in self._sending:
            await sending
