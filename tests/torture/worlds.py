"""Torture test of worlds: random memberships, operations and faults, with every result verified, until the time is up.

    python -m tests.torture.worlds --hours 2
    python -m tests.torture.worlds --seed 7 --round 42

Exit status: 0 if all checks passed, 1 at the first failure; the seed and the round that reproduce it are printed then.
They determine all random choices; the interleaving of operations and faults varies.
"""

import argparse
import asyncio
import itertools
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from multiworld import Cause
from tests.integration.members import Member, Spawn, members
from tests.torture.part import PATIENCE_S
from tests.torture.schedule import CAUSES, ENDING, PROCESSES, Fault, FaultKind, Round, plan_round

HEARTBEAT_TIMEOUT_S = 6.0
"""Heartbeat timeout: longer than the delays of a busy machine, and short enough for a test to wait for it."""
_ROUNDS_A_CHECK = 5
"""Interval of resource checks. The first check is the baseline: it includes what a process keeps, such as Gloo's device and caches."""
_GROWTH_KIB = 65_536
"""Memory fluctuation that is not a leak."""
_REPORT_EVERY_S = 30.0
_AFTERMATH_S = 3.0


class TortureError(AssertionError):
    """A check failed."""


@dataclass(slots=True)
class Tally:
    """Counts of a run."""

    rounds: int = 0
    verified: int = 0
    """Operations whose results were compared with the expected ones."""
    worlds: int = 0
    breaks: int = 0
    """Worlds that a fault ended, counted once per member that saw the end."""
    faults: Counter[FaultKind] = field(default_factory=Counter)

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.rounds} rounds, {self.worlds} worlds, {self.verified:,} operations verified, "
            f"{sum(self.faults.values())} faults ({faults}), {self.breaks} breaks seen"
        )


@dataclass(slots=True)
class _Process:
    """One of the processes over which the worlds are spread, and its resources after warm-up."""

    member: Member
    port: int
    rounds: int = 0
    held: dict[str, int] = field(default_factory=dict)


class Torture:
    """A run. Its processes live from round to round, except those that a fault ends."""

    def __init__(self, seed: int, spawn: Spawn) -> None:
        self.tally = Tally()
        self._seed = seed
        self._spawn = spawn
        self._processes: dict[int, _Process] = {}

    async def run_round(self, number: int) -> None:
        """Raises TortureError, which says how to reproduce it."""
        try:
            await self._run_round(number, plan_round(self._seed, number))
        except Exception as error:
            replay = f"python -m tests.torture.worlds --seed {self._seed} --round {number}"
            raise TortureError(f"{error}\n\nreplay:\n  {replay}") from error

    async def _run_round(self, number: int, plan: Round) -> None:
        for index in range(PROCESSES):
            if index not in self._processes:
                self._processes[index] = await self._start_process()
        ports = [self._processes[index].port for index in range(PROCESSES)]
        await self._tell_all(
            lambda index: self._member(index).start(
                "torture_join", seed=self._seed, number=number, process=index, ports=ports
            )
        )
        reports = await self._go_through(plan)
        self._check(plan, reports)
        for index, port in (await self._tell_all(lambda index: self._member(index).start("torture_end"))).items():
            self._processes[index].port = port
        for process in self._processes.values():
            await self._check_resources(process)
        self.tally.rounds += 1

    async def _start_process(self) -> _Process:
        member = await self._spawn()
        port = await member.do("torture_prepare", timeout_s=HEARTBEAT_TIMEOUT_S)
        return _Process(member, port)

    def _member(self, index: int) -> Member:
        return self._processes[index].member

    async def _tell_all(self, tell: Callable[[int], "asyncio.Task[Any]"]) -> dict[int, Any]:
        """Await the replies of all processes. Raises the errors of all that fail."""
        return await _gathered({index: tell(index) for index in self._processes})

    # -- faults of processes -----------------------------------------------------------------------------------------------------

    async def _go_through(self, plan: Round) -> dict[int, dict[str, Any]]:
        """Return the reports of all processes that are left."""
        ending = {fault.process: fault for fault in plan.faults if fault.kind in ENDING}
        stopped = {fault.process for fault in plan.faults if fault.kind == "stop"}
        paused = {fault.process for fault in plan.faults if fault.kind == "pause"}
        tasks = {index: self._member(index).start("torture_round") for index in self._processes}
        late = {index: tasks.pop(index) for index in stopped}
        doomed = [tasks.pop(index) for index in ending]
        seen = {
            -1 - index: asyncio.create_task(self._see_stopped(index, index in paused)) for index in stopped | paused
        }
        try:
            reports = await _gathered(tasks | seen)
            for fault in ending.values():
                await self._see_ended(fault)
        finally:
            for index in stopped:
                self._member(index).signal(signal.SIGCONT)
        reports |= await _gathered(late)
        await asyncio.gather(*doomed, return_exceptions=True)
        return {index: report for index, report in reports.items() if index >= 0}

    async def _see_stopped(self, index: int, wake: bool) -> None:
        await self._member(index).stopped()
        if wake:
            self._member(index).signal(signal.SIGCONT)

    async def _see_ended(self, fault: Fault) -> None:
        member = self._processes.pop(fault.process).member
        status, expected = await member.ended(), -signal.SIGKILL if fault.kind == "kill" else 0
        if status != expected:
            raise TortureError(f"{fault} ended its process with {status}: {member.complaints[-3000:]}")
        await member.dispose()

    # -- checks ------------------------------------------------------------------------------------------------------------------

    def _check(self, plan: Round, reports: dict[int, dict[str, Any]]) -> None:
        for fault in plan.faults:
            if fault.kind not in ENDING and fault.number not in reports[fault.process]["fired"]:
                raise TortureError(f"{fault} did not fire")
            self.tally.faults[fault.kind] += 1
        for world in plan.worlds:
            for rank, process in enumerate(world.members):
                if process in reports:
                    self._check_end(plan, world.name, rank, reports[process]["worlds"][world.name])
        self.tally.worlds += len(plan.worlds)
        self.tally.verified += sum(report["verified"] for report in reports.values())

    def _check_end(self, plan: Round, name: str, rank: int, outcome: dict[str, Any]) -> None:
        """Check that a member saw the world end as its faults require, or not at all without a fault."""
        world = plan.world(name)
        faults, ended = plan.faults_of(world), outcome["ended"]
        if ended is None:
            if plan.must_break(world):
                raise TortureError(f"rank {rank} of {world.name} did not see it end, despite {faults}")
            return
        self.tally.breaks += 1
        if not faults:
            raise TortureError(f"rank {rank} of {world.name} saw {ended[3]}, and no fault was in that world")
        victims = {world.members.index(fault.process) for fault in faults}
        kind, cause, culprit = ended[:3]
        if kind != "BrokenWorldException":
            closing = any(fault.kind in ("cleanup", "close", "leave") for fault in faults)
            if not closing or rank not in victims:
                raise TortureError(f"rank {rank} of {world.name} saw {ended[3]}, after {faults}")
            return
        causes = {cause for fault in faults for cause in CAUSES[fault.kind]}
        culprits = victims | {fault.peer for fault in faults if fault.kind in _OF_PEERS}
        if culprit == -1 and cause == Cause.TRANSPORT:
            culprits.add(-1)  # a collective may not know which connection failed
        if cause not in causes or (culprit not in culprits and "disagree" not in {fault.kind for fault in faults}):
            raise TortureError(f"rank {rank} of {world.name} saw {ended[3]}, after {faults}")

    async def _check_resources(self, process: _Process) -> None:
        """Check that threads, descriptors and memory are as after warm-up. A thread may need a moment to end."""
        process.rounds += 1
        if process.rounds % _ROUNDS_A_CHECK:
            return
        until_s = time.monotonic() + PATIENCE_S
        while True:
            held = await process.member.do("torture_resources")
            before = process.held or held
            grown = [name for name in ("threads", "fds") if held[name] > before[name]]
            if not grown or time.monotonic() > until_s:
                break
            await asyncio.sleep(0.05)
        if grown or held["memory_kib"] > before["memory_kib"] + _GROWTH_KIB:
            raise TortureError(
                f"process {process.member.pid} held {before} and holds {held} after {process.rounds} rounds"
            )
        process.held = before


_OF_PEERS: tuple[FaultKind, ...] = ("cut", "lose", "timeout", "mismatch")
"""Either end may be reported as the failed one."""


async def _gathered(tasks: "dict[int, asyncio.Task[Any]]") -> dict[int, Any]:
    """The results of all of these. Raises the errors of all that fail."""
    if not tasks:
        return {}
    _, late = await asyncio.wait(tasks.values(), timeout=4 * PATIENCE_S, return_when=asyncio.FIRST_EXCEPTION)
    if failed := any(task.done() and task.exception() for task in tasks.values()):
        await asyncio.wait(tasks.values(), timeout=_AFTERMATH_S)  # others may have further errors
    errors = [
        f"process {index}: {error}" for index, task in tasks.items() if task.done() and (error := task.exception())
    ]
    errors += [f"process {index} does not answer" for index, task in tasks.items() if task in late and not failed]
    if errors:
        raise TortureError("\n".join(errors))
    return {index: task.result() for index, task in tasks.items()}


async def run(seed: int, rounds: Iterable[int], *, lasts_s: float, say: Callable[[str], object]) -> Tally:
    """Run these rounds until the time is up. Raises TortureError at the first failure."""
    told_s = time.monotonic()
    until_s = told_s + lasts_s
    with tempfile.TemporaryDirectory() as folder:
        async with members(Path(folder)) as spawn:
            running = Torture(seed, spawn)
            for number in rounds:
                if time.monotonic() >= until_s:
                    break
                await running.run_round(number)
                if time.monotonic() - told_s >= _REPORT_EVERY_S:
                    told_s = time.monotonic()
                    say(f"{until_s - told_s:.0f} s left: {running.tally}")
            return running.tally


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.worlds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="a fresh one unless given")
    parser.add_argument("--hours", type=float, default=1.0, help="how long rounds are run")
    parser.add_argument("--round", type=int, help="run only this round")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(2**40) if options.seed is None else options.seed
    say = partial(print, flush=True)
    say(f"torture of worlds, seed {seed}")
    try:
        rounds = itertools.count() if options.round is None else [options.round]
        tally = asyncio.run(run(seed, rounds, lasts_s=options.hours * 3600, say=say))
    except TortureError as error:
        say(f"FAILED: {error}")
        return 1
    say(f"{tally}; nothing was wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
