"""Records stages as CUDA graphs, so that one call launches all kernels of a batch.

A graph has fixed shapes and memory, so there is one per batch size, and batches are copied into and out of it. See "CUDA Graphs" in
PyTorch's notes on CUDA semantics. tests/integration/test_gpu_stages.py needs a GPU.
"""

from typing import Any

import torch
from torch import Tensor, nn

from multiworld_serving.models.optimize.folding import FoldedStage
from multiworld_serving.models.optimize.padded_stage import PaddedStage, batch_sizes

_WARM_UPS = 3
"""Libraries choose algorithms and allocate memory in the first runs, which is not allowed while a graph is recorded."""


def record_cuda_graphs(
    stage: FoldedStage, sample_shape: tuple[int, ...], max_batch_size: int, device: torch.device
) -> PaddedStage:
    """Record a stage on `device` for each of `batch_sizes`. Raises RuntimeError if it cannot be recorded."""
    # Graphs can share a memory pool: they run one at a time, and their outputs are copied before the next one runs.
    if stage.spec.input_varies:
        raise RuntimeError("its rows have different lengths")
    pool, runners = torch.cuda.graph_pool_handle(), {}
    with torch.cuda.device(device):  # graphs belong to the current device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The largest batch size allocates the memory, the others reuse it.
        for batch_size in reversed(batch_sizes(max_batch_size)):
            example = stage.spec.example(batch_size, sample_shape).to(device)
            runners[batch_size] = _Graph(stage, example, stream, pool)
    return PaddedStage(stage.spec, runners)


class _Graph:
    """One CUDA graph. Must be called on one thread only."""

    def __init__(self, stage: nn.Module, example: Tensor, stream: torch.cuda.Stream, pool: Any) -> None:
        self._input = example
        stream.wait_stream(torch.cuda.current_stream(example.device))
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                stage(example)
        torch.cuda.current_stream(example.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: the copy thread may allocate memory meanwhile, which must not fail the recording.
        with (
            torch.inference_mode(),
            torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self._output: Tensor = stage(example)

    def __call__(self, batch: Tensor) -> Tensor:
        self._input.copy_(batch, non_blocking=True)
        self._graph.replay()
        return self._output.clone()  # the next batch overwrites it
