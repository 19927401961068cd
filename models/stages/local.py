"""A pipeline in one process, without a service: for `multiworld check` and for tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multiworld_serving.models.bundle.cutting import cuts_of
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.bundle.stage import BundleStage, stage_specs
from multiworld_serving.models.optimize.optimizing import OptimizedStage
from multiworld_serving.models.optimize.tuning import ExecutionMode
from multiworld_serving.models.stages.api import Bundle, InvalidInput, Request
from multiworld_serving.models.stages.bundle_stage import BundleObjects
from multiworld_serving.models.stages.objects import OBJECT_ROWS, encode, rows_of
from multiworld_serving.models.stages.pipeline import Pipeline
from multiworld_serving.models.stages.stage import ObjectStage, PythonStage

_ROWS = 32


class StageRun(NamedTuple):
    """How a stage has computed its rows.

    Attributes:
        seconds: without decoding and encoding if it is negligible.
        row_bytes: of its longest output row.
    """

    name: str
    seconds: float
    row_bytes: int


class LocalPipeline:
    """All stages of a pipeline, set up.

    Raises:
        ModelError, StageFailedError: a bundle cannot be read, or a stage cannot be set up.
    """

    def __init__(self, pipeline: Pipeline, device: str = "cpu") -> None:
        self.stages: list[tuple[str, ObjectStage]] = []
        described = pipeline.describe().stages
        for element, found in zip(pipeline.elements, described, strict=True):
            is_first, rows = not self.stages, found.max_batch_size or _ROWS
            if isinstance(element, Bundle):
                parts = _parts(found.bundle, element, torch.device(device), is_first=is_first)
                names = [found.name if len(parts) == 1 else f"{found.name}.{index}" for index in range(len(parts))]
                self.stages += zip(names, parts, strict=True)
            else:
                self.stages.append((found.name, PythonStage(element, found.device or device, rows, is_first=is_first)))

    def run(self, requests: Sequence[Request]) -> tuple[list[Any], list[StageRun]]:
        """The results of the last stage, and how each stage has run. Raises what a stage raises."""
        rows, runs = rows_of([encode(each) for each in requests]), []
        for name, stage in self.stages:
            began_s = time.perf_counter()
            with torch.inference_mode():
                rows = stage.compute(rows)
            runs.append(StageRun(name, time.perf_counter() - began_s, rows.shape[1]))
        return OBJECT_ROWS.decoded(rows), runs

    def result(self, request: Request) -> Any:
        """The result for one request. Raises InvalidInput if the pipeline does not accept it, and what a stage raises."""
        (found,), _ = self.run([request])
        if isinstance(found, InvalidInput):
            raise found
        return found


def _parts(path: str, element: Bundle, device: torch.device, *, is_first: bool) -> list[BundleObjects]:
    bundle = read_bundle(Path(path))
    graphs = bundle.graph.cut(cuts_of(bundle.manifest, bundle.graph, element.stages))
    parts = []
    for spec, graph in zip(stage_specs(bundle.manifest, graphs), graphs, strict=True):
        as_written = BundleStage(spec, bundle.build(graph)).to(device)
        module = OptimizedStage(as_written, ExecutionMode("eager"), "in one process")
        parts.append(BundleObjects(spec, module, device, element.pad, _ROWS, is_first=is_first and spec.is_first))
    return parts
