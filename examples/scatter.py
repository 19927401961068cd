"""The leader sends a different tensor to every rank.

Run: python -m examples.launch scatter
"""

from examples.two_worlds import WORLD_SIZE, Member, run


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    parts = [member.tensor(10 * number + dst) for dst in range(WORLD_SIZE)] if rank == 0 else None
    if rank == 0:
        print(f"rank: {rank} from {world} scatters tensors: {parts}")
    tensor = member.tensor(0)
    await communicator.scatter(tensor, parts, 0, world)
    print(f"rank: {rank} from {world} has tensor: {tensor}")


if __name__ == "__main__":
    run(step)
