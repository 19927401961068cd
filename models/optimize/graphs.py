"""Stages recorded as CUDA graphs: all kernels of a batch are started by one call, where each costs the processor microseconds otherwise.

A graph has fixed shapes and fixed memory, so there is one for each batch size, and batches are copied into it and out of it. The idea
and its rules: "CUDA Graphs" in PyTorch's notes on CUDA semantics. Written without a GPU at hand: tests/integration/test_gpu_stages.py
checks it on machines that have one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.optimize.folding import FoldedStage
from models.optimize.sizes import FixedSizes, batch_sizes
from models.stages import stage_input_dtype

_WARM_UPS = 3
"""Libraries choose their algorithms, and take their memory, in the first runs: neither may happen while a graph is recorded."""


def graphed(stage: FoldedStage, row_shape: tuple[int, ...], max_batch_size: int, device: torch.device) -> FixedSizes:
    """Record a stage that is on `device`, for each of `batch_sizes`. Raises RuntimeError when something in it cannot be recorded."""
    # One pool: they run one at a time, their inputs lie outside it, and their outputs are copied before the next one runs.
    dtype, pool = stage_input_dtype(stage.spec), torch.cuda.graph_pool_handle()
    runners = {}
    with torch.cuda.device(device):  # on which a graph's own objects are made
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for rows in reversed(batch_sizes(max_batch_size)):  # the largest takes the memory, the others find it there
            sample = torch.zeros((rows, *row_shape), dtype=dtype, device=device)
            runners[rows] = _Graph(stage, sample, stream, pool)
    return FixedSizes(stage.spec, runners)


class _Graph:
    """One of them. Called on one thread."""

    def __init__(self, stage: nn.Module, sample: Tensor, stream: torch.cuda.Stream, pool: Any) -> None:
        self._input = sample
        stream.wait_stream(torch.cuda.current_stream(sample.device))
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                stage(sample)
        torch.cuda.current_stream(sample.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that brings batches takes memory meanwhile, which is no part of the graph and no error.
        with (
            torch.inference_mode(),
            torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self._output: Tensor = stage(sample)

    def __call__(self, batch: Tensor) -> Tensor:
        self._input.copy_(batch, non_blocking=True)
        self._graph.replay()
        return self._output.clone()  # the next batch is written over it
