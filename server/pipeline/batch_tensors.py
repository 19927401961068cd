"""The tensors of open requests and batches, by the ids that the scheduler uses."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class BatchTimes:
    """Seconds that a batch has spent so far, summed over its stages."""

    compute_s: float = 0.0
    transfer_s: float = 0.0


class BatchTensors:
    """Stores the images of open requests and the input of each batch's current stage."""

    def __init__(self) -> None:
        self.images: dict[int, Tensor] = {}
        """uint8 [3,H,W] by request, until the request is closed."""
        self.times: dict[int, BatchTimes] = {}
        self._inputs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.images) + len(self._inputs)

    def get_input(self, batch: int, requests: tuple[int, ...] = ()) -> Tensor:
        """The stored input of the batch. Without one, stacks and stores the images of `requests` (first stage).

        Raises:
            LookupError: there is neither a stored input nor an image.
        """
        if batch not in self._inputs:
            self._stack(batch, requests)
        return self._inputs[batch]

    def _stack(self, batch: int, requests: tuple[int, ...]) -> None:
        """Stack the requests' images into uint8 [B,3,H,W]. A request that was cancelled meanwhile becomes a row of zeros."""
        rows = [self.images.get(request) for request in requests]
        known = next((row for row in rows if row is not None), None)
        if known is None:
            raise LookupError(f"there is no input for batch {batch}")
        self.replace(batch, torch.stack([torch.zeros_like(known) if row is None else row for row in rows]))
        self.times[batch] = BatchTimes()

    def replace(self, batch: int, tensor: Tensor) -> None:
        """Store the input of the batch's next stage, and free the previous one."""
        self._inputs[batch] = tensor

    def free_input(self, batch: int) -> None:
        """Free the batch's input."""
        self._inputs.pop(batch, None)

    def free(self, batch: int) -> None:
        """Free everything that is stored for the batch."""
        self.free_input(batch)
        self.times.pop(batch, None)
