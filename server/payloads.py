"""The tensors behind the scheduler's ids: images of open requests, and the input of each batch's current stage."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class BatchTimes:
    """Seconds that a batch spent so far, all stages together."""

    compute_s: float = 0.0
    transfer_s: float = 0.0


class Payloads:
    """Holds a tensor for exactly as long as the scheduler may ask for it."""

    def __init__(self) -> None:
        self.images: dict[int, Tensor] = {}
        """uint8 [3,H,W] by request, until the request is closed."""
        self.times: dict[int, BatchTimes] = {}
        self._inputs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.images) + len(self._inputs)

    def form(self, batch: int, requests: tuple[int, ...]) -> Tensor:
        """Stack the requests' images into the batch's first input, uint8 [B,3,H,W].

        A request that was withdrawn meanwhile leaves a row of zeros, so that the others keep their places.
        """
        rows = [self.images.get(request) for request in requests]
        known = next(row for row in rows if row is not None)
        self.keep(batch, torch.stack([torch.zeros_like(known) if row is None else row for row in rows]))
        self.times[batch] = BatchTimes()
        return self._inputs[batch]

    def keep(self, batch: int, tensor: Tensor) -> None:
        """The batch's input from now on; the former one is freed."""
        self._inputs[batch] = tensor

    def input(self, batch: int) -> Tensor:
        return self._inputs[batch]

    def forget(self, batch: int) -> None:
        self._inputs.pop(batch, None)
        self.times.pop(batch, None)
