"""Shared by the examples of elastic worlds: a rendezvous, and members that take steps together and may be killed or join late."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable

import torch
from torch.distributed import ReduceOp

from examples.two_worlds import JOIN_TIMEOUT_S, add_network_options
from multiworld.elastic import ElasticError, ElasticManager, ElasticRendezvous, ElasticWorld

WORLD = "elastic"
MEMBERS = 4
POLL_S = 0.1
MIDDLE_S = 0.003
"""Seconds from the start of a step to about its middle, where the launcher kills the victim."""
SILENCE_S = 5.0
"""Heartbeat timeout in seconds. A killed member is detected at once; a silent one may only wait for a core of a busy machine."""

Step = Callable[[ElasticWorld, int, int], Awaitable[None]]
"""Runs one step: (world, number of this member, number of the step, from 1)."""


def run(step: Step) -> None:
    """Run the rendezvous or the member that the command line selects. Exits with 0 when all steps are done."""
    parser = parser_of_members()
    options = parser.parse_args()
    sys.exit(asyncio.run(hold(options) if options.number is None else take_part(step, options)))


def parser_of_members() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, choices=range(MEMBERS), help="be this member; without, the rendezvous")
    add_network_options(parser)
    return parser


async def hold(options: argparse.Namespace) -> int:
    """Run the rendezvous until the world has started and all members have left."""
    epoch = 0
    async with ElasticRendezvous(
        addr=options.addr, port=options.port, first_size=MEMBERS, heartbeat_timeout_s=SILENCE_S
    ) as rendezvous:
        while not epoch or rendezvous.connected(WORLD):
            view = rendezvous.view(WORLD)
            if view.epoch != epoch:
                epoch = view.epoch
                print(f"epoch {epoch} has {len(view.members)} members")
            await asyncio.sleep(POLL_S)
    print("everybody has gone")
    return 0


async def take_part(step: Step, options: argparse.Namespace) -> int:
    """Join the world and run the remaining steps with the current members. Returns the exit status."""
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)  # the members of an example share one machine
    async with ElasticManager(heartbeat_timeout_s=SILENCE_S) as elastic:
        try:
            world = await elastic.join(WORLD, options.addr, options.port, timeout_s=JOIN_TIMEOUT_S)
            print(f"joined epoch {world.epoch} as rank {world.rank} of {world.size}")
            number = 0
            while (number := await next_step(world, number)) <= options.steps:
                middle = asyncio.get_running_loop().call_later(MIDDLE_S, print, f"in the middle of step: {number} ")
                await step(world, options.number, number)
                middle.cancel()
                print(f"done with step: {number} ({world.size} members)")
                await asyncio.sleep(options.step_pause_s)
                await world.update_membership()  # between two steps: admits newcomers
        except ElasticError as error:
            print(f"is no member any more: {error}")
            return 1
    print(f"finished all {options.steps} steps")
    return 0


async def next_step(world: ElasticWorld, number: int) -> int:
    """Return the number of the next step. A newcomer learns it from the others."""
    furthest = torch.tensor([number])
    await world.all_reduce_with_retry(furthest, ReduceOp.MAX)
    return int(furthest) + 1
