"""Whether somebody still waits for the answer, when the client goes away in the very moment in which it is there."""

import asyncio
import math
from typing import Any

import pytest

from server.connection import while_connected
from server.errors import WithdrawnError


async def test_a_client_that_goes_with_its_answer_disturbs_nothing() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    goes = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await goes.wait()
        return {"type": "http.disconnect"}

    async with while_connected(receive, deadline_s=math.inf):
        await asyncio.sleep(0)
        goes.set()
        await asyncio.sleep(0)  # now it is known that the client has gone, and this block ends all the same
    await asyncio.sleep(0)
    assert complaints == []


async def test_a_client_that_goes_before_its_answer_ends_the_wait() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(WithdrawnError):
        async with while_connected(receive, deadline_s=math.inf):
            await asyncio.Event().wait()
