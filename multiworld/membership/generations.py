"""Numbers the generations of each world name. The number only increases for a name."""

from collections import OrderedDict

_NAMES = 10_000
"""Limit of remembered names. Programs may use a new name for every job."""


class Generations:
    """The latest generation of each name that this process hosted as rank 0.

    Above the limit of names the oldest is forgotten. An unknown name starts after the highest generation of all forgotten names.
    """

    def __init__(self) -> None:
        self._latest: OrderedDict[str, int] = OrderedDict()
        self._forgotten = 0

    def take(self, name: str, generation: int = 0) -> int:
        """Return the generation of a new world: `generation` if it is not 0, else the latest of that name plus one."""
        latest = self._latest.pop(name, self._forgotten)
        generation = generation or latest + 1
        self._latest[name] = max(generation, latest)
        if len(self._latest) > _NAMES:
            self._forgotten = max(self._forgotten, self._latest.popitem(last=False)[1])
        return generation
