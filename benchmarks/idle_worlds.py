"""Cost of being in many worlds: time to join one, memory, descriptors and threads per world, and CPU time while idle.

    python -m benchmarks.idle_worlds
    python -m benchmarks.idle_worlds --worlds 5 20 --seconds 2

Two processes are members of every world; the figures are those of rank 0, which hosts the worlds.
"""

import argparse
import asyncio
import os
import threading
import time
from pathlib import Path

import torch

from benchmarks.ranks import run, started, table
from multiworld import WorldManager


def _rss_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def _enter(manager: WorldManager, rank: int, port: int, first: int, last: int) -> None:
    for number in range(first, last):
        await manager.initialize_world(f"world{number}", rank, 2, port=port, timeout=60)


async def guest(rank: int, port: int, counts: list[int]) -> None:
    async with WorldManager() as manager:
        await _enter(manager, rank, port, 0, max(counts))
        await manager.communicator.recv(torch.zeros(1), 0, "world0")


async def main(counts: list[int], seconds: float, manager: WorldManager, port: int) -> None:
    async with manager:
        await _enter(manager, 0, port, 0, 1)  # exclude the one-time cost of the first world
        base = _rss_kib(), _fds(), threading.active_count(), 1
        rows = []
        for count in sorted(counts):
            entered, began_s = len(manager.worlds), time.perf_counter()
            await _enter(manager, 0, port, entered, count)
            took_s = (time.perf_counter() - began_s) / max(1, count - entered)
            await asyncio.sleep(1.0)
            cpu_s, began_s = time.process_time(), time.perf_counter()
            await asyncio.sleep(seconds)
            share = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
            more = max(1, count - base[3])
            rows.append(
                [
                    count,
                    f"{took_s * 1e3:.2f}",
                    f"{(_rss_kib() - base[0]) / more:.0f}",
                    f"{(_fds() - base[1]) / more:.2f}",
                    f"{(threading.active_count() - base[2]) / more:.2f}",
                    f"{share * 100:.2f} %",
                    f"{share * 100 / count:.3f} %",
                ]
            )
        columns = (
            "worlds",
            "ms to enter one",
            "KiB a world",
            "fds a world",
            "Python threads a world",
            "CPU idle",
            "CPU a world",
        )
        table(f"Worlds of 2, idle for {seconds:g} s, heartbeats every 0.2 s", columns, rows)
        await manager.communicator.send(torch.zeros(1), 1, "world0")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 10, 50, 200])
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="how long to watch each number of worlds doing nothing"
    )
    chosen = parser.parse_args()
    host = WorldManager()
    host_port = host.listen()
    with started(guest, [1], host_port, chosen.worlds):
        run(main(chosen.worlds, chosen.seconds, host, host_port))
