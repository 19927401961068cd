"""A producer in a process of its own: keeps one tensor, sends where it is, and runs until the other end is closed."""

import asyncio
import socket

import torch

from tests.unit.edges.edge_parts import edges


def keep_a_tensor(fd: int) -> None:
    with socket.socket(fileno=fd) as other:
        asyncio.run(_keep(other))


async def _keep(other: socket.socket) -> None:
    async with edges("p") as producer:
        number = producer.store.put("owner", torch.arange(60, dtype=torch.float32).view(4, 15))
        other.sendall(f"{producer.holder} {number}\n".encode())
        await asyncio.to_thread(other.recv, 1)
