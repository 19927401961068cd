"""Rewrites a stage for a device, if its output stays accurate."""

from dataclasses import dataclass

import torch
from torch import nn

from multiworld_serving.models.bundle.stage import BundleStage
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation_of_rows
from multiworld_serving.models.optimize.folding import folded
from multiworld_serving.models.optimize.fusing import Workload, fusable
from multiworld_serving.models.optimize.graphs import place
from multiworld_serving.models.optimize.tuning import ExecutionMode, Tuning

_CHECKED_ROWS = 2


@dataclass(frozen=True)
class OptimizedStage:
    """A stage that is ready to run.

    Attributes:
        module: on the device; rows in, rows out, as the stage.
        why: reason for the mode, for the log.
    """

    module: nn.Module
    mode: ExecutionMode
    why: str


def optimize(
    stage: BundleStage,
    max_batch_size: int,
    tuning: Tuning,
    device: torch.device,
    threads: tuple[int, ...] = (),
) -> OptimizedStage:
    """Rewrite `stage` and move it to `device`; it stays as written if its graph cannot be rewritten or is not accurate enough then.

    With the tuning "compile" it is fused, too: compiling takes minutes, and `CompiledStage` does it.

    Args:
        stage: on the CPU, with weights. It may become part of the result.
        threads: numbers of threads that may compute a batch on a CPU; weight layouts depend on them. Empty: torch's current number.
    """
    mode, why = ExecutionMode("fused", tuning.stage_precision(device)), "asked for"
    if tuning.optimize != "eager":
        workload = Workload(max_batch_size, threads or (torch.get_num_threads(),))
        example = stage.spec.example(min(max_batch_size, _CHECKED_ROWS))
        try:
            with torch.inference_mode():
                expected = stage(example)
            made = folded(stage, workload, mode.dtype, fused=fusable(device, mode.dtype))
            place(made.module, device)
            with torch.inference_mode():
                off = deviation_of_rows(made(example.to(device)).cpu(), expected, stage.spec, mode.precision)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - rewrites and operators raise many types, and graphs may be of any model
            why = f"{mode} cannot be built ({str(error).strip().partition(chr(10))[0]})"
        else:
            if off <= TOLERANCE[mode.precision]:
                return OptimizedStage(made, mode, f"{off:.1g} off")
            why = f"{mode} is {off:.2g} off where {TOLERANCE[mode.precision]:g} is allowed"
    place(stage.module, device)
    return OptimizedStage(stage.to(device), ExecutionMode("eager"), why)
