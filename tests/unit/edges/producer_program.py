"""A producer in a process of its own: keeps one tensor, prints where it is, and runs until its standard input is closed."""

import asyncio
import sys

import torch

from tests.unit.edges.edge_parts import edges


async def main() -> None:
    async with edges("p", heartbeat_timeout_s=10.0) as producer:
        number = producer.store.put("owner", torch.arange(60, dtype=torch.float32).view(4, 15))
        print(producer.holder, number, flush=True)
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
