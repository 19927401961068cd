"""Ways to compute that know a few batch sizes only: between them a batch is filled up with zeros."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from models.errors import StageError
from models.stage_spec import StageSpec
from models.stages import stage_input_dtype


def batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The powers of two, and the largest."""
    return tuple(sorted({1 << power for power in range(max_batch_size.bit_length())} | {max_batch_size}))


class FixedSizes(nn.Module):
    """Takes and returns what the stage does.

    Args:
        runners: by batch size, which their input must have.
    """

    def __init__(self, spec: StageSpec, runners: Mapping[int, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.spec = spec
        self._runners = dict(sorted(runners.items()))

    def forward(self, batch: Tensor) -> Tensor:
        """See `Stage`. Raises StageError for a batch that is larger than was said, or of another type."""
        rows = len(batch)
        size = next((size for size in self._runners if size >= rows), None)
        if size is None:
            raise StageError(f"a batch of {rows}; this stage was made for {max(self._runners)} at the most")
        if batch.dtype != stage_input_dtype(self.spec):
            raise StageError(f"a batch of {batch.dtype}; expected {stage_input_dtype(self.spec)}")
        if size > rows:
            batch = torch.cat([batch, batch.new_zeros((size - rows, *batch.shape[1:]))])
        return self._runners[size](batch.contiguous())[:rows]
