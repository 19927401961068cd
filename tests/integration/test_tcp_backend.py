"""A world of two listens on one port, of rank 0, and its connections leave from the address that was bound."""

import asyncio
import os
from pathlib import Path

import pytest

from multiworld import JoinError, WorldManager
from tests.integration.members import form, managers
from tests.integration.test_worlds_joining import assert_join_fails


def _sockets(state: str) -> list[list[str]]:
    """The TCP sockets of this process in this state: columns as the kernel writes them."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    files = {os.path.basename(os.path.realpath(each)) for each in Path("/proc/self/fd").iterdir()}
    return [columns for columns in map(str.split, lines) if columns[3] == state and f"socket:[{columns[9]}]" in files]


async def test_connections_leave_from_the_address_that_was_bound() -> None:
    before = {columns[1] for columns in _sockets("0A")}
    async with WorldManager() as host, WorldManager(bind_host="127.0.0.2") as guest:
        port = host.listen()
        await form("w", port, host, guest)
        assert len({columns[1] for columns in _sockets("0A")} - before) == 1, "only rank 0's port"
        peers = [columns[2] for columns in _sockets("01") if int(columns[1].rpartition(":")[2], 16) == port]
        assert {peer.partition(":")[0] for peer in peers} == {"0200007F"}  # 127.0.0.2


async def test_members_say_so_when_they_were_given_different_settings() -> None:
    async with managers(2) as (host, guest):
        port = host.listen()
        hosting = asyncio.create_task(host.initialize_world("w", 0, 2, port=port))
        told = "rank 0 has backend=multiworld, verify_collectives=True; rank 1 has .*verify_collectives=False"
        with pytest.raises(JoinError, match=told):
            await guest.initialize_world("w", 1, 2, port=port, verify_collectives=False)
        hosting.cancel()
        await asyncio.gather(hosting, return_exceptions=True)


async def test_address_that_is_not_ours_is_named_when_it_cannot_be_bound() -> None:
    async with WorldManager() as host, WorldManager(bind_host="192.0.2.7") as guest:
        await assert_join_fails(guest, "Cannot assign requested address", rank=1, world_size=2, port=host.listen())
