"""Fault-isolated worlds: many independent process groups in one process, on stock PyTorch.

    async with WorldManager() as manager:
        await manager.initialize_world("world1", rank, 2, addr="127.0.0.1", port=29500)
        await manager.communicator.send(tensor, 1, "world1")

A failure in one world raises BrokenWorldException there, and is not felt in any other.
"""

from importlib.metadata import PackageNotFoundError, version

from multiworld.errors import (
    AskError,
    BrokenWorldException,
    Cause,
    JoinError,
    MultiWorldError,
    WorldClosedError,
    WorldError,
    WorldExistsError,
    WorldNotFoundError,
)
from multiworld.events import WorldEvent
from multiworld.operation import Operation
from multiworld.question import ask
from multiworld.watchdog import WatchDog
from multiworld.world import World, WorldState
from multiworld.world_communicator import WorldCommunicator
from multiworld.world_manager import WorldManager

try:
    __version__ = version("multiworld-serving")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0"

__all__ = [
    "AskError",
    "BrokenWorldException",
    "Cause",
    "JoinError",
    "MultiWorldError",
    "Operation",
    "WatchDog",
    "World",
    "WorldClosedError",
    "WorldCommunicator",
    "WorldError",
    "WorldEvent",
    "WorldExistsError",
    "WorldManager",
    "WorldNotFoundError",
    "WorldState",
    "ask",
]
