"""A pipeline in Python as a version of the model: its stages, and those of the bundles in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch

from multiworld_serving.common.service.model_files import served_name
from multiworld_serving.common.service.predictor import ModelVersion, ServedModel
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.models.errors import StageSpecError
from multiworld_serving.models.export.independence import read_proven
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.models.stages.bundle_stage import input_object, output_object
from multiworld_serving.models.stages.objects import encode, rows_of
from multiworld_serving.models.stages.pipeline import PipelineDescription
from multiworld_serving.models.stages.stage import ObjectStageSpec
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan, StagePlan, StageWeights, make_bundle_plan
from multiworld_serving.server.leader.versions.version_table import VersionPlan

_SHOWN_DIGITS = 12


def open_pipeline(settings: LeaderSettings, tuning: Tuning, number: int = 1) -> tuple[ServedModel, VersionPlan]:
    """The pipeline whose description the settings have. Blocks: reads and checks the bundles in it.

    Raises:
        models.ModelError: a bundle cannot be loaded.
    """
    assert settings.pipeline is not None, "the supervisor or `main` has described it"
    description = msgspec.json.decode(settings.pipeline, type=PipelineDescription)
    name, version = served_name(settings), description.digest[:_SHOWN_DIGITS]
    digest = hashlib.sha256(description.digest.encode())
    stages: list[StagePlan] = []
    elements = description.stages * settings.stages if description.decoder else description.stages
    for position, each in enumerate(elements):
        spec = ObjectStageSpec(
            model=name,
            version=version,
            index=len(stages),
            num_stages=settings.stages,
            name=each.name,
            source=description.name,
            digest=description.digest,
            position=position,
            device=each.device,
            max_batch_size=each.max_batch_size,
            pad=each.pad,
            session_tokens=settings.session_tokens if description.decoder else 0,
        )
        if not each.bundle:
            nothing = torch.empty((0, 0), dtype=torch.uint8)
            stages.append(StagePlan(spec, StageWeights(), nothing, nothing, number, tuning))
            continue
        if not Path(each.bundle).exists():
            raise StageSpecError(
                f"{description.name}: there is no bundle {each.bundle}; make it with multiworld export"
            )
        bundle = read_proven(Path(each.bundle))
        bundle.manifest.check_batch_size(settings.max_batch_size)
        digest.update(bundle.digest.encode())
        for plan in make_bundle_plan(bundle, each.stages, tuning, number):
            stages.append(_of_bundle(plan, msgspec.structs.replace(spec, index=len(stages))))
    model = ServedModel(name, version, (), (), pipeline=description)
    return model, VersionPlan(ModelVersion(number, version, digest.hexdigest()), tuple(stages))


def _of_bundle(plan: BundlePlan, spec: ObjectStageSpec) -> StagePlan:
    """A part of a bundle, whose rows are objects in a pipeline."""
    part = plan.spec
    given, expected = input_object(part, plan.self_test_input), output_object(part, plan.self_test_output)
    return StagePlan(
        msgspec.structs.replace(spec, bundle=part),
        plan.weights,
        rows_of([encode(given)]),
        rows_of([encode(expected)]),
        plan.number,
        plan.tuning,
    )


def pipeline_limits(model: ServedModel) -> tuple[float, int]:
    """The longest wait of a batch that a stage asks for, in seconds, and the most batches that a worker computes at the same time."""
    stages = () if model.pipeline is None else model.pipeline.stages
    wait_s = max((each.max_wait_ms or 0.0 for each in stages), default=0.0) / 1e3
    return wait_s, max((each.concurrency for each in stages), default=1)
