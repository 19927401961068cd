"""Runs a stage that supports only a few batch sizes, by padding batches with zeros."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.models.errors import StageError


def batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The powers of two up to `max_batch_size`, and `max_batch_size` itself."""
    return tuple(sorted({1 << power for power in range(max_batch_size.bit_length())} | {max_batch_size}))


class PaddedStage(nn.Module):
    """Rows in, rows out, as the stage, for up to the largest batch size.

    Args:
        runners: functions by the batch size of their input.
    """

    def __init__(self, spec: BundleStageSpec, runners: Mapping[int, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.spec = spec
        self._runners = dict(sorted(runners.items()))

    def forward(self, batch: Tensor) -> Tensor:
        """See `BundleStage`. Raises StageError if the batch is too large or has another dtype."""
        batch_size = len(batch)
        size = next((size for size in self._runners if size >= batch_size), None)
        if size is None:
            raise StageError(f"a batch of {batch_size}; this stage supports at most {max(self._runners)}")
        if batch.dtype != self.spec.input_dtype:
            raise StageError(f"a batch of {batch.dtype}; expected {self.spec.input_dtype}")
        if size > batch_size:
            batch = torch.cat([batch, batch.new_zeros((size - batch_size, *batch.shape[1:]))])
        return self._runners[size](batch.contiguous())[:batch_size]
