"""A process that answers fetches with lies: python -m tests.integration.lying_producer. Prints {lie: port} and runs until its input ends.

Each lie has a port of its own, so that it has its own shared memory. The token is SECRET.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable

import torch

from multiworld import World, WorldManager
from multiworld.ops.messages import send_message
from multiworld_serving.common.wire import WORLD_BACKEND, Channel, JoinOffer, Message, MessageKind

SECRET = "a-secret-of-this-test"
SHAPE = (4, 1 << 16)
"""Of float32: 1 MiB, which goes through shared memory."""


async def _send(world: World, message: Message, claimed_bytes: int | None = None) -> None:
    plan = send_message(world.ranks, message.header(), message.payload, 1, 0)
    if claimed_bytes is not None:
        plan.size_bytes = claimed_bytes
    await world.start(plan)


def _answer(
    kind: MessageKind, payload: torch.Tensor | None, number: int = 1
) -> Callable[[WorldManager, World], Awaitable[None]]:
    return lambda _manager, world: _send(world, Message(kind, number, payload))


async def _claims_more(_manager: WorldManager, world: World) -> None:
    header = Message(MessageKind.ROWS, 1, torch.empty(1 << 12, 1 << 16, device="meta")).header()
    await world.start(send_message(world.ranks, header, torch.zeros(SHAPE), 1, 0))


async def _segment_is_too_short(manager: WorldManager, world: World) -> None:
    pool = manager._segments
    assert pool is not None
    tensor = manager.allocate(SHAPE, torch.float32)
    segment = pool.find(tensor)
    assert segment is not None
    pool.find = lambda _: (segment[0], 1 << 40)  # type: ignore[method-assign, assignment]
    await _send(world, Message(MessageKind.ROWS, 1, tensor))


async def _segment_can_shrink(manager: WorldManager, world: World) -> None:
    await _with_descriptor(manager, world, os.memfd_create("hostile", os.MFD_ALLOW_SEALING))


async def _segment_is_a_pipe(manager: WorldManager, world: World) -> None:
    await _with_descriptor(manager, world, os.pipe()[0])


async def _with_descriptor(manager: WorldManager, world: World, fd: int) -> None:
    pool = manager._segments
    assert pool is not None
    tensor = manager.allocate(SHAPE, torch.float32)
    found = pool.find(tensor)
    assert found is not None
    found[0].fd = fd
    await _send(world, Message(MessageKind.ROWS, 1, tensor))


async def _silence(_manager: WorldManager, _world: World) -> None:
    """Nothing is sent."""


ROWS = torch.ones(SHAPE)
LIES: dict[str, Callable[[WorldManager, World], Awaitable[None]]] = {
    "another-shape": _answer(MessageKind.ROWS, ROWS.view(8, -1)),
    "another-dtype": _answer(MessageKind.ROWS, ROWS.view(torch.int32)),
    "too-long": _claims_more,
    "another-number": _answer(MessageKind.ROWS, ROWS, number=7),
    "nothing": _answer(MessageKind.ROWS, None),
    "another-kind": _answer(MessageKind.RESULT, ROWS),
    "segment-is-too-short": _segment_is_too_short,
    "segment-can-shrink": _segment_can_shrink,
    "segment-is-a-pipe": _segment_is_a_pipe,
    "silence": _silence,
}


def _listen(lie: Callable[[WorldManager, World], Awaitable[None]], tasks: list[asyncio.Task[None]]) -> int:
    manager = WorldManager(secret=SECRET, verify_collectives=False)
    port = manager.listen("127.0.0.1", 0)

    async def serve(name: str, generation: int) -> None:
        world = await manager.initialize_world(
            name, 0, 2, WORLD_BACKEND, addr="127.0.0.1", port=port, generation=generation
        )
        await Channel(world, 1, lambda _: None).receive()
        await lie(manager, world)
        await asyncio.Event().wait()

    async def offer(_question: str, _host: str) -> bytes:
        generation = len(tasks) + 1
        name = f"edge:liar:{generation}"
        tasks.append(asyncio.create_task(serve(name, generation)))
        return JoinOffer(name, generation).to_json().encode()

    manager.answer("127.0.0.1", port, offer)
    return port


async def main() -> None:
    """Serve until standard input ends."""
    tasks: list[asyncio.Task[None]] = []
    print(json.dumps({name: _listen(lie, tasks) for name, lie in LIES.items()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
