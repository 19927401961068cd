"""Cost of a stage boundary: time and CPU time of one hop from leader to worker and back, by tensor size.

    python -m benchmarks.hop --bytes 150528 1605632 6422528

Two processes in one world exchange the messages of the service; the worker returns each tensor. CPU time is the sum of both processes per
round trip.
"""

import argparse
import asyncio
import multiprocessing as mp
import resource
import statistics
import time

import torch

from benchmarks.ranks import run, started
from multiworld import World, WorldManager
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.message import Message, MessageKind


def _anything(_: Message) -> None:
    """Accept every header."""


async def _world(manager: WorldManager, rank: int, port: int) -> World:
    if rank == 0:
        manager.listen("127.0.0.1", port)
    return await manager.initialize_world("hop", rank, 2, addr="127.0.0.1", port=port, timeout=60.0)


async def worker(rank: int, port: int, sizes: list[int], exchanges: int, report: "mp.SimpleQueue[float]") -> None:
    """Return every batch to the leader. After the last batch of each size, report the CPU time in seconds."""
    async with WorldManager(secret=b"benchmark", verify_collectives=False) as manager:
        world = await _world(manager, rank, port)
        channel = Channel(world, 0, _anything)
        began_s = _cpu_s()
        while (message := await channel.receive()).kind is MessageKind.BATCH:
            await channel.send(Message(MessageKind.RESULT, message.batch, message.payload))
            if message.batch == 0:
                began_s = _cpu_s()
            if message.stage:
                report.put(_cpu_s() - began_s)
                began_s = _cpu_s()
        await asyncio.sleep(0.1)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def leader(port: int, sizes: list[int], exchanges: int, report: "mp.SimpleQueue[float]") -> None:
    async with WorldManager(secret=b"benchmark", verify_collectives=False) as manager:
        world = await _world(manager, 0, port)
        channel = Channel(world, 1, _anything)
        print(f"{'KiB':>9} {'median ms':>10} {'least ms':>9} {'CPU ms':>8}")
        for size in sizes:
            payload = torch.zeros(size, dtype=torch.uint8)
            times_s: list[float] = []
            for number in range(exchanges + 1):
                if number == 1:
                    began_s = _cpu_s()
                started_s = time.perf_counter()
                last = number == exchanges
                await channel.send(Message(MessageKind.BATCH, number, payload, stage=int(last)))
                await channel.receive()
                times_s.append(time.perf_counter() - started_s)
            cpu_s = _cpu_s() - began_s + report.get()
            times_s = times_s[1:]
            print(
                f"{size / 1024:>9.0f} {1e3 * statistics.median(times_s):>10.3f} {1e3 * min(times_s):>9.3f} "
                f"{1e3 * cpu_s / exchanges:>8.3f}",
                flush=True,
            )
        await channel.send(Message(MessageKind.LEAVING))
        await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4_000, 150_528, 802_816, 1_204_224, 6_422_528])
    parser.add_argument("--exchanges", type=int, default=100)
    options = parser.parse_args()
    from benchmarks.servers import free_port  # noqa: PLC0415 - imports httpx, which the ranks do not need

    port = free_port()
    report: mp.SimpleQueue[float] = mp.get_context("forkserver").SimpleQueue()
    with started(worker, [1], port, options.bytes, options.exchanges, report):
        run(leader(port, options.bytes, options.exchanges, report))


if __name__ == "__main__":
    main()
