"""A version of the model split into stages, with the weights to send and the join self-test of each stage."""

import hashlib
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import safetensors.torch
import torch
from torch import Tensor

from multiworld_serving.common.wire import StageAssignment
from multiworld_serving.models import (
    NO_TUNING,
    LoadedModel,
    StageSpec,
    Tuning,
    WeightsError,
    deviation,
    reference_stage,
    split_model,
    stage_input_dtype,
    stage_input_shape,
    stage_weights,
)

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20
_TOLERANCE = {"float32": 1e-2, "bfloat16": 4e-2, "float16": 1e-2}
"""Maximum `deviation` of a worker's self-test output from the reference, by precision. In float32, other thread counts, kernels and
devices differ by 1e-6 to 1e-3; a wrong weight, a flipped bit or a NaN differs by more. The tolerance with which a worker chooses its
execution mode (models.TOLERANCE) is stricter, so that a worker never chooses a mode that fails here."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of one version.

    Attributes:
        number: the version's number for workers and clients. Its name is `spec.version`.
        weights: the stage's parameters and buffers as a safetensors file.
        self_test_input: one row, uint8 for the first stage, else float32.
        self_test_output: the output of this stage for `self_test_input`, computed on this machine in float32.
        tuning: precision and optimization that workers use.
        weights_sha256: hash of `weights` in hexadecimal digits.
    """

    spec: StageSpec
    weights: bytes
    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    self_test_input: Tensor
    self_test_output: Tensor
    number: int = 1
    tuning: Tuning = NO_TUNING
    weights_sha256: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights_sha256", hashlib.sha256(self.weights).hexdigest())

    def assignment(self, max_batch_size: int, window: int) -> StageAssignment:
        """The message that tells a worker to load this stage."""
        shape = "x".join(map(str, self.input_shape))
        tuning = self.tuning
        return StageAssignment(
            spec=self.spec.to_json(),
            weights_bytes=len(self.weights),
            weights_sha256=self.weights_sha256,
            input_shape=shape,
            max_batch_size=max_batch_size,
            window=window,
            version=self.number,
            precision=tuning.precision,
            optimize=tuning.optimize,
            tuning_ms=round(tuning.limit_s * 1e3),
        )

    def weights_chunks(self) -> tuple[Tensor, ...]:
        """`weights` in chunks to send, uint8 [N] each. They are read-only views of one buffer that all links share."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.split(torch.frombuffer(self.weights, dtype=torch.uint8), _CHUNK_BYTES)

    def check_self_test(self, output: Tensor | None) -> str | None:
        """Compare a worker's self-test output with the reference. Returns what is wrong with it; None if it is correct."""
        expected = self.self_test_output
        if output is None or output.shape != expected.shape or output.dtype != expected.dtype:
            found = "nothing" if output is None else f"{output.dtype} {tuple(output.shape)}"
            return f"expected {expected.dtype} {tuple(expected.shape)}, got {found}"
        # With "auto" the worker may choose any precision: use the largest tolerance.
        precision = "bfloat16" if self.tuning.precision == "auto" else self.tuning.precision
        error = deviation(output, expected, probabilities=self.spec.is_last and precision != "float32")
        if not error <= _TOLERANCE[precision]:  # also true for not-a-number
            return (
                f"the output deviates from the reference by {error:.3g}; at most {_TOLERANCE[precision]:g} is allowed"
            )
        return None


def make_plan(
    model: LoadedModel,
    num_stages: int,
    tuning: Tuning = NO_TUNING,
    number: int = 1,
    *,
    specs: Sequence[StageSpec] | None = None,
) -> tuple[StagePlan, ...]:
    """Split the model into stages and compute the reference output of each stage.

    Args:
        number: the number of this version of the model.
        specs: the partition; None: balanced by the counted costs of the blocks.
    Raises:
        ModelError: there are more stages than blocks, or the model computes NaN or infinity.
    """
    image_size = model.preprocessing.crop_size
    generator = torch.Generator().manual_seed(0)
    activation = torch.randint(0, 256, (1, 3, image_size, image_size), dtype=torch.uint8, generator=generator)
    plans = []
    for spec in specs or split_model(model, num_stages):
        with torch.inference_mode():
            output = reference_stage(model, spec)(activation)
        if not output.isfinite().all().item():
            raise WeightsError(
                f"invalid weights {model.version}: stage {spec.index} computes infinity or NaN for a test image; use other weights"
            )
        plans.append(
            StagePlan(
                spec=spec,
                weights=safetensors.torch.save(stage_weights(model, spec)),
                input_shape=stage_input_shape(spec, image_size),
                input_dtype=stage_input_dtype(spec),
                self_test_input=activation,
                self_test_output=output,
                number=number,
                tuning=tuning,
            )
        )
        activation = output
    for plan in plans:
        logger.debug(
            "stage=%d blocks=%s..%s weights_mb=%.1f",
            *(plan.spec.index, plan.spec.blocks[0], plan.spec.blocks[-1], len(plan.weights) / 1e6),
        )
    return tuple(plans)
