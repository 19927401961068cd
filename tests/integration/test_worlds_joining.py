"""Worlds that fail to form: no host, a wrong secret, a failed member, a cancelled join."""

import asyncio
import contextlib
import os
import re
import resource
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from multiworld import Cause, JoinError, WorldClosedError, WorldManager, WorldNotFoundError, WorldState
from multiworld.control.dial import dial, next_frame
from multiworld.control.frames import (
    PROTOCOL_VERSION,
    Challenge,
    Frame,
    FrameReader,
    Heartbeat,
    Left,
    MemberFailed,
    SignedHello,
    Start,
    StoreSet,
)
from multiworld.control.handshake import NONCE_BYTES, Hello, RefusedError
from multiworld.membership.acceptor import listen_on
from tests.integration.members import PATIENCE_S, Spawn, form, managers
from tests.programs import free_port
from tests.waiting import until

PATIENT_S = 30.0
"""Heartbeat timeout: much longer than the delays of a busy machine, because no member is frozen here."""
MEMBER_SETTINGS = {"heartbeat_timeout_s": PATIENT_S}


async def test_join_is_refused_at_once_when_the_secret_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    async with WorldManager(secret="right") as host, WorldManager(secret="wrong") as guest:
        port = host.listen()
        hosting = asyncio.create_task(host.initialize_world("w", 0, 2, port=port))
        with pytest.raises(JoinError, match=rf"rank 0 at 127.0.0.1:{port} refused us: wrong secret"):
            await guest.initialize_world("w", 1, 2, port=port, timeout=3600)
        assert "refused a connection from 127.0.0.1: wrong secret" in caplog.text
        assert not hosting.done()
        async with WorldManager(secret=b"right") as friend:
            await friend.initialize_world("w", 1, 2, port=port)
            await hosting


async def test_refused_connections_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with WorldManager(secret="right") as host:
        port = host.listen()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):  # it is refused
                    while stranger.recv(1 << 16):
                        pass
        began_s = min(each.created for each in caplog.records)
        lines = [each.created for each in caplog.records if each.message.startswith("refused a connection from")]
        assert 1 <= len(lines) <= 1 + max(lines) - began_s


async def impostor(listener: socket.socket, *frames: Frame) -> bytes:
    """A host without the secret: it greets, then sends `frames`. Returns all bytes that it receives."""
    loop = asyncio.get_running_loop()
    sock, _ = await loop.sock_accept(listener)
    sock.setblocking(False)
    heard = b""
    with sock:
        await loop.sock_sendall(sock, Challenge(PROTOCOL_VERSION, os.urandom(NONCE_BYTES)).encode())
        while not any(isinstance(frame, SignedHello) for frame in FrameReader().feed(heard)):
            heard += await loop.sock_recv(sock, 1 << 16)
        await loop.sock_sendall(sock, b"".join(frame.encode() for frame in frames))
        while data := await loop.sock_recv(sock, 1 << 16):
            heard += data
    return heard


@pytest.mark.parametrize(
    "frame",
    [Start(1, "", ()), StoreSet("k", b"v"), MemberFailed(0, Cause.EXIT, ""), Left(0), Heartbeat()],
    ids=lambda frame: type(frame).__name__,
)
async def test_frames_of_an_unauthenticated_host_are_ignored(manager: WorldManager, frame: Frame) -> None:
    """Skipping the welcome must not work: the group would be built with the unauthenticated host."""
    with listen_on(("127.0.0.1", 0)) as listener:
        joining = asyncio.create_task(manager.initialize_world("w", 1, 2, port=listener.getsockname()[1], timeout=3600))
        heard = await impostor(listener, frame)
        assert {type(each) for each in FrameReader().feed(heard)} <= {SignedHello, Heartbeat}
        assert manager.worlds["w"].state is WorldState.JOINING
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)


async def test_data_connection_of_another_formation_is_refused(manager: WorldManager) -> None:
    """A member that was frozen resumes. Meanwhile the process of rank 0 was replaced, whose generations begin at 1 again."""
    port = manager.listen()
    hosting = asyncio.create_task(manager.initialize_world("w", 0, 2, port=port, timeout=PATIENCE_S))
    ours = Hello("w", 1, 2, settings="backend=multiworld, verify_collectives=True")
    with await dial(("127.0.0.1", port), b"", lambda _: ours, PATIENT_S) as control:
        start = await next_frame(control, PATIENT_S)
        assert isinstance(start, Start)
        data = replace(ours, peer=0, generation=start.generation)
        for stale in ("", "0123456789abcdef"):
            with pytest.raises(RefusedError, match="does not form that world any more"):
                await dial(("127.0.0.1", port), b"", partial(_same, replace(data, formation=stale)), PATIENT_S)
        assert not hosting.done()
        fresh = replace(data, formation=start.formation)
        with await dial(("127.0.0.1", port), b"", partial(_same, fresh), PATIENT_S):
            assert (await hosting).state is WorldState.READY


def _same(hello: Hello, _local_host: str) -> Hello:
    return hello


async def assert_join_fails(manager: WorldManager, words: str, **arguments: Any) -> None:
    """Join until the error is the expected one, with longer timeouts: a busy machine may not even connect within a short one."""
    for timeout in (0.3, 3.0, 30.0):
        with pytest.raises(JoinError) as raised:
            await manager.initialize_world("w", timeout=timeout, **arguments)
        if re.search(words, str(raised.value)):
            return
    pytest.fail(str(raised.value))


async def test_join_error_names_the_versions_when_the_host_has_another_protocol(manager: WorldManager) -> None:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(Challenge(PROTOCOL_VERSION - 1, os.urandom(NONCE_BYTES)).encode())
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        words = f"did not form within .* control protocol, we use {PROTOCOL_VERSION}"
        await assert_join_fails(manager, words, rank=1, world_size=2, port=port)


async def test_join_times_out_and_names_the_address(manager: WorldManager) -> None:
    port = free_port()
    words = rf"did not form within [\d.]+ s as rank 1 of 2 at 127.0.0.1:{port}.*refused"
    await assert_join_fails(manager, words, rank=1, world_size=2, port=port)
    words = r"does-not-exist\.invalid cannot be resolved"
    await assert_join_fails(manager, words, rank=1, world_size=2, addr="does-not-exist.invalid", port=port)
    await assert_join_fails(manager, "ranks 1, 2 did not join", rank=0, world_size=3, port=manager.listen())
    assert manager.worlds["w"].state is WorldState.BROKEN


async def test_join_timeout_says_that_the_host_answered_when_only_the_world_did_not_start(
    manager: WorldManager,
) -> None:
    port = manager.listen()
    async with WorldManager() as guest:
        for what, generation in (("the world", 0), ("generation 7", 7)):
            words = f"rank 0 answered, but {what} did not start there"
            await assert_join_fails(guest, words, rank=1, world_size=2, port=port, generation=generation)


async def test_busy_port_is_named_and_the_world_name_stays_free(manager: WorldManager) -> None:
    with listen_on(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"):
            await manager.initialize_world("w", 0, 2, port=port)
    assert "w" not in manager.worlds
    await manager.initialize_world("w", 0, 1, port=port)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"rank": 2}, ValueError, "rank 2 does not exist in a world of size 2"),
        ({"rank": -1}, ValueError, "rank -1 does not exist"),
        ({"world_size": 0}, ValueError, "in a world of size 0"),
        ({"port": 65536}, ValueError, "65536 is not a port"),
        ({"backend": "mpi"}, ValueError, "unknown backend 'mpi'"),
        ({"addr": "192.0.2.1"}, OSError, "cannot listen on 192.0.2.1"),
    ],
)
async def test_invalid_join_is_rejected_and_leaves_nothing_behind(
    manager: WorldManager, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    port = free_port()
    wanted = {"rank": 0, "world_size": 2, "port": port, **arguments}
    with pytest.raises(error, match=text):
        await manager.initialize_world("w", **wanted)
    assert "w" not in manager.worlds
    listen_on(("127.0.0.1", port)).close()
    assert (await manager.initialize_world("w", 0, 1, port=port)).generation == 1


@pytest.mark.parametrize("rank", [0, 1], ids=["host", "guest"])
async def test_cancelled_join_frees_the_name_and_the_rank(spawn: Spawn, manager: WorldManager, rank: int) -> None:
    async with WorldManager(heartbeat_timeout_s=PATIENT_S) as other:
        port = manager.listen() if rank == 0 else other.listen()
        joining = asyncio.create_task(manager.initialize_world("w", rank, 3, port=port))
        await asyncio.sleep(0.1)  # in progress; the exact step does not matter
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        everybody = [manager, other] if rank == 0 else [other, manager]
        await form("w", port, *everybody, await spawn())


@pytest.mark.parametrize("how", ["close", "cleanup"])
@pytest.mark.parametrize("rank", [0, 1], ids=["host", "guest"])
async def test_join_raises_closed_when_its_world_is_closed(rank: int, how: str) -> None:
    earlier = set(threading.enumerate())
    manager = WorldManager()
    joining = asyncio.create_task(manager.initialize_world("w", rank, 2, port=manager.listen()))
    await asyncio.sleep(0)
    assert manager.worlds["w"].state is WorldState.JOINING
    if how == "close":
        manager.worlds["w"].close()
    else:
        manager.cleanup()
    with pytest.raises(WorldClosedError):
        await joining
    await manager.aclose()
    await until(lambda: not [each for each in {*threading.enumerate()} - earlier if "multiworld" in each.name])


async def test_worlds_form_on_a_port_that_is_flooded_with_connections(spawn: Spawn, manager: WorldManager) -> None:
    """Random bytes, HTTP, silence, and a thousand connections do not keep a member from joining."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    greetings = [os.urandom(4096), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", b"\xff\xff\xff\xff", b"\0\0\0\x01\x07"]
    port = manager.listen()
    peer, crowd = await spawn(), await spawn()
    await form("before", port, manager, peer)
    await crowd.do("flood", port=port, greetings=[greeting.hex() for greeting in greetings], count=1000)
    await form("after", port, manager, peer)
    for world in ("before", "after"):
        coming = peer.start("recv", world=world, src=0)
        await manager.communicator.send(torch.ones(4), 1, world)
        assert await coming == [1.0]


async def test_event_loop_is_not_blocked_by_slow_name_resolution(
    manager: WorldManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, resolve = threading.Event(), socket.getaddrinfo

    def slow(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "slow.invalid":
            return resolve(host, *arguments, **options)
        assert gate.wait(PATIENCE_S), "the event loop is blocked"
        return resolve("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    joining = asyncio.create_task(manager.initialize_world("w", 0, 1, "tcp", "slow.invalid", manager.listen()))
    await asyncio.sleep(0)
    gate.set()
    assert (await joining).state is WorldState.READY


async def test_member_joins_by_host_name(spawn: Spawn, manager: WorldManager) -> None:
    """`localhost` may resolve to ::1 first, where nothing listens: the next address is tried."""
    port = manager.listen("127.0.0.1")
    peer = await spawn()
    joining = peer.start("join", world="w", rank=1, size=2, port=port, addr="localhost")
    await manager.initialize_world("w", 0, 2, addr="127.0.0.1", port=port)
    await joining


# -- addresses and settings -------------------------------------------------------------------------------------------------------


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


# -- names used by several threads ------------------------------------------------------------------------------------------------


async def test_concurrent_removals_raise_only_not_found(manager: WorldManager) -> None:
    port, errors = manager.listen(), []

    def remove(together: threading.Barrier) -> None:
        together.wait(PATIENCE_S)
        try:
            manager.remove_world("w")
        except Exception as error:  # noqa: BLE001 - which ones is the question
            errors.append(type(error))

    for _ in range(100):
        await manager.initialize_world("w", 0, 1, port=port)
        together = threading.Barrier(2)
        await asyncio.gather(*(asyncio.to_thread(remove, together) for _ in range(2)))
        assert "w" not in manager.worlds
    assert set(errors) <= {WorldNotFoundError}
