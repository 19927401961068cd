"""Compiles a stage with `torch.compile`: on GPUs as CUDA graphs, on CPUs with frozen weights.

There is code for a few batch sizes, and batches are padded to the next one: on CPUs, code for any size was slower than the fused mode at
batch 1. The GPU part has not been run yet; tests/integration/test_gpu_stages.py needs a GPU.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multiworld_serving.models.bundle.stage import BundleStage
from multiworld_serving.models.cache_folder import cache_folder
from multiworld_serving.models.errors import CompileError, StageSpecError
from multiworld_serving.models.optimize.convolutions import Workload
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation_of_rows
from multiworld_serving.models.optimize.graphs import copy_of, place
from multiworld_serving.models.optimize.optimizing import folded
from multiworld_serving.models.optimize.tuning import ExecutionMode, Tuning

_CALLS = 3
"""The first call compiles, the second one records a CUDA graph on a GPU, and the third one replays it as all later calls do."""


def batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The powers of two up to `max_batch_size`, and `max_batch_size` itself."""
    return tuple(sorted({1 << power for power in range(max_batch_size.bit_length())} | {max_batch_size}))


class CompiledStage(nn.Module):
    """Rows in, rows out, as the stage, for up to the largest batch size. Call `compile_for` for each of `sizes` first.

    On a GPU, one thread must make, compile and call it, because torch keeps CUDA graphs per thread.

    Args:
        stage: on the CPU, with weights; kept as the reference until all sizes are compiled.
    Raises:
        CompileError: its rows have different lengths.
    """

    def __init__(
        self,
        stage: BundleStage,
        max_batch_size: int,
        tuning: Tuning,
        device: torch.device,
    ) -> None:
        super().__init__()
        if stage.spec.input_rows.varies:
            raise CompileError("its rows have different lengths")
        self.spec = stage.spec
        self.mode = ExecutionMode("compiled", tuning.stage_precision(device))
        self.sizes = batch_sizes(max_batch_size)
        self._device = device
        self._folded = folded(stage, Workload(max_batch_size, (1,)), self.mode.dtype)
        place(self._folded.module, device)
        self._reference: list[BundleStage] = [stage]  # a list, so that it is no submodule
        self._code: dict[int, Callable[..., tuple[Tensor, ...]]] = {}

    def compile_for(self, size: int) -> None:
        """Compile for this batch size, record its CUDA graph, and compare with the stage as written. Blocks for 10 to 60 seconds.

        Raises:
            CompileError: there is no compiler, it fails, or the result is not accurate.
        """
        rows = self.spec.example(size)
        # A module of its own, because its code is cached without guards: these compare shapes, which are fixed, and numbers of threads.
        module = copy_of(self._folded.module)
        try:
            # Its entries are pickles. The default of torch is a predictable folder in /tmp that another user could have made.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("compiled")))
            self._code[size] = torch.compile(module, dynamic=False, fullgraph=True, **self._options())
            with torch.inference_mode():
                expected = self._reference[0](rows)
                with self.mode.active(self._device):
                    for _ in range(_CALLS):
                        output = self(rows.to(self._device))
                off = deviation_of_rows(output.cpu(), expected, self.spec, self.mode.precision)
        except MemoryError:
            raise
        except Exception as error:
            raise CompileError(_first_line(error)) from error
        if not off <= TOLERANCE[self.mode.precision]:
            raise CompileError(
                f"{self.mode} is {off:.2g} off at batch {size} where {TOLERANCE[self.mode.precision]:g} is allowed"
            )
        if len(self._code) == len(self.sizes):
            self._reference.clear()

    def forward(self, batch: Tensor) -> Tensor:
        """See `BundleStage`. Raises StageSpecError if the batch is too large."""
        batch_size = len(batch)
        size = next((size for size in self.sizes if size >= batch_size), None)
        if size is None:
            raise StageSpecError(f"a batch of {batch_size}; this stage supports at most {self.sizes[-1]}")
        if size > batch_size:
            batch = torch.cat([batch, batch.new_zeros((size - batch_size, *batch.shape[1:]))])
        outputs = self._code[size](*self.spec.input_rows.unpack(batch.contiguous()))
        return self.spec.output_rows.pack([tensor[:batch_size].contiguous() for tensor in outputs])

    def _options(self) -> dict[str, Any]:
        if self._device.type == "cuda":
            return {"mode": "reduce-overhead"}
        # A single row may be computed on another number of threads than several rows.
        cpu = {"freezing": True, "cpp.dynamic_threads": True, "compile_threads": 1}
        return {"options": cpu | {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}}


def _first_line(error: BaseException) -> str:
    """Of the innermost cause: those around it say that a backend has failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0] or type(error).__name__
