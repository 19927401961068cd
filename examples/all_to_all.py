"""Every rank sends a different tensor to every rank.

Run: python -m examples.launch all_to_all
"""

from examples.two_worlds import WORLD_SIZE, Member, run


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    sent = [member.tensor(100 * number + 10 * rank + dst) for dst in range(WORLD_SIZE)]
    print(f"rank: {rank} from {world} sends tensors: {sent}")
    received = [member.tensor(0) for _ in range(WORLD_SIZE)]
    await communicator.all_to_all(received, sent, world)
    print(f"rank: {rank} from {world} has received tensors: {received}")


if __name__ == "__main__":
    run(step)
