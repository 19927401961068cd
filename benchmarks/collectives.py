"""Time of an all-reduce through the library with 2 and 4 ranks, next to blocking c10d on the same machine.

    python -m benchmarks.collectives
    python -m benchmarks.collectives --sizes 1024 1048576 --ranks 2 --rounds 3 --seconds 0.2

The ways take turns within one run: `c10d` is `torch.distributed.all_reduce` on its one global Gloo group; `plain` and `checked` are
worlds of the two kinds.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from benchmarks.ranks import LOOPS, run, started, table
from multiworld import WorldManager

WAYS = ("c10d", "plain", "checked")


async def reduce_often(manager: WorldManager, way: str, size: int, count: int) -> float:
    """Median time of one all-reduce of float32, in seconds."""
    tensor, times = torch.zeros(size // 4), []
    for _ in range(count):
        began_s = time.perf_counter()
        if way == "c10d":
            dist.all_reduce(tensor)
        else:
            await manager.communicator.all_reduce(tensor, world_name=way)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


async def main(rank: int, ranks: int, port: int, c10d_port: int, options: argparse.Namespace) -> None:
    store = TCPStore("127.0.0.1", c10d_port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    async with WorldManager() if rank else options.manager as manager:
        for way in WAYS[1:]:
            await manager.initialize_world(way, rank, ranks, port=port, checked=way == "checked")
        rows = []
        for size in options.sizes:
            count = max(10, min(3000, int(options.seconds / (200e-6 * ranks + size * ranks / 1e9))))
            results: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(options.rounds):
                for way in WAYS:
                    await manager.communicator.barrier("plain")
                    results[way].append(await reduce_often(manager, way, size, count))
            medians = {way: statistics.median(values) for way, values in results.items()}
            rows.append([size, *(f"{medians[way] * 1e6:.1f}" for way in WAYS)])
            rows[-1] += [f"{100 * (medians[way] / medians['c10d'] - 1):+.1f} %" for way in WAYS[1:]]
        if rank == 0:
            title = (
                f"all_reduce with {ranks} ranks: microseconds, medians of {options.rounds} rounds; loss against c10d"
            )
            table(title, ("bytes", *WAYS, *(f"{way}: loss" for way in WAYS[1:])), rows)
        await manager.communicator.barrier("plain")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 26])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn, about")
    parser.add_argument("--loop", choices=LOOPS, default=LOOPS[0], help="event loop of all processes")
    chosen = parser.parse_args()
    for index, ranks in enumerate(chosen.ranks):
        manager = WorldManager()
        port = manager.listen()
        c10d_port = 20000 + (os.getpid() + index) % 9000
        with started(chosen.loop, main, range(1, ranks), ranks, port, c10d_port, chosen):
            run(chosen.loop, main(0, ranks, port, c10d_port, argparse.Namespace(**vars(chosen), manager=manager)))
