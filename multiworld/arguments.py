"""The arguments of operations, and what can be said about them before anything is sent.

Everything here raises ValueError or TypeError for arguments that cannot be right: the world is unharmed. What only the other members
know (their sizes) is the business of checked mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from multiworld.buffers import check_dense

TAG_LIMIT = 1 << 29
"""Tags of messages are below this."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the arguments of an operation are checked against.

    Attributes:
        rank, size: this member, and how many there are.
        backends: device type → c10d backend. With Gloo, tensors of other devices cross through host memory. None at all: the world
            has lines alone, and what goes over them: messages, all_reduce and barrier.
    """

    world_name: str
    rank: int
    size: int
    backends: dict[str, str]

    def peer(self, name: str, peer: int) -> int:
        """Raises ValueError unless `peer` is another member."""
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{name}: rank {peer} is no peer of rank {self.rank} in {self._self}")
        return peer

    def root(self, name: str, root: int) -> int:
        """Raises ValueError unless `root` is a member."""
        if not 0 <= root < self.size:
            raise ValueError(f"{name}: rank {root} does not exist in {self._self}")
        return root

    def on_host(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors, all on one device, must go through host memory. Raises ValueError, TypeError."""
        self.collective(name)
        for tensor in tensors:
            check_dense(name, tensor)
        device = tensors[0].device
        if any(tensor.device != device for tensor in tensors[1:]):
            devices = sorted({str(tensor.device) for tensor in tensors})
            raise ValueError(f"{name}: all tensors must be on one device, got {devices}")
        if self.backends.get(device.type, "gloo") != "gloo":
            return False
        if "gloo" in self.backends.values():
            return device.type != "cpu"
        raise ValueError(f"{name}: {self._self} has no backend for tensors on {device}, only {self.backends}")

    def message_on_host(self, name: str, tensor: Tensor) -> bool:
        """Whether what goes over lines with this tensor must go through host memory. Raises ValueError, TypeError."""
        if self.backends:
            return self.on_host(name, (tensor,))
        check_dense(name, tensor)
        return tensor.device.type != "cpu"

    def collective(self, name: str) -> None:
        """Raises ValueError where the world has no backend for collectives."""
        if not self.backends:
            raise ValueError(
                f"{name}: {self._self} has lines alone, which carry messages, all_reduce and barrier; "
                "give it backend='gloo' or 'nccl' for other collectives"
            )

    @property
    def _self(self) -> str:
        return f"world {self.world_name!r} of {self.size}"


def check_tag(name: str, tag: int) -> None:
    if not 0 <= tag < TAG_LIMIT:
        raise ValueError(f"{name}: a tag must be from 0 to {TAG_LIMIT - 1}, got {tag}")


def parts_of_root(
    name: str, ranks: Ranks, parts: Sequence[Tensor] | None, root: int, argument: str
) -> Sequence[Tensor]:
    """The list that only the root gives; what others give is ignored, as long as it is empty or None."""
    if ranks.rank != root:
        if parts:
            raise ValueError(f"{name}: {argument} is for rank {root} alone; give None on rank {ranks.rank}")
        return ()
    if not parts:
        raise ValueError(f"{name}: rank {root} is the root and must give {argument}, one tensor a rank")
    return parts


def check_list(name: str, ranks: Ranks, tensors: Sequence[Tensor], tensor: Tensor, *, written: bool) -> None:
    if len(tensors) != ranks.size:
        raise ValueError(f"{name}: expected a list of {ranks.size} tensors, one a rank, got {len(tensors)}")
    for index, each in enumerate(tensors):
        if each.dtype is not tensor.dtype:
            raise TypeError(f"{name}: tensor {index} of the list is {each.dtype}, the other tensor {tensor.dtype}")
        if each.numel() != tensor.numel():
            raise ValueError(
                f"{name}: tensor {index} of the list has shape {tuple(each.shape)}, the other tensor {tuple(tensor.shape)}"
            )
    if written:
        check_distinct(name, tensors)


def check_distinct(name: str, outputs: Sequence[Tensor]) -> None:
    filled = [each.data_ptr() for each in outputs if each.numel()]
    if len(set(filled)) != len(filled):
        raise ValueError(f"{name}: the same memory was given for the results of several ranks")


def check_whole(name: str, ranks: Ranks, whole: Tensor, part: Tensor) -> None:
    if whole.dtype is not part.dtype:
        raise TypeError(f"{name}: one tensor is {whole.dtype}, the other {part.dtype}")
    if whole.numel() != ranks.size * part.numel():
        raise ValueError(
            f"{name}: a tensor of {ranks.size} times {tuple(part.shape)} is needed, got {tuple(whole.shape)}"
        )


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"
