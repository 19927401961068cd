"""NCCL on one GPU: a world of one member, and worlds of two ranks that share it, whose second one is killed and frozen."""

import asyncio
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from typing import Any

import torch

import multiworld.world
from benchmarks.gpu.setup import NeedsGpuError, Setup
from benchmarks.ranks import start
from multiworld import Cause, World, WorldError, WorldManager
from multiworld.collectives import nccl

WORLD = "w"
_HEARTBEAT_S = 2.0
_RUNNING_S = 0.3
"""How long a collective is pending before its peer is killed."""


def backend(setup: Setup) -> str:
    """NCCL, or the library's own connections in a rehearsal."""
    return "nccl" if setup.on_gpu else "multiworld"


def nccl_one(setup: Setup) -> None:
    """A world of one member: forming, a collective, breaking it, and forming it again."""
    asyncio.run(_nccl_one(setup))
    if not setup.on_gpu:
        raise NeedsGpuError("the worlds used the connections of the library")


async def _nccl_one(setup: Setup) -> None:
    async with WorldManager() as manager:
        for generation in (1, 2, 3):
            began_s = time.monotonic()
            world = await _form(manager, setup, 0, 1, 0)
            formed_s = time.monotonic() - began_s
            tensor = torch.full((1 << 20,), 3.0, device=setup.device)
            await manager.communicator.all_reduce(tensor, world_name=WORLD)
            began_s = time.monotonic()
            world.fail(Cause.ABORTED, 0, "of this check")
            freed = await asyncio.to_thread(world.reclaimed.wait, setup.start_s)
            freed_s = time.monotonic() - began_s if freed else None
            right = bool((tensor == 3.0).all())
            setup.add(f"generation {generation}", {"formed s": formed_s, "freed s": freed_s, "right": right})


def nccl_two(setup: Setup) -> None:
    """Two ranks on one GPU: collectives, then a peer that is killed, that freezes, and that freezes while NCCL connects.

    Tests NCCL in nonblocking mode and in blocking mode. torch uses the blocking mode by default.
    """
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30 and newer; older ones refuse two ranks on one GPU
    for blocking in (0, 1) if setup.on_gpu else (0,):
        nccl._BLOCKING = blocking
        asyncio.run(_nccl_two(setup, f"blocking={blocking}, "))
    if not setup.on_gpu:
        raise NeedsGpuError("the worlds used the connections of the library")


async def _nccl_two(setup: Setup, mode: str) -> None:
    # Without verification, NCCL runs a collective although the peer has not started it: as when a peer dies in the middle of one.
    async with WorldManager(verify_collectives=False, heartbeat_timeout_s=_HEARTBEAT_S) as manager:
        port, here = manager.listen(), manager.communicator
        peer = _start_peer(setup, port)
        try:
            began_s = time.monotonic()
            world = await _form(manager, setup, 0, 2, port)
            setup.add(f"{mode}formed s", time.monotonic() - began_s)
            for count in (1 << 10, 1 << 18) if setup.small else (1 << 10, 1 << 18, 1 << 24):
                await _all_reduce(here, setup, count)
                began_s = time.monotonic()
                for _ in range(5):
                    await _all_reduce(here, setup, count)
                setup.add(f"{mode}all-reduce of {4 * count} bytes, ms", 1e3 * (time.monotonic() - began_s) / 5)
            for fault in (signal.SIGKILL, signal.SIGSTOP):
                pending = here.all_reduce(torch.ones(1 << 18, device=setup.device), world_name=WORLD)
                task = asyncio.ensure_future(pending)
                await asyncio.sleep(_RUNNING_S)
                setup.add(mode + fault.name, await _after(setup, peer, fault, task, world))
                peer.kill()
                peer = _start_peer(setup, port)
                began_s = time.monotonic()
                world = await _form(manager, setup, 0, 2, port)
                await _all_reduce(here, setup, 1 << 10)
                setup.add(f"{mode}formed again after {fault.name}, s", time.monotonic() - began_s)
            if setup.on_gpu and not nccl._BLOCKING:
                peer.kill()
                peer = _start_peer(setup, port, freeze=True)
                setup.add("a peer froze while NCCL connected", await _freeze_connecting(manager, setup, port))
        finally:
            peer.kill()


async def _after(setup: Setup, peer: BaseProcess, fault: int, task: Any, world: World) -> dict[str, Any]:
    """Send the signal. Returns how long the pending collective and freeing the world take."""
    began_s = time.monotonic()
    assert peer.pid is not None
    os.kill(peer.pid, fault)
    try:
        await asyncio.wait_for(task, setup.start_s)
        outcome = "the collective succeeded"
    except WorldError as error:
        outcome = str(error)
    raised_s = time.monotonic() - began_s
    freed = await asyncio.to_thread(world.reclaimed.wait, setup.start_s)
    return {
        "error": outcome,
        "raised s": raised_s,
        "freed s": time.monotonic() - began_s if freed else None,
    } | _threads()


async def _freeze_connecting(manager: WorldManager, setup: Setup, port: int) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        await _form(manager, setup, 0, 2, port)
        outcome = "it formed"
    except WorldError as error:
        outcome = str(error)
    raised_s = time.monotonic() - began_s
    await asyncio.sleep(30.0)  # NCCL gives up connecting after 20 s
    return {"error": outcome, "raised s": raised_s} | _threads()


def _threads() -> dict[str, Any]:
    return {"threads of NCCL": [each.name for each in threading.enumerate() if "nccl" in each.name]}


async def _form(manager: WorldManager, setup: Setup, rank: int, size: int, port: int) -> World:
    return await manager.initialize_world(
        *(WORLD, rank, size),
        backend=backend(setup),
        port=port,
        device=torch.device(setup.device),
        timeout=setup.start_s,
    )


async def _all_reduce(here: Any, setup: Setup, count: int) -> None:
    """Tell the peer how many elements follow, and check the sum."""
    await here.send(torch.tensor([count]), 1, WORLD)
    tensor = torch.ones(count, device=setup.device)
    await here.all_reduce(tensor, world_name=WORLD)
    if not bool((tensor == 2.0).all()):
        raise RuntimeError(f"an all-reduce of {count} elements has a wrong result")


def _start_peer(setup: Setup, port: int, *, freeze: bool = False) -> BaseProcess:
    return start(_serve, port, backend(setup), setup.device, nccl._BLOCKING, freeze)


async def _serve(port: int, backend: str, device: str, blocking: int, freeze: bool) -> None:
    """Rank 1, in its own process: take part in the collectives that rank 0 announces. Or freeze when NCCL would connect."""
    nccl._BLOCKING = blocking
    if freeze:
        setattr(multiworld.world, "connect_nccl_group", lambda *_: os.kill(os.getpid(), signal.SIGSTOP))  # noqa: B010
    async with WorldManager(verify_collectives=False) as manager:
        here = manager.communicator
        await manager.initialize_world(WORLD, 1, 2, backend=backend, port=port, device=torch.device(device))
        while True:
            count = torch.zeros(1, dtype=torch.int64)
            await here.recv(count, 0, WORLD)
            await here.all_reduce(torch.ones(int(count), device=device), world_name=WORLD)
