"""What is served: the model cut into stages, the weights of each as they travel, and the canary that every replica must pass."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor

from models import (
    AS_IT_IS,
    LoadedModel,
    StageSpec,
    Tuning,
    WeightsError,
    cut,
    deviation,
    reference_stage,
    stage_input_dtype,
    stage_input_shape,
    stage_weights,
)
from wire import StageOrder

logger = logging.getLogger(__name__)

_TOLERANCE = {"float32": 1e-2, "bfloat16": 4e-2, "float16": 1e-2}
"""Largest `deviation` of a replica's answer to the canary, by precision. In float32 other thread counts, other kernels and other devices
differ by 1e-6 to 1e-3; a wrong weight, a bit that fell over or a not-a-number differs by more. What a worker itself accepts of a way
that it chooses (models.TOLERANCE) is stricter, so that it never chooses what is refused here."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of one version.

    Attributes:
        number: of the version, as workers and clients are told it. Its name is `spec.version`.
        weights: the stage's parameters and buffers as a safetensors file.
        canary_input, canary_output: one row, and what this stage makes of it on this machine, in float32.
        tuning: how workers are to compute it.
    """

    spec: StageSpec
    weights: bytes
    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    canary_input: Tensor
    canary_output: Tensor
    number: int = 1
    tuning: Tuning = AS_IT_IS

    def order(self, max_batch_size: int, window: int) -> StageOrder:
        shape = "x".join(map(str, self.input_shape))
        tuning = self.tuning
        return StageOrder(
            *(self.spec.to_json(), len(self.weights), shape, max_batch_size, window, self.number),
            *(tuning.precision, tuning.optimize, round(tuning.limit_s * 1e3)),
        )

    def accepts(self, output: Tensor | None) -> str | None:
        """Why a replica's answer to the canary is wrong; None when it is right."""
        expected = self.canary_output
        if output is None or output.shape != expected.shape or output.dtype != expected.dtype:
            found = "nothing" if output is None else f"{output.dtype} {tuple(output.shape)}"
            return f"expected {expected.dtype} {tuple(expected.shape)}, got {found}"
        # Who may choose the precision may choose the one that differs most.
        precision = "bfloat16" if self.tuning.precision == "auto" else self.tuning.precision
        error = deviation(output, expected, probabilities=self.spec.is_last and precision != "float32")
        if not error <= _TOLERANCE[precision]:  # also true for not-a-number
            return f"it is {error:.3g} off the reference, {_TOLERANCE[precision]:g} is allowed"
        return None


def make_plan(
    model: LoadedModel,
    num_stages: int,
    tuning: Tuning = AS_IT_IS,
    number: int = 1,
    *,
    specs: Sequence[StageSpec] | None = None,
) -> tuple[StagePlan, ...]:
    """Cut the model and compute each stage's reference.

    Args:
        number: of this version of the model.
        specs: the cut; by counted costs when not given.
    Raises:
        ModelError: more stages than blocks, or the model computes something that is no number.
    """
    image_size = model.preprocessing.crop_size
    generator = torch.Generator().manual_seed(0)
    activation = torch.randint(0, 256, (1, 3, image_size, image_size), dtype=torch.uint8, generator=generator)
    plans = []
    for spec in specs or cut(model, num_stages):
        with torch.inference_mode():
            output = reference_stage(model, spec)(activation)
        if not output.isfinite().all().item():
            raise WeightsError(
                f"the weights {model.version} make infinity or NaN of a picture in stage {spec.index}; train them again"
            )
        plans.append(
            StagePlan(
                spec=spec,
                weights=safetensors.torch.save(stage_weights(model, spec)),
                input_shape=stage_input_shape(spec, image_size),
                input_dtype=stage_input_dtype(spec),
                canary_input=activation,
                canary_output=output,
                number=number,
                tuning=tuning,
            )
        )
        activation = output
    for plan in plans:
        logger.info(
            "stage=%d blocks=%s..%s weights_mb=%.1f",
            *(plan.spec.index, plan.spec.blocks[0], plan.spec.blocks[-1], len(plan.weights) / 1e6),
        )
    return tuple(plans)
