"""Checks the arguments of operations before anything is sent.

The functions raise ValueError or TypeError for invalid arguments; the world stays usable. `verify_collectives` detects arguments that do
not match those of other members (see multiworld/collectives/fingerprint.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiworld.ops.buffers import check_dense, check_distinct

TAG_LIMIT = 1 << 29
"""Tags of sends and receives are below this limit."""


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """The properties of a world that arguments are checked against.

    Attributes:
        rank, size: rank of this member and number of members.
        device: the CUDA device on which NCCL carries the collectives, with its index; None without NCCL. All other tensors on devices are
            copied through host memory.
    """

    name: str
    rank: int
    size: int
    device: torch.device | None = None

    def check_peer(self, name: str, peer: int, tag: int) -> None:
        """Raises ValueError unless `peer` is the rank of another member, and 0 <= `tag` < `TAG_LIMIT`."""
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{name}: rank {peer} is not a peer of rank {self.rank} in {self._world}")
        if not 0 <= tag < TAG_LIMIT:
            raise ValueError(f"{name}: a tag must be from 0 to {TAG_LIMIT - 1}, got {tag}")

    def check_root(self, name: str, root: int) -> None:
        """Raises ValueError unless `root` is the rank of a member."""
        if not 0 <= root < self.size:
            raise ValueError(f"{name}: rank {root} does not exist in {self._world}")

    def check_devices(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors must be copied through host memory.

        Raises ValueError when they are on different or unsupported devices, TypeError when one is not dense.
        """
        for tensor in tensors:
            check_dense(name, tensor)
        device = tensors[0].device
        if any(tensor.device != device for tensor in tensors[1:]):
            devices = sorted({str(tensor.device) for tensor in tensors})
            raise ValueError(f"{name}: all tensors must be on one device, got {devices}")
        on_nccl = self.uses_nccl(tensors[0])
        if on_nccl and device != self.device:
            raise ValueError(
                f"{name}: the tensors are on {device}, but {self._world} uses {self.device}; move them there"
            )
        return device.type != "cpu" and not on_nccl

    def uses_nccl(self, tensor: Tensor) -> bool:
        """Return whether NCCL carries collectives on this tensor, not the library's own connections."""
        return self.device is not None and tensor.is_cuda

    @property
    def _world(self) -> str:
        return f"world {self.name!r} of size {self.size}"


def parts_of_root(
    name: str, facts: WorldFacts, parts: Sequence[Tensor] | None, root: int, argument: str
) -> Sequence[Tensor]:
    """Return the list of tensors that only the root passes; () at other ranks.

    Raises ValueError when the root passes no tensors or another rank passes any.
    """
    if facts.rank != root:
        if parts:
            raise ValueError(f"{name}: {argument} is for rank {root} only; pass None at rank {facts.rank}")
        return ()
    if not parts:
        raise ValueError(f"{name}: rank {root} is the root and must pass {argument}, one tensor per rank")
    return parts


def check_list(name: str, facts: WorldFacts, tensors: Sequence[Tensor], tensor: Tensor, *, written: bool) -> None:
    """Raises ValueError or TypeError unless there is one tensor per rank, each with the dtype and number of elements of `tensor`.

    With `written`, also checks that they share no memory.
    """
    if len(tensors) != facts.size:
        raise ValueError(f"{name}: expected a list of {facts.size} tensors, one per rank, got {len(tensors)}")
    for index, each in enumerate(tensors):
        if each.dtype is not tensor.dtype:
            raise TypeError(
                f"{name}: tensor {index} of the list is {each.dtype}, but the other tensor is {tensor.dtype}"
            )
        if each.numel() != tensor.numel():
            raise ValueError(
                f"{name}: tensor {index} of the list has shape {tuple(each.shape)}, but the other tensor has {tuple(tensor.shape)}"
            )
    if written:
        check_distinct(name, tensors)


def check_whole(name: str, facts: WorldFacts, whole: Tensor, part: Tensor) -> None:
    """Raises ValueError or TypeError unless `whole` has the dtype of `part` and `facts.size` times as many elements."""
    if whole.dtype is not part.dtype:
        raise TypeError(f"{name}: both tensors must have one dtype, got {whole.dtype} and {part.dtype}")
    if whole.numel() != facts.size * part.numel():
        raise ValueError(
            f"{name}: expected a tensor of {facts.size} times {tuple(part.shape)}, got {tuple(whole.shape)}"
        )


def tensor_signature(tensor: Tensor) -> str:
    """Dtype and number of elements as text, such as `float32[12]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"
