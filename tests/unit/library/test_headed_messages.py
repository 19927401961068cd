"""Messages of unknown size: the receiver reads header and size before it provides memory."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from multiworld import BrokenWorldException, Cause, World, WorldManager
from tests.integration.members import form

WAIT_S = 30.0


@pytest.fixture
async def worlds() -> AsyncIterator[tuple[World, World]]:
    async with WorldManager(secret="s") as one, WorldManager(secret="s") as other:
        await form("w", one.listen("127.0.0.1", 0), one, other)
        yield one.world("w"), other.world("w")


async def test_world_breaks_when_the_receiver_does_not_accept_the_header(worlds: tuple[World, World]) -> None:
    def check(header: bytes, size_bytes: int) -> None:
        raise ValueError(f"{size_bytes} bytes are too many")

    worlds[0].start_send_message(b"", torch.zeros(5), 1)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(BrokenWorldException, match="20 bytes are too many") as ending:
            await worlds[1].recv_view(check, 0)
    assert (ending.value.cause, ending.value.rank) == (Cause.ERROR, 0)


async def test_send_is_refused_when_the_message_cannot_be_sent(worlds: tuple[World, World]) -> None:
    with pytest.raises(ValueError, match="49 bytes; expected at most 48"):
        worlds[0].start_send_message(bytes(49), None, 1)
    with pytest.raises(ValueError, match="move it to the CPU"):
        worlds[0].start_send_message(b"", torch.empty(1, device="meta"), 1)
