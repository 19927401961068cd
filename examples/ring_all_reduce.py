"""A ring all-reduce made of `isend` and `irecv`, checked against `all_reduce`.

Run: python -m examples.launch ring_all_reduce
"""

import torch

from examples.two_worlds import WORLD_SIZE, Member, run


async def ring_all_reduce(member: Member, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the `tensor` of all ranks; `tensor` is unchanged.

    Each tensor passes once around the ring. There are two buffers: a rank forwards the tensor received in the previous turn from one
    buffer, while it receives the next one into the other.
    """
    communicator, world = member.communicator, member.world_name
    left, right = (member.rank - 1) % WORLD_SIZE, (member.rank + 1) % WORLD_SIZE
    total, outgoing, incoming = tensor.clone(), tensor.clone(), torch.empty_like(tensor)
    for _ in range(WORLD_SIZE - 1):
        sending = communicator.isend(outgoing, right, world)
        receiving = communicator.irecv(incoming, left, world)
        await receiving
        total += incoming
        await sending  # the next turn writes to its buffer
        outgoing, incoming = incoming, outgoing
    return total


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    tensor = member.tensor(10 * number + rank)  # integers: their sum is exact in any order
    tensor *= torch.arange(1, 4, device=member.device)
    print(f"rank: {rank} has tensor: {tensor}")
    around = await ring_all_reduce(member, tensor)
    await communicator.all_reduce(tensor, world_name=world)
    assert torch.equal(around, tensor), f"the ring gave {around}, all_reduce {tensor}"
    print(f"rank: {rank} from {world} has reduced tensor: {around}, as all_reduce has")


if __name__ == "__main__":
    run(step)
