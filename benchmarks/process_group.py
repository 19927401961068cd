"""A process group of the library beside one of Gloo: forming it, short sends and receives, and long all-reduces.

    python -m benchmarks.process_group
    python -m benchmarks.process_group --measures join send --ranks 2 --rounds 5
    MULTIWORLD_SHARED_MEMORY_BYTES=0 python -m benchmarks.process_group --measures all_reduce --ranks 4

Both groups are measured in turn in the same processes, through the functions of `torch.distributed`. `join` forms a group through the
store of the default group and performs its first all-reduce. `CPU` is the processor time of all members per operation.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import multiworld.process_group
from benchmarks.ranks import run, started, table

WAYS = ("gloo", multiworld.process_group.BACKEND)


def join(way: str, made: list[Any]) -> None:
    """Form a group of all members with `new_group`, and use it."""
    made.append(dist.new_group(backend=way))
    dist.all_reduce(torch.ones(1), group=made[-1])


def send(tensor: torch.Tensor, group: Any) -> None:
    """Send from rank 0 to rank 1 and back."""
    for receives in (dist.get_rank() == 1, dist.get_rank() == 0):
        if dist.get_rank() < 2:
            (dist.recv if receives else dist.send)(tensor, 1 - dist.get_rank(), group=group)


def all_reduce(tensor: torch.Tensor, group: Any) -> None:
    dist.all_reduce(tensor, group=group)


def timed(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Return the seconds of one call, and the processor seconds of all members for it."""
    dist.barrier()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    used = torch.tensor(time.process_time() - cpu_s, dtype=torch.float64)
    dist.barrier()
    took_s = time.perf_counter() - began_s
    dist.all_reduce(used)
    return took_s / count, float(used) / count


async def main(rank: int, ranks: int, port: int, options: argparse.Namespace) -> None:
    store = TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    groups = {way: dist.new_group(backend=way) for way in WAYS}
    made: list[Any] = []
    short, long = torch.zeros(options.short), torch.zeros(options.long // 4)
    calls: dict[str, tuple[Callable[[str], object], int]] = {
        "join": (lambda way: join(way, made), 5),
        "send": (lambda way: send(short, groups[way]), 300),
        "all_reduce": (lambda way: all_reduce(long, groups[way]), 3),
    }
    rows = []
    for measure in options.measures:
        call, count = calls[measure]
        results: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for turn in range(options.rounds + 1):
            for way in WAYS if turn % 2 else reversed(WAYS):
                result = timed(lambda: call(way), count)  # noqa: B023 - called at once
                results[way] += [result] if turn else []
                while made:
                    dist.destroy_process_group(made.pop())
        medians = {way: [statistics.median(each) for each in zip(*results[way], strict=True)] for way in WAYS}
        (wall, cpu), (our_wall, our_cpu) = (medians[way] for way in WAYS)
        times = [f"{1e6 * each:.1f}" for each in (wall, our_wall, cpu, our_cpu)]
        rows.append([measure, *times, f"{our_wall / wall:.2f}", f"{our_cpu / cpu:.2f}"])
    if rank == 0:
        title = f"{ranks} ranks: microseconds, medians of {options.rounds} rounds"
        table(title, ("", *WAYS, *(f"{way}: CPU" for way in WAYS), "ratio", "ratio of CPU"), rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = ("join", "send", "all_reduce")
    parser.add_argument("--measures", choices=measures, nargs="+", default=measures)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--short", type=int, default=256, help="elements of a sent tensor")
    parser.add_argument("--long", type=int, default=1 << 26, help="bytes of a reduced tensor")
    chosen = parser.parse_args()
    for index, ranks in enumerate(chosen.ranks):
        port = 20000 + (os.getpid() + index) % 9000
        with started(main, range(1, ranks), ranks, port, chosen):
            run(main(0, ranks, port, chosen))
