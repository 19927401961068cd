"""The connections of an all-reduce to the other members of its view."""

from dataclasses import dataclass, field

from torch import Tensor

from multiworld.collectives import movement, reductions
from multiworld.collectives.reductions import AnyReduceOp
from multiworld.ops.operation import Operation
from multiworld.world import World


@dataclass(slots=True)
class ByteCounters:
    """Bytes of tensors that this member has sent and received. Incomplete transfers do not count."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class ViewWorld:
    """The world of one view.

    It refers to the world itself, not to its name, because the world of the next view has the same name. So an operation that starts after
    the end of its view fails.

    Attributes:
        world: None in a view of one member.
    """

    rank: int
    size: int
    world: World | None

    def send(self, tensor: Tensor, rank: int, tag: int) -> Operation:
        assert self.world is not None
        return self.world.start_send(tensor, rank, tag=tag)

    def recv(self, tensor: Tensor, rank: int, tag: int) -> Operation:
        assert self.world is not None
        return self.world.start_recv(tensor, rank, tag=tag)

    async def all_reduce(self, tensor: Tensor, op: AnyReduceOp) -> None:
        assert self.world is not None
        await self.world.start(reductions.all_reduce(self.world.ranks, tensor, op)).finish()

    async def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        assert self.world is not None
        await self.world.start(movement.all_gather_into_tensor(self.world.ranks, output, tensor)).finish()


@dataclass(slots=True)
class TaggedChannel:
    """The transfers of one all-reduce. They share one tag, so they stay in order. Use it with `with`, which counts the bytes sent.

    Attributes:
        tag: identifies the all-reduce; the same on all members.
        counters: the bytes sent and received are added to it, also on failure.
    """

    world: ViewWorld
    tag: int
    counters: ByteCounters
    _sends: list[tuple[Operation, int]] = field(default_factory=list)

    def __enter__(self) -> "TaggedChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.counters.sent += sum(size for operation, size in self._sends if operation.status == "done")

    def send(self, tensor: Tensor, rank: int) -> None:
        """Start to send. `wait_sent` waits for all sends."""
        self._sends.append((self.world.send(tensor, rank, self.tag), tensor.nbytes))

    def recv(self, tensor: Tensor, rank: int) -> Operation:
        """Start to receive. Wait for it with `wait_received`."""
        return self.world.recv(tensor, rank, self.tag)

    async def wait_received(self, operation: Operation, tensor: Tensor) -> None:
        """Wait until `tensor` is received."""
        await operation
        self.counters.received += tensor.nbytes

    async def wait_sent(self) -> None:
        """Wait until everything is sent."""
        for operation, _ in self._sends:
            await operation
