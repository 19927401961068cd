"""Ranks 1 and 2 send a tensor to the leader, which receives them one after the other.

Run: python -m examples.launch send_recv
"""

from examples.two_worlds import WORLD_SIZE, Member, run


async def step(member: Member, number: int) -> None:
    communicator, world, rank = member.communicator, member.world_name, member.rank
    if rank > 0:
        tensor = member.tensor(10 * number + rank)
        print(f"rank: {rank} has tensor: {tensor}")
        await communicator.send(tensor, 0, world)
        return
    for src in range(1, WORLD_SIZE):
        received = member.tensor(0)
        await communicator.recv(received, src, world)
        print(f"rank: {rank} received {received} from rank {src} in {world}")


if __name__ == "__main__":
    run(step)
