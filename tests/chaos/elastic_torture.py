"""Torture test of an elastic world: random calls, faults and newcomers from a seed, with every result verified.

    python -m tests.chaos.elastic_torture --seed 17 --duration 30m

Exits with status 1 at the first wrong result and prints the seed, which reproduces the schedule of calls and faults. Checked are: all
members without a fault finish every call with the same bits, which a local model explains by the contributors; lost members
keep their tensors and get an error; nothing waits forever; and the members' threads, descriptors and memory do not grow.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multiworld.errors import MultiWorldError
from tests.chaos.elastic_model import explains, operand, sets_of_participants
from tests.chaos.elastic_schedule import INITIAL_MEMBERS, Call, Schedule, Step
from tests.integration.members import Member, Spawn, members
from tests.torture.worlds import seconds

WORLD = "w"
PULSE_S = 4.0
"""Heartbeat timeout of the members: longer than the delays of a busy machine."""
PATIENCE_S = 5.0
STEP_S = 90.0
"""Time limit of a step, including its faults."""
CHECK_RESOURCES_EVERY = 20
_SETTLE_S = 30.0
_SLACK = {"threads": 6, "fds": 8}
_SLACK_KIB = 128 * 1024
_OLD = 30
"""Calls after which a member's memory is recorded as the baseline."""


class WrongError(Exception):
    """A check failed."""


class Torture:
    """One elastic world with its members and its rendezvous server, in separate processes.

    Args:
        folder: for the rendezvous server's state, results and the members' stderr.
    """

    def __init__(self, seed: int, spawn: Spawn, folder: Path) -> None:
        self.happened: Counter[str] = Counter()
        self._schedule = Schedule(seed)
        self._spawn = spawn
        self._folder = folder
        self._members: dict[int, Member] = {}
        self._ids: dict[int, str] = {}
        self._calls: Counter[int] = Counter()
        self._memory_kib: dict[int, int] = {}
        self._operands: dict[tuple[int, int], Tensor] = {}
        self._ranges: dict[tuple[int, str], tuple[float, float]] = {}
        self._least: dict[tuple[int, str], int] = {}
        self._host: Member | None = None
        self._port = 0

    async def run(self, duration_s: float) -> None:
        """Raises WrongError."""
        until_s = time.monotonic() + duration_s
        await self._begin()
        while time.monotonic() < until_s:
            step = self._schedule.next()
            taking = asyncio.create_task(self._take(step))
            await asyncio.wait((taking,), timeout=STEP_S)
            try:
                if not taking.done():
                    raise WrongError(f"not done after {STEP_S:g} s")
                await taking
            except Exception as error:
                told = f"step {step.number}: {error!r}\n  in {step}\n{self._complaints()}\n{await self._waits()}"
                taking.cancel()  # not earlier: it cancels the members' calls, whose stacks are in `_waits`
                await asyncio.wait((taking,))
                raise WrongError(told) from error

    # -- processes ---------------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        await self._start_rendezvous()
        joining = [await self._newcomer(number) for number in self._schedule.members]
        await asyncio.gather(*joining)
        await self._agree(self._schedule.members)

    async def _start_rendezvous(self) -> None:
        self._host = await self._spawn()
        self._port = await self._host.do(
            "torture_host",
            state_file=str(self._folder / "state"),
            port=self._port,
            initial_members=INITIAL_MEMBERS,
            regroup_timeout_s=PATIENCE_S,
            heartbeat_timeout_s=PULSE_S,
        )

    async def _newcomer(self, number: int) -> asyncio.Task[Any]:
        member = self._members[number] = await self._spawn()
        await member.do("torture_configure", world=WORLD, heartbeat_timeout_s=PULSE_S)
        return member.start("elastic_join", world=WORLD, port=self._port, timeout_s=STEP_S)

    async def _part_with(self, number: int) -> None:
        await self._members.pop(number).dispose()
        for each in (self._ids, self._calls, self._memory_kib):
            each.pop(number, None)

    def _complaints(self) -> str:
        return "\n".join(
            f"-- {name} wrote:\n{member.complaints[-3000:]}"
            for name, member in [("the rendezvous", self._host), *self._members.items()]
            if member is not None and member.complaints
        )

    async def _waits(self) -> str:
        """The stacks of all members that still respond."""
        told = []
        for name, member in [("the rendezvous", self._host), *self._members.items()]:
            assert member is not None
            commands = [("torture_view", "world")] if member is self._host else [("elastic_state", "world")]
            for command, *names in [*commands, ("torture_waits",)]:
                try:
                    async with asyncio.timeout(2.0):
                        reply = await member.start(command, **dict.fromkeys(names, WORLD))
                except (TimeoutError, MultiWorldError, EOFError, RuntimeError) as error:
                    reply = repr(error)[:300]
                told.append(f"-- {name}: " + ("\n   ".join(reply) if isinstance(reply, list) else str(reply)))
        return "\n".join(told)

    # -- steps ---------------------------------------------------------------------------------------------------------------------

    async def _take(self, step: Step) -> None:
        for fault in step.faults:
            self.happened[fault.kind] += 1
        joining = [await self._newcomer(number) for number in step.newcomers]
        if step.doomed:
            await self._newcomer(step.doomed)
        await self._until_view("waiting", len(step.newcomers) + bool(step.doomed))
        calls = self._start_calls(step)
        if step.doomed:
            self.happened["doomed newcomer"] += 1
            self._members[step.doomed].kill()
        if step.restart_after_s is not None:
            self.happened["rendezvous restarted"] += 1
            await asyncio.sleep(step.restart_after_s)
            await self._restart_rendezvous()
        staying = [number for number in step.members if number not in step.lost]
        replies = dict(zip(staying, await asyncio.gather(*(calls[number] for number in staying)), strict=True))
        self._check_errors(step, replies)
        await asyncio.gather(*joining)
        await self._agree(step.members_after)
        replies |= await self._end_lost(step, calls)
        self._check_errors(step, replies)
        if step.call is not None:
            self._check_results(step, step.call, replies)
        for number in (*step.lost, *((step.doomed,) if step.doomed else ())):
            await self._part_with(number)
        self._calls.update(step.members_after)
        self.happened["update" if step.call is None else "all-reduce"] += 1
        if step.number % CHECK_RESOURCES_EVERY == 0:
            await self._check_resources()

    def _start_calls(self, step: Step) -> dict[int, asyncio.Task[Any]]:
        faults = {fault.victim: asdict(fault) for fault in step.faults}
        if step.call is None:
            return {
                number: self._members[number].start("torture_update", fault=faults.get(number))
                for number in step.members
            }
        call = asdict(step.call)
        return {
            number: self._members[number].start(
                "torture_reduce", member=number, call=call, results=str(self._results(number)), fault=faults.get(number)
            )
            for number in step.members
        }

    async def _restart_rendezvous(self) -> None:
        assert self._host is not None
        host = self._host
        host.kill()
        await host.ended()
        await host.dispose()
        await self._start_rendezvous()

    async def _end_lost(self, step: Step, calls: dict[int, asyncio.Task[Any]]) -> dict[int, Any]:
        """The results of the calls of lost members that were not killed."""
        replies = {}
        for fault in step.faults:
            victim = self._members[fault.victim]
            if fault.kind == "kill":
                if await victim.ended() != -signal.SIGKILL:
                    raise WrongError(f"member {fault.victim} ended by itself")
                calls[fault.victim].cancel()
            elif fault.victim in step.lost:
                if fault.kind == "freeze":
                    victim.signal(signal.SIGCONT)
                replies[fault.victim] = await calls[fault.victim]
        return replies

    # -- checks --------------------------------------------------------------------------------------------------------------------

    async def _agree(self, numbers: tuple[int, ...]) -> None:
        """Wait until the members and the rendezvous server report exactly these members in one view."""
        for number in numbers:
            if number not in self._ids:
                self._ids[number] = (await self._members[number].do("elastic_state", world=WORLD))["id"]
        while True:
            states = [await self._members[number].do("elastic_state", world=WORLD) for number in numbers]
            if {state["size"] for state in states} == {len(numbers)} and len({state["view"] for state in states}) == 1:
                break
            await asyncio.sleep(0.01)
        await self._until_view("members", sorted(self._ids[number] for number in numbers))
        await self._until_view("connected", len(numbers))

    async def _until_view(self, what: str, wanted: object) -> None:
        assert self._host is not None
        while (await self._host.do("torture_view", world=WORLD))[what] != wanted:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)

    def _check_errors(self, step: Step, replies: dict[int, Any]) -> None:
        for number, reply in replies.items():
            if "error" in reply and number not in step.lost:
                raise WrongError(f"member {number}, to which nothing happened: {reply}")
            if "error" in reply and reply["error"] not in (
                "EvictedError", "RendezvousError", "ViewChangeError", "ElasticError", "CancelledError",
            ):  # fmt: skip
                raise WrongError(f"member {number} was not told that it is out: {reply}")

    def _check_results(self, step: Step, call: Call, replies: dict[int, Any]) -> None:
        self._operands, self._ranges = {}, {}
        held = {number: _read(call, self._results(number)) for number in replies}
        for number, reply in replies.items():
            self.happened["retries"] += reply.get("retries", 0)
            if reply.get("success") is False and len(step.members_after) > 1:
                raise WrongError(f"member {number} believes itself alone: {reply}")
            if reply.get("success") and 0 in reply["contributors"]:
                raise WrongError(f"member {number} has no result: {reply}")
        sizes = {tuple(reply["contributors"]) for reply in replies.values() if "contributors" in reply}
        if len(sizes) > 1:
            raise WrongError(f"members differ in who took part: {sizes}")
        contributors = sizes.pop() if sizes else (0,) * len(call.tensors)
        for index in range(len(call.tensors)):
            present = {number for number in replies if "contributors" in replies[number] and contributors[index]}
            for number in replies.keys() - present:
                if not _same(held[number][index], self._operand(call, number, index)):
                    raise WrongError(f"member {number} has no result, and tensor {index} does not hold what it held")
            if present:
                results = {number: held[number][index] for number in present}
                self._check_tensor(step, call, index, contributors[index], results)

    def _check_tensor(self, step: Step, call: Call, index: int, size: int, results: dict[int, Tensor]) -> None:
        self.happened["tensors verified"] += 1
        first = next(iter(results.values()))
        if not all(_same(first, each) for each in results.values()):
            raise WrongError(f"the members {sorted(results)} differ in tensor {index}")
        if not len(results) <= size <= len(step.members):
            raise WrongError(f"tensor {index}: {size} took part, of {step.members}")
        if not first.numel():
            return
        for participants in sets_of_participants(step.members, set(results), size):
            operands = [self._operand(call, number, index) for number in participants]
            if explains(first, operands, call.op):
                return
        raise WrongError(f"tensor {index} is no result of {size} of {step.members}: {first}")

    def _operand(self, call: Call, number: int, index: int) -> Tensor:
        if (number, index) not in self._operands:
            dtype, count = call.tensors[index]
            made = operand(call.key, number, index, dtype, count, call.op)
            self._operands[number, index] = made
        return self._operands[number, index]

    async def _check_resources(self) -> None:
        """Threads and descriptors return to what worlds of this size used before; memory does not grow."""
        size = len(self._members)
        for number, member in self._members.items():
            async with asyncio.timeout(_SETTLE_S):
                while over := self._over(size, used := await member.do("resources")):
                    await asyncio.sleep(0.2)
                    self.happened[f"waits for {over}"] += 1
            if self._calls[number] >= _OLD:
                least = self._memory_kib.setdefault(number, used["rss_kib"])
                if used["rss_kib"] > least + _SLACK_KIB:
                    raise WrongError(f"member {number}: memory grew from {least} to {used['rss_kib']} KiB")

    def _over(self, size: int, used: dict[str, int]) -> str:
        for what, slack in _SLACK.items():
            least = self._least[size, what] = min(used[what], self._least.get((size, what), used[what]))
            if used[what] > least + slack:
                return what
        return ""

    def _results(self, number: int) -> Path:
        return self._folder / f"results-{number}"


def _read(call: Call, path: Path) -> list[Tensor]:
    """The tensors of a call at its end."""
    data = bytearray(path.read_bytes())
    tensors, at = [], 0
    for name, count in call.tensors:
        dtype: torch.dtype = getattr(torch, name)
        tensors.append(
            torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize, offset=at).clone().view(dtype)
            if count
            else torch.empty(0, dtype=dtype)
        )
        at += count * dtype.itemsize
    if at != len(data):
        raise WrongError(f"{path} has {len(data)} bytes, expected {at}")
    return tensors


def _same(one: Tensor, other: Tensor) -> bool:
    return not one.numel() or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


async def torture(seed: int, duration_s: float) -> Counter[str]:
    """Returns counts of what happened. Raises WrongError."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="elastic-torture-") as name:
        folder = Path(name)
        async with members(folder) as spawn:
            tortured = Torture(seed, spawn, folder)
            await tortured.run(duration_s)
            return tortured.happened


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.elastic_torture", description="Torture an elastic world, and verify every result."
    )
    parser.add_argument("--seed", type=int, help="of the schedule (default: a random one)")
    parser.add_argument("--duration", type=seconds, default=60.0, help="such as 60s, 30m or 2h (default: 60s)")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    began_s = time.monotonic()
    print(f"elastic worlds, seed {seed}", flush=True)
    try:
        happened = asyncio.run(torture(seed, options.duration))
    except WrongError as error:
        print(
            f"{error}\nFAILED after {time.monotonic() - began_s:.0f} s; again: {parser.prog} --seed {seed}",
            file=sys.stderr,
        )
        return 1
    print(
        f"seed {seed}, {time.monotonic() - began_s:.0f} s:",
        ", ".join(f"{n} {what}" for what, n in sorted(happened.items())),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
