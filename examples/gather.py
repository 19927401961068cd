"""The leader gets the tensors of all ranks.

Run: python -m examples.launch gather
"""

from examples.two_worlds import WORLD_SIZE, Member, run


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    tensor = member.tensor(10 * number + rank)
    print(f"rank: {rank} has tensor: {tensor}")
    gathered = [member.tensor(0) for _ in range(WORLD_SIZE)] if rank == 0 else None
    await communicator.gather(tensor, gathered, 0, world)
    if rank == 0:
        print(f"rank: {rank} from {world} has gathered tensors: {gathered}")


if __name__ == "__main__":
    run(step)
