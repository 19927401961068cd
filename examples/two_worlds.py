"""Shared by the examples of one operation: up to two worlds of three ranks, with a hundred steps in each by default.

The leader is rank 0 of both worlds; the other processes are in one world each. Each world has its own task, so the failure of one world
does not affect the other.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from multiworld import BrokenWorldException, WorldCommunicator, WorldError, WorldManager

WORLD_SIZE = 3
JOIN_TIMEOUT_S = 120.0
"""Seconds to wait for all ranks; long enough to start five processes by hand."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of one world.

    Attributes:
        device: device of the tensors of this world: the CPU for Gloo, a GPU for NCCL.
    """

    communicator: WorldCommunicator
    world_name: str
    rank: int
    device: torch.device

    def tensor(self, value: float) -> torch.Tensor:
        """Return float32 [3], filled with `value`."""
        return torch.full((3,), float(value), device=self.device)


Step = Callable[[Member, int], Awaitable[None]]
"""Runs one step: (member, number of the step, from 1)."""


def run(step: Step) -> None:
    """Run the ranks that the command line selects. Exits with 0 when a world finished all steps, with 1 when none did."""
    sys.exit(asyncio.run(_run_ranks(step, _parse_options())))


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all examples have."""
    parser.add_argument("--backend", default="gloo", help="gloo or nccl (default: %(default)s)")
    parser.add_argument("--addr", default="127.0.0.1", help="address of rank 0 (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=29500, help="port of rank 0, for all its worlds (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=100, help="number of steps (default: %(default)s)")
    parser.add_argument(
        "--step-pause-s", type=float, default=0.1, help="seconds to sleep after each step (default: %(default)s)"
    )


def place(text: str) -> tuple[int, int]:
    """Parse `INDEX,RANK`, an argparse type: index of the world, from 1, and the rank in it."""
    try:
        index, rank = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected INDEX,RANK, as in 1,0") from None
    if index < 1 or rank < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: worlds are numbered from 1 and ranks from 0")
    return index, rank


def device_of(backend: str, rank: int) -> torch.device:
    """Return the device of a rank: for NCCL a GPU, which several ranks share if there are not enough; otherwise the CPU."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--worldinfo",
        type=place,
        action="append",
        required=True,
        metavar="INDEX,RANK",
        help=f"rank 0 to {WORLD_SIZE - 1} of world INDEX; repeat it to be in two worlds",
    )
    add_network_options(parser)
    options = parser.parse_args()
    if any(rank >= WORLD_SIZE for _, rank in options.worldinfo):
        parser.error(f"--worldinfo: the ranks of a world of {WORLD_SIZE} are 0 to {WORLD_SIZE - 1}")
    return options


async def _run_ranks(step: Step, options: argparse.Namespace) -> int:
    # Long, because a member of a busy machine may have to wait for a core. A killed member is detected at once.
    async with WorldManager(heartbeat_timeout_s=10.0) as manager:
        worlds = [_in_world(manager, step, options, index, rank) for index, rank in options.worldinfo]
        finished = await asyncio.gather(*worlds)
    return 0 if any(finished) else 1


async def _in_world(manager: WorldManager, step: Step, options: argparse.Namespace, index: int, rank: int) -> bool:
    """Run all steps in one world. Returns whether all of them finished."""
    name, device = f"world{index}", device_of(options.backend, rank)
    member = Member(manager.communicator, name, rank, device)
    try:
        await manager.initialize_world(
            name, rank, WORLD_SIZE, options.backend, options.addr, options.port, JOIN_TIMEOUT_S, device
        )
        for number in range(1, options.steps + 1):
            await step(member, number)
            print(f"done with step: {number} ({name})")
            await asyncio.sleep(options.step_pause_s)
    except WorldError as error:
        print(f"caught an exception: {error}")
        return False
    print(f"{name}: finished all {options.steps} steps")
    with contextlib.suppress(BrokenWorldException):  # leave together; a faster member may have left already
        await manager.communicator.barrier(name)
    return True
