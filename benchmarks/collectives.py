"""Time of a collective of the library with 2 and 4 ranks, compared to blocking c10d on the same machine.

    python -m benchmarks.collectives
    python -m benchmarks.collectives --sizes 1024 1048576 --ranks 2 --rounds 3 --seconds 0.2
    python -m benchmarks.collectives --operations broadcast all_gather --ways c10d plain

The variants (`--ways`) are measured in turn within one run. `c10d` is `torch.distributed` with its global Gloo group. `plain` and
`checked` are worlds without and with verification. `bytes` is the
size of the largest tensor, or of all tensors of a list.
"""

import argparse
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from benchmarks.ranks import run, started, table
from multiworld import WorldManager

WAYS = ("c10d", "plain", "checked")
OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
Call = Callable[..., Awaitable[None]]


def prepared(perform: Call, operation: str, rank: int, ranks: int, size: int) -> Callable[[], Awaitable[None]]:
    """A function that starts one operation on float32 tensors; rank 0 is the root."""
    count = size // 4 // ranks
    whole, part, outputs, inputs = (torch.zeros(n * count) for n in (ranks, 1, ranks, ranks))
    lists = [list(torch.split(each, max(1, count))) for each in (outputs, inputs)]
    at_root = lists[0] if rank == 0 else None
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (whole,),
        "broadcast": (whole, 0),
        "reduce": (whole, 0),
        "all_gather": (lists[0], part),
        "gather": (part, at_root, 0),
        "scatter": (part, at_root, 0),
        "reduce_scatter": (part, lists[0]),
        "all_to_all": tuple(lists),
        "barrier": (),
    }
    return partial(perform, operation, *arguments[operation])


async def with_c10d(operation: str, *arguments: Any) -> None:
    getattr(dist, operation)(*arguments)


async def in_world(manager: WorldManager, world: str, operation: str, *arguments: Any) -> None:
    await getattr(manager.communicator, operation)(*arguments, world_name=world)


async def measure(perform: Call, operation: str, rank: int, ranks: int, size: int, count: int) -> float:
    """Mean time of one operation in seconds, measured until all members have completed all operations."""
    once = prepared(perform, operation, rank, ranks, size)
    await perform("barrier")
    began_s = time.perf_counter()
    for _ in range(count):
        await once()
    await perform("barrier")
    return (time.perf_counter() - began_s) / count


async def main(rank: int, ranks: int, port: int, c10d_port: int, options: argparse.Namespace) -> None:
    store = TCPStore("127.0.0.1", c10d_port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    async with WorldManager(enable_monitor=False) if rank else options.manager as manager:
        calls: dict[str, Call] = {"c10d": with_c10d}
        for way in WAYS[1:]:
            await manager.initialize_world(way, rank, ranks, port=port, verify_collectives=way == "checked")
            calls[way] = partial(in_world, manager, way)
        for operation in options.operations:
            rows = []
            for size in options.sizes if operation != "barrier" else [0]:
                count = max(10, min(3000, int(options.seconds / (200e-6 * ranks + size * ranks / 1e9))))
                results: dict[str, list[float]] = {way: [] for way in options.ways}
                for _ in range(options.rounds):
                    for way in options.ways:
                        results[way].append(await measure(calls[way], operation, rank, ranks, size, count))
                medians = {way: statistics.median(values) for way, values in results.items()}
                first, *others = options.ways
                rows.append([size, *(f"{medians[way] * 1e6:.1f}" for way in options.ways)])
                rows[-1] += [f"{100 * (medians[way] / medians[first] - 1):+.1f} %" for way in others]
            if rank == 0:
                title = f"{operation} with {ranks} ranks: microseconds, medians of {options.rounds} rounds; loss against {first}"
                table(title, ("bytes", *options.ways, *(f"{way}: loss" for way in others)), rows)
        await manager.communicator.barrier("plain")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 26])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--operations", choices=OPERATIONS, nargs="+", default=["all_reduce"])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["c10d", "plain", "checked"])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn, about")
    chosen = parser.parse_args()
    for index, ranks in enumerate(chosen.ranks):
        manager = WorldManager(enable_monitor=False)
        port = manager.listen()
        c10d_port = 20000 + (os.getpid() + index) % 9000
        with started(main, range(1, ranks), ranks, port, c10d_port, chosen):
            run(main(0, ranks, port, c10d_port, argparse.Namespace(**vars(chosen), manager=manager)))
