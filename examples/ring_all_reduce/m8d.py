"""An all-reduce made of `isend` and `irecv` around a ring, and checked against `all_reduce`.

Run: python -m examples.launch ring_all_reduce
"""

import torch

from examples.two_worlds import WORLD_SIZE, Member, run


async def ring_all_reduce(member: Member, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of everybody's `tensor`; that one is left as it is.

    Each tensor goes once around the ring. Two buffers: what came in one turn is passed on in the next, out of the same memory, while
    the following one comes into the other.
    """
    communicator, world = member.communicator, member.world_name
    left, right = (member.rank - 1) % WORLD_SIZE, (member.rank + 1) % WORLD_SIZE
    total, outgoing, incoming = tensor.clone(), tensor.clone(), torch.empty_like(tensor)
    for _ in range(WORLD_SIZE - 1):
        sending = communicator.isend(outgoing, right, world)
        receiving = communicator.irecv(incoming, left, world)
        await receiving
        total += incoming
        await sending  # its buffer is written to in the next turn
        outgoing, incoming = incoming, outgoing
    return total


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    tensor = member.tensor(10 * number + rank)  # whole numbers: their sum is exact in whatever order they are added
    tensor *= torch.arange(1, 4, device=member.device)
    print(f"rank: {rank} has tensor: {tensor}")
    around = await ring_all_reduce(member, tensor)
    await communicator.all_reduce(tensor, world_name=world)
    assert torch.equal(around, tensor), f"the ring gave {around}, all_reduce {tensor}"
    print(f"rank: {rank} from {world} has reduced tensor: {around}, as all_reduce has")


if __name__ == "__main__":
    run(step)
