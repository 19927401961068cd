"""Time until the other member detects a killed or frozen member, and the effect on another world.

    python -m benchmarks.detection
    python -m benchmarks.detection --repeats 10 --faults kill

For each fault and each state of the surviving member: milliseconds from the signal to the `broken` event of the world, and to the error of
the pending operation. A second world with a healthy member exchanges messages meanwhile. Its longest interval between two rounds is
reported for the time of the fault (at least 0.5 s) and for 0.5 s without a fault.
"""

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator

import torch

from benchmarks.ranks import run, start, table
from multiworld import BrokenWorldException, WorldEvent, WorldManager
from multiworld_serving.testing.load.measurement import quantile

STATES = ("idle", "in recv", "in all_reduce")
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_FORMING_S = 60


async def victim(port: int, name: str) -> None:
    async with WorldManager() as manager:
        await manager.initialize_world(name, 1, 2, port=port, timeout=_FORMING_S)
        await asyncio.Event().wait()


async def neighbour(port: int) -> None:
    """The other member of the second world: return each message until the world breaks."""
    async with WorldManager() as manager:
        await manager.initialize_world("neighbour", 1, 2, port=port, timeout=_FORMING_S)
        tensor = torch.zeros(256)
        try:
            while True:
                await manager.communicator.recv(tensor, 0, "neighbour")
                await manager.communicator.send(tensor, 0, "neighbour")
        except BrokenWorldException:
            return


class Pauses:
    """Exchanges messages with the `neighbour` process and records the time of each round."""

    def __init__(self, manager: WorldManager) -> None:
        self._manager = manager
        self._ends_s = [time.monotonic()]

    async def play(self) -> None:
        tensor, here = torch.zeros(256), self._manager.communicator
        while True:
            await here.send(tensor, 1, "neighbour")
            await here.recv(tensor, 1, "neighbour")
            self._ends_s.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def longest_ms(self, since_s: float, length_s: float) -> float:
        """The longest interval between two rounds in the given span, in milliseconds. Waits until the span is over."""
        await asyncio.sleep(max(0.0, since_s + length_s - time.monotonic()) + 0.01)
        ends_s = [at_s for at_s in self._ends_s if since_s - 0.1 <= at_s <= since_s + length_s]
        self._ends_s = ends_s[-10:]
        return max((b - a for a, b in itertools.pairwise(ends_s)), default=0.0) * 1e3


async def broken_event(events: AsyncIterator[WorldEvent], name: str) -> WorldEvent:
    async for event in events:
        if event.world_name == name and event.kind == "broken":
            return event
    raise AssertionError("the manager was closed")


async def one_fault(
    manager: WorldManager, port: int, pauses: Pauses, number: int, state: str, signum: signal.Signals
) -> tuple[float, float, float, str]:
    """Milliseconds to the event and to the error, longest interval in the second world in milliseconds, and the cause."""
    name, here = f"world{number}", manager.communicator
    process = start(victim, port, name)
    await manager.initialize_world(name, 0, 2, port=port, timeout=_FORMING_S)
    events = manager.events()
    pending: asyncio.Task[None] | None = None
    if state != "idle":
        tensor = torch.zeros(256)
        pending = asyncio.create_task(
            here.recv(tensor, 1, name) if state == "in recv" else here.all_reduce(tensor, world_name=name)
        )
    await asyncio.sleep(0.3)
    assert process.pid is not None
    struck_s = time.monotonic()
    os.kill(process.pid, signum)
    event = await broken_event(events, name)
    raised_s = event.at_s
    if pending is not None:
        await asyncio.wait([pending])
        raised_s = time.monotonic()
        assert isinstance(pending.exception(), BrokenWorldException)
    pause_ms = await pauses.longest_ms(struck_s, max(0.5, raised_s - struck_s + 0.2))
    process.kill()
    await asyncio.to_thread(process.join)
    await manager.close_world(name)
    return (event.at_s - struck_s) * 1e3, (raised_s - struck_s) * 1e3, pause_ms, str(event.cause)


async def main(options: argparse.Namespace) -> None:
    rows, number = [], 0
    async with WorldManager() as manager:
        port = manager.listen()
        beside = start(neighbour, port)
        await manager.initialize_world("neighbour", 0, 2, port=port, timeout=_FORMING_S)
        pauses = Pauses(manager)
        playing = asyncio.create_task(pauses.play())
        await asyncio.sleep(0.5)
        quiet = [await pauses.longest_ms(time.monotonic(), 0.5) for _ in range(options.repeats)]
        for fault in options.faults:
            for state in options.states:
                known, raised, felt, causes = [], [], [], set()
                for _ in range(options.repeats):
                    number += 1
                    outcome = await one_fault(manager, port, pauses, number, state, FAULTS[fault])
                    known.append(outcome[0])
                    raised.append(outcome[1])
                    felt.append(outcome[2])
                    causes.add(outcome[3])
                rows.append(
                    [
                        fault,
                        state,
                        ", ".join(sorted(causes)),
                        *(f"{value:.1f}" for value in (statistics.median(known), quantile(known, 0.99), max(known))),
                        f"{statistics.median(raised):.1f}" if state != "idle" else "",
                        f"{statistics.median(felt):.1f}",
                        f"{max(felt):.1f}",
                    ]
                )
        playing.cancel()
        beside.kill()
    columns = ("fault", "state", "cause", "median", "p99", "max", "operation raised", "pause: median", "pause: max")
    table(f"Milliseconds from the signal to `broken`, {options.repeats} repeats", columns, rows)
    print(
        f"\nLongest pause of the neighbour when nothing happens: median {statistics.median(quiet):.1f}, max {max(quiet):.1f} ms."
    )
    print("pymultiworld 0.2.3 needs 2.9 to 5.8 s for either fault (its watchdog compares counters every 3 s).")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    chosen = parser.parse_args()
    run(main(chosen))
