"""The connection of an all-reduce to the other members of its epoch."""

from dataclasses import dataclass, field

from torch import Tensor

from multiworld.collectives import movement as collectives
from multiworld.collectives import reductions
from multiworld.collectives.reductions import AnyReduceOp
from multiworld.ops.operation import Operation
from multiworld.world import World


@dataclass(slots=True)
class Traffic:
    """Bytes of tensors that this member has sent and received. Incomplete transfers do not count."""

    sent: int = 0
    received: int = 0

    def add(self, other: "Traffic") -> None:
        self.sent += other.sent
        self.received += other.received


@dataclass(frozen=True, slots=True)
class Epoch:
    """The world of one epoch. Only the elastic world uses it.

    It refers to the world itself, not to its name, because the next epoch has the same name. So an operation that starts after the end of
    its epoch fails.

    Attributes:
        number: number of the epoch.
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
    """The transfers of one all-reduce. They share one tag, so they stay in order. Use it with `with`, which counts the bytes sent."""

    epoch: Epoch
    tag: int
    traffic: Traffic = field(default_factory=Traffic)
    _sending: list[tuple[Operation, int]] = field(default_factory=list)

    def __enter__(self) -> "Post":
        return self

    def __exit__(self, *_: object) -> None:
        self.traffic.sent += sum(size for sending, size in self._sending if sending.status == "done")

    def send(self, tensor: Tensor, rank: int) -> None:
        """Start to send. `sent` waits for all sends."""
        self._sending.append((self.epoch.send(tensor, rank, self.tag), tensor.nbytes))

    def expect(self, tensor: Tensor, rank: int) -> Operation:
        """Start to receive. Wait for it with `arrived`."""
        return self.epoch.receive(tensor, rank, self.tag)

    async def arrived(self, receiving: Operation, tensor: Tensor) -> None:
        """Wait until `tensor` is received."""
        await receiving
        self.traffic.received += tensor.nbytes

    async def sent(self) -> None:
        """Wait until everything is sent."""
        for sending, _ in self._sending:
            await sending
