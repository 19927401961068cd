"""Sums over four processes that continue when one is killed, and admit it again when it is restarted.

Run: python -m examples.launch all_reduce_with_retry --kill-rank 1,2
"""

import torch

from examples.elastic_members import run
from multiworld.elastic import ElasticWorld

TENSORS, ELEMENTS = 32, 65_536  # 8 MiB in total


async def step(world: ElasticWorld, number: int, step_number: int) -> None:
    """Sum many tensors at once. Member N contributes 10**N, so the digits of a sum show the members that contributed to it."""
    tensors = [torch.full((ELEMENTS,), float(10**number)) for _ in range(TENSORS)]
    outcome = await world.all_reduce_multiple_with_retry(tensors, max_in_flight=16)
    sums = sorted({int(value) for tensor in tensors for value in tensor.aminmax()})
    if not outcome.success:
        print(f"all other members left in step {step_number}: {outcome}")
    print(f"member {number} has sums {sums} of {outcome.world_size} members, {outcome.retries} retries")


if __name__ == "__main__":
    run(step)
