"""The leader gets the sum of the tensors of all ranks.

Run: python -m examples.launch reduce
"""

from torch.distributed import ReduceOp

from examples.two_worlds import Member, run


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    tensor = member.tensor(10 * number + rank)
    print(f"rank: {rank} has tensor to be reduced: {tensor}")
    await communicator.reduce(tensor, 0, ReduceOp.SUM, world)
    if rank == 0:  # the tensors of the other ranks are undefined now
        print(f"rank: {rank} from {world} has reduced tensor: {tensor}")


if __name__ == "__main__":
    run(step)
