"""Every rank has one part per rank and gets the sum of the parts for it.

Run: python -m examples.launch reduce_scatter
"""

from torch.distributed import ReduceOp

from examples.two_worlds import WORLD_SIZE, Member, run


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    parts = [member.tensor(100 * number + 10 * rank + dst) for dst in range(WORLD_SIZE)]
    print(f"rank: {rank} has tensors to be reduced: {parts}")
    tensor = member.tensor(0)
    await communicator.reduce_scatter(tensor, parts, ReduceOp.SUM, world)
    print(f"rank: {rank} from {world} has reduced part: {tensor}")


if __name__ == "__main__":
    run(step)
