"""Every rank gets the sum of the tensors of all ranks.

Run: python -m examples.launch all_reduce
"""

from torch.distributed import ReduceOp

from examples.two_worlds import Member, run


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    tensor = member.tensor(10 * number + rank)
    print(f"rank: {rank} has tensor: {tensor}")
    await communicator.all_reduce(tensor, ReduceOp.SUM, world)
    print(f"rank: {rank} from {world} has reduced tensor: {tensor}")


if __name__ == "__main__":
    run(step)
