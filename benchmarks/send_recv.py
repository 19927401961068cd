"""Latency and throughput of send and recv of the library, compared to blocking c10d on the same machine.

    python -m benchmarks.send_recv
    python -m benchmarks.send_recv --sizes 1024 65536 --rounds 3 --seconds 0.2

The variants are measured in turn within one run. `c10d` is `torch.distributed.send` and `recv` with its global Gloo group. `plain` and
`checked` are worlds without and with verification; the tensor is copied. `in place` is a tensor that is made with `World.allocate` and
received as a view: only its headers are written. MULTIWORLD_SHARED_MEMORY_BYTES=0 measures all by TCP. One-way time is half of a round
trip. Throughput is measured with a stream of messages with four in flight, in one world and in several worlds at the same time.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from benchmarks.ranks import run, started, table
from multiworld import Operation, WorldManager

WAYS = ("c10d", "plain", "checked")
IN_PLACE = "in place"
_WINDOW = 4


async def ping_pong(manager: WorldManager, way: str, rank: int, size: int, count: int) -> float:
    """Median one-way time in seconds."""
    tensor, peer, here = torch.zeros(size, dtype=torch.uint8), 1 - rank, manager.communicator
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        for receives in (rank == 1, rank == 0):
            if way == "c10d":
                dist.recv(tensor, peer) if receives else dist.send(tensor, peer)
            elif receives:
                await here.recv(tensor, peer, way)
            else:
                await here.send(tensor, peer, way)
        times.append((time.perf_counter() - began_s) / 2)
    return statistics.median(times)


async def ping_pong_in_place(manager: WorldManager, rank: int, size: int, count: int) -> float:
    """Median one-way time in seconds of a tensor that no process copies, with its allocation and release."""
    peer, world = 1 - rank, manager.world("plain")
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        for receives in (rank == 1, rank == 0):
            if receives:
                view = await world.recv_view(lambda _header, _size_bytes: None, peer)
                del view
            else:
                await world.start_send_message(b"", manager.allocate((size,), torch.uint8), peer).finish()
        times.append((time.perf_counter() - began_s) / 2)
    return statistics.median(times)


async def stream(manager: WorldManager, worlds: list[str], rank: int, size: int, count: int) -> float:
    """Total bytes per second over all these worlds, from rank 0 to rank 1."""
    here = manager.communicator

    async def one(world: str) -> None:
        tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(_WINDOW)]
        if world == "c10d":
            post, works = dist.isend if rank == 0 else dist.irecv, deque[Any]()
            for number in range(count):
                if number >= _WINDOW:
                    works.popleft().wait()
                works.append(post(tensors[number % _WINDOW], 1 - rank))
            for work in works:
                work.wait()
            return
        start, operations = here.isend if rank == 0 else here.irecv, deque[Operation]()
        for number in range(count):
            if number >= _WINDOW:
                await operations.popleft()
            operations.append(start(tensors[number % _WINDOW], 1 - rank, world))
        for operation in operations:
            await operation

    began_s = time.perf_counter()
    await asyncio.gather(*(one(world) for world in worlds))
    return len(worlds) * count * size / (time.perf_counter() - began_s)


async def _in_turns(
    rounds: int, ways: Mapping[str, Callable[[], Awaitable[float]]], sync: Callable[[], Awaitable[None]]
) -> dict[str, float]:
    """Run the variants in turn; returns the median over the rounds for each variant."""
    results: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, turn in ways.items():
            await sync()
            results[way].append(await turn())
    return {way: statistics.median(values) for way, values in results.items()}


async def main(rank: int, port: int, c10d_port: int, options: argparse.Namespace) -> None:
    store = TCPStore("127.0.0.1", c10d_port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    async with WorldManager(enable_monitor=False) if rank else options.manager as manager:
        names = [f"plain{index}" for index in range(options.worlds)]
        for name in ("plain", *names):
            await manager.initialize_world(name, rank, 2, port=port, verify_collectives=False)
        await manager.initialize_world("checked", rank, 2, port=port, verify_collectives=True)

        async def sync() -> None:
            await manager.communicator.barrier("plain")

        latencies, throughputs = [], []
        for size in options.sizes:
            count = max(10, min(5000, int(options.seconds / (60e-6 + size / 1e9))))
            talks = {way: partial(ping_pong, manager, way, rank, size, count) for way in WAYS}
            talks[IN_PLACE] = partial(ping_pong_in_place, manager, rank, size, count)
            one_way = await _in_turns(options.rounds, talks, sync)
            sets = {**{way: [way] for way in WAYS}, f"{options.worlds} worlds": names}
            streams = {
                label: partial(stream, manager, worlds, rank, size, max(8, count // len(worlds)))
                for label, worlds in sets.items()
            }
            rate = await _in_turns(options.rounds, streams, sync)
            latencies.append([size, *(f"{one_way[way] * 1e6:.1f}" for way in (*WAYS, IN_PLACE))])
            latencies[-1] += [f"{one_way[way] / one_way['c10d']:.2f}" for way in (*WAYS[1:], IN_PLACE)]
            throughputs.append([size, *(f"{rate[label] / 1e6:.1f}" for label in sets)])
            throughputs[-1] += [f"{100 * (1 - rate[label] / rate['c10d']):+.1f} %" for label in list(sets)[1:]]
        if rank == 0:
            table(
                f"One-way time in microseconds, medians of {options.rounds} rounds",
                ("bytes", *WAYS, IN_PLACE, "plain / c10d", "checked / c10d", "in place / c10d"),
                latencies,
            )
            labels = (*WAYS, f"{options.worlds} worlds")
            table(
                f"Throughput in MB/s, medians of {options.rounds} rounds; loss against c10d",
                ("bytes", *labels, *(f"{label}: loss" for label in labels[1:])),
                throughputs,
            )
        await sync()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1 << 10, 1 << 13, 1 << 16, 1 << 20, 3 << 20, 6422528, 12 << 20, 1 << 26],
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn, about")
    parser.add_argument("--worlds", type=int, default=8, help="how many worlds stream at once")
    chosen = parser.parse_args()
    manager = WorldManager(enable_monitor=False)
    port = manager.listen()
    c10d_port = 20000 + os.getpid() % 9000
    with started(main, [1], port, c10d_port, chosen):
        run(main(0, port, c10d_port, argparse.Namespace(**vars(chosen), manager=manager)))
