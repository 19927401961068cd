"""The operations of all worlds of a process, by world name."""

from typing import TYPE_CHECKING

from torch import Tensor

from multiworld.world import WorldState

if TYPE_CHECKING:
    from multiworld.world_manager import WorldManager


class WorldCommunicator:
    """Every operation is async, takes the world's name last, and raises the same errors.

    Raises:
        BrokenWorldException: a member of that world failed. The world is gone; join again. What a tensor holds is undefined.
        WorldClosedError: we closed it.
        WorldNotFoundError: no such world here.
    Cancelling an operation breaks its own world, and no other.
    """

    def __init__(self, manager: "WorldManager") -> None:
        self._manager = manager

    def is_broken(self, world_name: str) -> bool:
        """Whether that world broke. Raises WorldNotFoundError."""
        return self._manager.world(world_name).state is WorldState.BROKEN

    async def send(
        self, tensor: Tensor, dst: int, world_name: str, *, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Send `tensor` (any dtype and shape; a copy is made when it is not contiguous) to rank `dst`.

        Args:
            tag: matched by the receiver's; messages of one tag arrive in order.
            timeout_s: seconds after which the world counts as broken (`timeout`); None leaves that to the watchdog.
        """
        await self._manager.world(world_name).send(tensor, dst, tag=tag, timeout_s=timeout_s)

    async def recv(
        self, tensor: Tensor, src: int, world_name: str, *, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Receive into `tensor`, in place: contiguous, of the dtype and size that rank `src` sends.

        A longer message than `tensor` ends the process (Gloo's doing): agree on sizes first, as the stage links do.
        """
        await self._manager.world(world_name).recv(tensor, src, tag=tag, timeout_s=timeout_s)
