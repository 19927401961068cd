"""Implements `all_reduce_multiple_with_retry` with the operations below it: `all_reduce_async`, `agree` and `next_view`.

Run: python -m examples.launch all_reduce_by_hand --kill-rank 1,2
"""

import torch

from examples.elastic_members import run
from multiworld import BrokenWorldException
from multiworld.elastic import ElasticWorld

TENSORS, ELEMENTS = 32, 65_536
IN_FLIGHT = 16


async def all_reduce(world: ElasticWorld, tensors: list[torch.Tensor]) -> int:
    """Sum all tensors, in place, even if members are lost. Returns the number of retries."""
    originals = [tensor.clone() for tensor in tensors]
    finished = [False] * len(tensors)
    retries = 0
    while True:
        view_number = world.view_number
        try:
            # Call `agree` before and after operations run in a view. It clears the flags of operations that only some members finished.
            finished = await world.agree(finished)
            if all(finished):
                return retries
            todo = [index for index, done in enumerate(finished) if not done]
            for index in todo:
                tensors[index].copy_(originals[index])
            for begin in range(0, len(todo), IN_FLIGHT):
                await _reduce_some(world, tensors, todo[begin : begin + IN_FLIGHT], finished)
        except BrokenWorldException:
            retries += 1
            await world.next_view(view_number)


async def _reduce_some(
    world: ElasticWorld, tensors: list[torch.Tensor], indices: list[int], finished: list[bool]
) -> None:
    """Run some all-reduces at once and wait for all of them. Raises BrokenWorldException when any of them failed."""
    handles = {index: world.all_reduce_async(tensors[index], tag=index) for index in indices}
    failure = None
    for index, handle in handles.items():
        try:
            await handle
            finished[index] = True
        except BrokenWorldException as error:
            failure = error
    if failure is not None:
        raise failure


async def step(world: ElasticWorld, number: int, _step_number: int) -> None:
    """Member N contributes 10**N, so the digits of a sum show the members that contributed to it."""
    tensors = [torch.full((ELEMENTS,), float(10**number)) for _ in range(TENSORS)]
    retries = await all_reduce(world, tensors)
    sums = sorted({int(value) for tensor in tensors for value in tensor.aminmax()})
    print(f"member {number} has sums {sums} of {world.size} members, {retries} retries")


if __name__ == "__main__":
    run(step)
