"""pymultiworld's import path: `from multiworld.communicator import BrokenWorldException, WorldCommunicator`."""

from multiworld.errors import BrokenWorldException
from multiworld.world_communicator import WorldCommunicator

__all__ = ["BrokenWorldException", "WorldCommunicator"]
