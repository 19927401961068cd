"""Fault-isolated process groups ("worlds"): one process is a member of many, on stock PyTorch.

    async with WorldManager() as manager:
        await manager.initialize_world("world1", rank, 2, addr="127.0.0.1", port=29500)
        await manager.communicator.send(tensor, 1, "world1")

A failure in one world raises BrokenWorldException there and has no effect on other worlds.

This package does not import `multiworld_serving` or `multiworld_client`; pyproject.toml lists the order of its layers. Start with
manager.py (the public entry), then world.py (the life of one world) and errors.py.
"""

from multiworld.communicator import WorldCommunicator
from multiworld.control.dial import ask
from multiworld.control.loop import ControlLoop
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
from multiworld.manager import WorldManager
from multiworld.ops.operation import Operation, View
from multiworld.world import Transport, World, WorldState

__version__ = "0.1.0"
"""Equal to the versions in pyproject.toml and packaging/."""

__all__ = [
    "AskError",
    "BrokenWorldException",
    "Cause",
    "ControlLoop",
    "JoinError",
    "MultiWorldError",
    "Operation",
    "Transport",
    "View",
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
