"""pymultiworld's import path: `from multiworld.manager import WorldManager`."""

from multiworld.world_manager import WorldManager

__all__ = ["WorldManager"]
