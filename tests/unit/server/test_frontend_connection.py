"""`while_connected` when the client disconnects at the moment when the block ends."""

import asyncio
import math
from typing import Any

import pytest

from multiworld_serving.server.errors import WithdrawnError
from multiworld_serving.server.http.disconnect import while_connected


async def test_block_completes_when_the_client_disconnects_at_the_same_time() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    goes = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await goes.wait()
        return {"type": "http.disconnect"}

    async with while_connected(receive, deadline_s=math.inf):
        await asyncio.sleep(0)
        goes.set()
        await asyncio.sleep(0)  # now the disconnect is known, and the block ends at the same time
    await asyncio.sleep(0)
    assert complaints == []


async def test_block_is_cancelled_when_the_client_disconnects() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(WithdrawnError):
        async with while_connected(receive, deadline_s=math.inf):
            await asyncio.Event().wait()
