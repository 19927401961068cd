"""Elastic all-reduce compared to `torch.distributed`, and the cost of a killed member.

    python -m benchmarks.elastic throughput            # 1 x 64 MB, 64 x 1 MB, 1000 x 16 KB at 2, 3 and 4 ranks
    python -m benchmarks.elastic kills --kills 50      # how much longer a call takes in which one of four is killed

The variants are measured within one run, in a different order each round; figures are medians over the rounds.
`one by one` and `async_op` are `torch.distributed.all_reduce` with its global Gloo group; `async_op` starts all operations, then waits.
`min_max` is `elastic` with one byte per element.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from benchmarks.ranks import context, run, start, started, table
from multiworld.collectives.quantization import Quantization
from multiworld.elastic import ElasticManager, ElasticRendezvous, ElasticWorld
from multiworld_serving.testing.load.measurement import quantile

CASES = {"1 x 64 MB": (1, 64 << 20), "64 x 1 MB": (64, 1 << 20), "1000 x 16 KB": (1000, 16 << 10)}
WAYS = ("one by one", "async_op", "elastic", "min_max")
SILENCE_S = 10.0
"""Heartbeat timeout in seconds. Long enough that slow scheduling on few cores is not a failure; kills are detected without it."""


def one_by_one(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)


def all_at_once(tensors: list[Tensor]) -> None:
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        assert work is not None
        work.wait()


async def reduce_all(world: ElasticWorld, way: str, tensors: list[Tensor]) -> float:
    """Reduce all tensors with one variant; returns seconds."""
    began_s = time.perf_counter()
    if way in ("elastic", "min_max"):
        quantization: Quantization | None = "min_max" if way == "min_max" else None
        assert (await world.all_reduce_multiple_with_retry(tensors, quantization=quantization)).success
    else:
        (one_by_one if way == "one by one" else all_at_once)(tensors)
    return time.perf_counter() - began_s


async def throughput(rank: int, ranks: int, port: int, c10d_port: int, options: argparse.Namespace) -> None:
    dist.init_process_group(
        "gloo", store=TCPStore("127.0.0.1", c10d_port, ranks, rank == 0), rank=rank, world_size=ranks
    )
    async with ElasticManager(heartbeat_timeout_s=SILENCE_S) as manager:
        world = await manager.join("w", port=port)
        rows = []
        for name, (count, size) in CASES.items():
            tensors = [torch.zeros(max(1, size // options.scale // 4)) for _ in range(count)]
            order, times = random.Random(1), {way: list[float]() for way in WAYS}  # the same order at all ranks
            for _ in range(options.rounds + 1):
                for way in order.sample(WAYS, len(WAYS)):
                    dist.barrier()
                    times[way].append(await reduce_all(world, way, tensors))
            medians = {way: statistics.median(values[1:]) for way, values in times.items()}
            better = min(medians["one by one"], medians["async_op"])
            rows.append([name, *(f"{medians[way] * 1e3:.2f}" for way in WAYS), f"{medians['elastic'] / better:.2f}"])
        if rank == 0:
            title = f"{ranks} ranks: milliseconds a call, medians of {options.rounds} rounds, sizes / {options.scale}"
            table(title, ("tensors", *WAYS, "elastic to the better"), rows)
        dist.barrier()
    dist.destroy_process_group()


async def reduce_until_told(_rank: int, port: int, reports: Connection, options: argparse.Namespace) -> None:
    """Call all-reduce in an endless loop. After each call, report seconds, retries and world size, and admit new members."""
    tensors = [torch.zeros(max(1, (1 << 20) // options.scale // 4)) for _ in range(16)]
    async with ElasticManager(heartbeat_timeout_s=SILENCE_S) as manager:
        world = await manager.join("w", port=port)
        while True:
            began_s = time.perf_counter()
            outcome = await world.all_reduce_multiple_with_retry(tensors)
            reports.send((time.perf_counter() - began_s, outcome.retries, outcome.world_size))
            await world.update_membership()


class Fleet:
    """The member processes and their reports."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self.members: dict[Connection, BaseProcess] = {}
        self._port = port
        self._options = options

    def add(self) -> None:
        ours, theirs = context().Pipe()
        self.members[ours] = start(reduce_until_told, 0, self._port, theirs, self._options)

    async def until(self, wanted: Callable[[float, int, int], bool]) -> tuple[float, int, int]:
        """Wait for the first report for which `wanted` returns true; other reports are dropped."""
        async with asyncio.timeout(60):
            while True:
                for reports in self.members:
                    while reports.poll():
                        said: tuple[float, int, int] = reports.recv()
                        if wanted(*said):
                            return said
                await asyncio.sleep(0.002)

    def kill(self, victim: Connection) -> None:
        process = self.members.pop(victim)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()


async def kills(options: argparse.Namespace) -> None:
    chance, size = random.Random(1), 4
    async with ElasticRendezvous(initial_members=size, heartbeat_timeout_s=SILENCE_S) as rendezvous:
        fleet = Fleet(rendezvous.port, options)
        for _ in range(size):
            fleet.add()
        lost_s: list[float] = []
        while len(lost_s) < options.kills:
            usual = [(await fleet.until(lambda _s, retries, now: now == size and not retries))[0] for _ in range(9)]
            await asyncio.sleep(chance.uniform(0, 0.1))
            fleet.kill(chance.choice(list(fleet.members)))
            took_s, retries, _ = await fleet.until(lambda _s, retries, now: bool(retries) or now == size - 1)
            if retries:  # without a retry, the kill was between two calls
                lost_s.append(took_s - statistics.median(usual))
            fleet.add()
        for member in list(fleet.members):
            fleet.kill(member)
    row = [
        len(lost_s),
        *(f"{each * 1e3:.0f}" for each in (statistics.median(lost_s), quantile(lost_s, 0.99), max(lost_s))),
    ]
    table("time lost to the kill of one of four, in ms", ("kills", "median", "p99", "most"), [row])


async def hold(ports: Connection, ranks: int) -> None:
    async with ElasticRendezvous(initial_members=ranks, heartbeat_timeout_s=SILENCE_S) as rendezvous:
        ports.send(rendezvous.port)
        await rendezvous.serve()


def compare(options: argparse.Namespace) -> None:
    for index, ranks in enumerate(options.ranks):
        ours, theirs = context().Pipe()
        holder = start(hold, theirs, ranks)
        port, c10d_port = ours.recv(), 20000 + (os.getpid() + index) % 9000
        try:
            with started(throughput, range(1, ranks), ranks, port, c10d_port, options):
                run(throughput(0, ranks, port, c10d_port, options))
        finally:
            holder.kill()
            holder.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("throughput", "kills"), default="throughput")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way (default: %(default)s)")
    parser.add_argument(
        "--scale", type=int, default=1, help="divide the sizes by this, to try it (default: %(default)s)"
    )
    parser.add_argument("--kills", type=int, default=50, help="how many (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.what == "kills":
        run(kills(chosen))
    else:
        compare(chosen)
