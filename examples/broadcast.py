"""Every rank gets the tensor of the leader.

Run: python -m examples.launch broadcast
"""

from examples.two_worlds import Member, run


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    tensor = member.tensor(10 * number if rank == 0 else 0)
    print(f"rank: {rank} has tensor{' to be broadcast' if rank == 0 else ''}: {tensor}")
    await communicator.broadcast(tensor, 0, world)
    print(f"rank: {rank} from {world} has broadcast tensor: {tensor}")


if __name__ == "__main__":
    run(step)
