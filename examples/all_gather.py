"""Every rank gets the tensors of all ranks.

Run: python -m examples.launch all_gather
"""

from examples.two_worlds import WORLD_SIZE, Member, run


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    tensor = member.tensor(10 * number + rank)
    print(f"rank: {rank} has tensor: {tensor}")
    gathered = [member.tensor(0) for _ in range(WORLD_SIZE)]
    await communicator.all_gather(gathered, tensor, world)
    print(f"rank: {rank} from {world} has gathered tensors: {gathered}")


if __name__ == "__main__":
    run(step)
