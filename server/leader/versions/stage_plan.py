"""A version of the model split into stages, with the weights to send and the join self-test of each stage."""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiworld_serving.common.wire.join import EDGE_DTYPES
from multiworld_serving.common.wire.work import StageAssignment
from multiworld_serving.models.bundle.cutting import cuts_of
from multiworld_serving.models.bundle.files import Bundle, TensorEntry, TensorFile
from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.stage import BundleStageSpec, stage_head, stage_specs, weights_in_order
from multiworld_serving.models.errors import BundleError, ModelError, WeightsError
from multiworld_serving.models.optimize.deviation import deviation_of_rows
from multiworld_serving.models.optimize.tuning import NO_TUNING, Tuning
from multiworld_serving.models.stages.bundle_stage import packed_output
from multiworld_serving.models.stages.objects import OBJECT_ROWS
from multiworld_serving.models.stages.stage import ObjectStageSpec, StageSpec

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20

_TOLERANCE = {"float32": 1e-2, "tf32": 1e-2, "bfloat16": 4e-2, "float16": 1e-2}
"""Maximum `deviation` of a worker's self-test output from the reference, by precision. In float32, other thread counts, kernels and
devices differ by 1e-6 to 1e-3; a wrong weight, a flipped bit or a NaN differs by more. The tolerance with which a worker chooses its
execution mode (models.TOLERANCE) is stricter, so that a worker never chooses a mode that fails here."""


class StageWeights:
    """The weights of a stage as a leader sends them: a beginning in memory, and ranges of a file. Only a part is in memory at a time.

    Attributes:
        size: in bytes.
        sha256: in hexadecimal digits.
    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, head: bytes = b"", file: TensorFile | None = None, ranges: Sequence[TensorEntry] = ()) -> None:
        self._head = head
        self._file = file
        self._ranges = tuple(ranges)
        self.size = len(head) + sum(each.size for each in ranges)
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk.numpy().data)
        self.sha256 = digest.hexdigest()

    def chunks(self) -> Iterator[Tensor]:
        """The bytes in chunks to send, uint8 [N] each. Reads each when it is asked for.

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        chunk = bytearray(self._head)
        for each in self._ranges:
            for at in range(0, each.size, _CHUNK_BYTES):
                expected = min(_CHUNK_BYTES, each.size - at)
                assert self._file is not None, "the ranges are of a file"
                found = os.pread(self._file.fileno(), expected, each.offset + at)
                if len(found) < expected:
                    raise OSError("a file with weights has become shorter; load the version again")
                chunk += found
                if len(chunk) >= _CHUNK_BYTES:
                    yield torch.frombuffer(chunk, dtype=torch.uint8)
                    chunk = bytearray()
        if chunk:
            yield torch.frombuffer(chunk, dtype=torch.uint8)


@dataclass(frozen=True)
class StagePlan:
    """One stage of one version.

    Attributes:
        number: of the version, by which workers know its stages. The version's name is `spec.version`.
        self_test_input: one row; none for a stage in Python, which tests itself.
        self_test_output: the output of this stage for `self_test_input`, computed in float32.
        tuning: precision and optimization that workers use.
    """

    spec: StageSpec
    weights: StageWeights
    self_test_input: Tensor
    self_test_output: Tensor
    number: int = 1
    tuning: Tuning = NO_TUNING

    def assignment(self, max_batch_size: int, window: int) -> StageAssignment:
        """The message that tells a worker to load this stage."""
        tuning = self.tuning
        return StageAssignment(
            spec=self.spec.to_json(),
            weights_bytes=self.weights.size,
            weights_sha256=self.weights.sha256,
            max_batch_size=max_batch_size,
            window=window,
            version=self.number,
            precision=tuning.precision,
            optimize=tuning.optimize,
            edge_dtype=tuning.edge_dtype,
        )

    def digest(self, max_batch_size: int) -> str:
        """See `StageAssignment.digest`."""
        return self.assignment(max_batch_size, 1).digest

    @property
    def sent_test_input(self) -> Tensor:
        """`self_test_input` as the worker receives it."""
        rows = self.self_test_input
        return rows if self.spec.is_first else rows.to(self._travels_as(rows.dtype))

    @property
    def output_dtype(self) -> torch.dtype:
        """dtype of the output as the worker returns it."""
        computed = self.self_test_output.dtype
        return computed if self.spec.is_last else self._travels_as(computed)

    def _travels_as(self, dtype: torch.dtype) -> torch.dtype:
        return EDGE_DTYPES[self.tuning.edge_dtype] if dtype == torch.float32 else dtype

    @property
    def _precision(self) -> str:
        """The precision that decides the tolerance: the lower one of computing and of the edges. "auto" may be any."""
        computing = "bfloat16" if self.tuning.precision == "auto" else self.tuning.precision
        edges = "float32" if self.spec.is_first and self.spec.is_last else self.tuning.edge_dtype
        return max(computing, edges, key=lambda each: (_TOLERANCE[each], each not in ("float32", "tf32")))

    def check_self_test(self, output: Tensor | None) -> str | None:
        """Compare a worker's self-test output with the reference. Returns what is wrong with it; None if it is correct."""
        expected, spec = self.self_test_output, self.spec
        if isinstance(spec, ObjectStageSpec):
            return self._check_objects(output, spec)
        if output is None or output.shape != expected.shape or output.dtype != self.output_dtype:
            found = "nothing" if output is None else f"{output.dtype} {tuple(output.shape)}"
            return f"expected {self.output_dtype} {tuple(expected.shape)}, got {found}"
        try:
            return self._deviates(deviation_of_rows(output.to(expected.dtype), expected, spec, self._precision))
        except BundleError as error:
            return str(error)

    def _check_objects(self, output: Tensor | None, spec: ObjectStageSpec) -> str | None:
        assert spec.bundle is not None, "a stage in Python has no self-test here"
        try:
            assert output is not None, "a worker returns it with the result"
            (found,), (expected,) = (OBJECT_ROWS.decoded(each) for each in (output, self.self_test_output))
            rows = packed_output(spec.bundle, found)
            return self._deviates(
                deviation_of_rows(rows, packed_output(spec.bundle, expected), spec.bundle, self._precision)
            )
        except (ModelError, LookupError, TypeError, ValueError) as error:
            return f"the output is not that of the bundle: {error}"

    def _deviates(self, off: float) -> str | None:
        limit = _TOLERANCE[self._precision]
        if not off <= limit:  # also true for not-a-number
            return f"the output deviates from the reference by {off:.3g}; at most {limit:g} is allowed"
        return None


@dataclass(frozen=True)
class BundlePlan(StagePlan):
    """A stage of a bundle that is the whole model."""

    spec: BundleStageSpec


def make_bundle_plan(
    bundle: Bundle, num_stages: int, tuning: Tuning = NO_TUNING, number: int = 1
) -> tuple[BundlePlan, ...]:
    """The stages of a bundle, cut at its own positions if it was made with this number of stages.

    The weights stay in its file. With other positions the reference outputs are computed here.

    Args:
        number: by which workers know these stages.
    Raises:
        ModelError: the model cannot be cut there, computes NaN or infinity.
    """
    graphs, outputs = _stages_of(bundle, cuts_of(bundle.manifest, bundle.graph, num_stages))
    specs = stage_specs(bundle.manifest, graphs)
    tensors: Sequence[Tensor] = [bundle.self_test[f"input.{node.name}"] for node in bundle.graph.inputs]
    plans = []
    for spec, stage, output in zip(specs, graphs, outputs, strict=True):
        rows = spec.input_rows.pack(tensors)
        file = bundle.weights_file
        sent = StageWeights(stage_head(stage), file, [file.entries[node.key] for node in weights_in_order(stage)])
        plans.append(BundlePlan(spec, sent, rows, spec.output_rows.pack(output), number, tuning))
        logger.debug(
            "stage=%d blocks=%s..%s weights_mb=%.1f", spec.index, spec.blocks[0], spec.blocks[-1], sent.size / 1e6
        )
        tensors = output
    return tuple(plans)


def _stages_of(bundle: Bundle, cuts: Sequence[int]) -> tuple[tuple[Graph, ...], list[tuple[Tensor, ...]]]:
    """The stages, and the reference output of each."""
    stages = bundle.graph.cut(cuts)
    if tuple(cuts) == bundle.manifest.cuts:
        return stages, [
            tuple(bundle.self_test[f"boundary.{index}.{place}"] for place in range(len(stage.outputs)))
            for index, stage in enumerate(stages)
        ]
    values = tuple(bundle.self_test[f"input.{node.name}"] for node in bundle.graph.inputs)
    outputs: list[tuple[Tensor, ...]] = []
    for stage in stages:
        with torch.inference_mode():
            values = bundle.build(stage)(*values)
        outputs.append(values)
    if any(value.is_floating_point() and not value.isfinite().all().item() for value in values):
        raise WeightsError(
            f"invalid weights {bundle.manifest.version}: the model computes infinity or NaN for a test input"
        )
    return stages, outputs
