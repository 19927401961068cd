"""Shared by the examples of elastic worlds: the rendezvous server, and members that run steps together and may be killed or join late."""

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
"""Seconds from the start of a step to about its middle, when the launcher kills a member."""
HEARTBEAT_TIMEOUT_S = 10.0
"""Long, because a member of a busy machine may have to wait for a core. A killed member is detected at once."""

Step = Callable[[ElasticWorld, int, int], Awaitable[None]]
"""Runs one step: (world, number of this member, number of the step, from 1)."""


def run(step: Step) -> None:
    """Run the rendezvous server or the member that the command line selects. Exits with 0 when all steps are done."""
    parser = member_parser()
    options = parser.parse_args()
    sys.exit(asyncio.run(run_rendezvous(options) if options.number is None else run_member(step, options)))


def member_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--number",
        type=int,
        choices=range(MEMBERS),
        help="number of this member; without it, run the rendezvous server",
    )
    add_network_options(parser)
    return parser


async def run_rendezvous(options: argparse.Namespace) -> int:
    """Run the rendezvous server until the world has started and all members have left."""
    number = 0
    async with ElasticRendezvous(
        addr=options.addr, port=options.port, initial_members=MEMBERS, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S
    ) as rendezvous:
        while not number or rendezvous.connected(WORLD):
            view = rendezvous.view(WORLD)
            if view.number != number:
                number = view.number
                print(f"view {number} has {len(view.members)} members")
            await asyncio.sleep(POLL_S)
    print("all members have left")
    return 0


async def run_member(step: Step, options: argparse.Namespace) -> int:
    """Join the world and run the remaining steps with the current members. Returns the exit status."""
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)  # the members of an example share one machine
    async with ElasticManager(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S) as elastic:
        try:
            world = await elastic.join(WORLD, options.addr, options.port, timeout_s=JOIN_TIMEOUT_S)
            print(f"joined view {world.view_number} as rank {world.rank} of {world.size}")
            number = 0
            while (number := await next_step(world, number)) <= options.steps:
                middle = asyncio.get_running_loop().call_later(MIDDLE_S, print, f"in the middle of step: {number} ")
                await step(world, options.number, number)
                middle.cancel()
                print(f"done with step: {number} ({world.size} members)")
                await asyncio.sleep(options.step_pause_s)
                await world.update_membership()  # between two steps: admits new members
        except ElasticError as error:
            print(f"no longer a member: {error}")
            return 1
    print(f"finished all {options.steps} steps")
    return 0


async def next_step(world: ElasticWorld, number: int) -> int:
    """Return the number of the next step. A new member learns it from the others."""
    furthest = torch.tensor([number])
    await world.all_reduce_with_retry(furthest, ReduceOp.MAX)
    return int(furthest) + 1
