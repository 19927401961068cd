"""Stages of bundles as leaders send them and workers load them."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multiworld_serving.models.bundle.files import Bundle, read_bundle
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.stage import BundleStageSpec, load_bundle_stage
from multiworld_serving.models.errors import BundleError, ModelError, StageError
from multiworld_serving.server.versions.stage_plan import StagePlan
from tests.bundles import PREVIEW, Text, classifier_bundle, text_bundle
from tests.cut_bundles import bundle_plan
from tests.resnets import sent_weights
from tests.unit.models.hostile_graphs import HOSTILE


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return text_bundle(tmp_path_factory.mktemp("text") / "bundle")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return classifier_bundle(tmp_path_factory.mktemp("classifier") / "bundle")


def test_bundle_of_the_preview_release_is_served() -> None:
    bundle = read_bundle(PREVIEW)
    values, expected = bundle.self_test["input.images"], bundle.self_test["boundary.1.0"]
    for num_stages in (1, 2, 3):
        found = values
        with torch.inference_mode():
            for plan in bundle_plan(bundle, num_stages):
                found = received(plan)(found)
        torch.testing.assert_close(found, expected)


_READS = """
import sys
from pathlib import Path
import torch
from multiworld_serving.models.bundle.files import read_bundle
from multiworld_serving.models.bundle.stage import BundleStage, stage_specs
from multiworld_serving.models.optimize.optimizing import optimize
from multiworld_serving.models.optimize.tuning import Tuning
bundle = read_bundle(Path(sys.argv[1]))
(spec,) = stage_specs(bundle.manifest, [bundle.graph])
stage = BundleStage(spec, bundle.build(bundle.graph))
assert optimize(stage, 2, Tuning(optimize="fused"), torch.device("cpu")).mode.method == "fused"
print("torch._dynamo" in sys.modules)
"""


def test_torch_does_not_import_its_compiler_when_a_bundle_is_read_and_fused() -> None:
    command = [sys.executable, "-c", _READS, str(PREVIEW)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def received(plan: StagePlan) -> torch.nn.Module:
    """The stage as a worker loads it from the messages of a leader."""
    assignment = plan.assignment(8, 2)
    sent = sent_weights(plan)
    assert hashlib.sha256(sent.numpy().data).hexdigest() == assignment.weights_sha256
    assert len(sent) == assignment.weights_bytes
    return load_bundle_stage(BundleStageSpec.from_json(assignment.spec), sent)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "tokens"), [(1, 2), (3, 9), (8, 32)])
def test_stages_of_a_text_model_compute_what_the_model_computes(
    text: Bundle, num_stages: int, count: int, tokens: int
) -> None:
    plans = bundle_plan(text, num_stages)
    ids = torch.randint(0, 50, (count, tokens))
    mask = ids > 10
    values = plans[0].spec.input_rows.pack([ids, mask])
    with torch.inference_mode():
        for plan in plans:
            values = received(plan)(values)
        expected = Text().eval()(ids, mask)
    vector, counts = plans[-1].spec.output_rows.unpack(values)
    torch.testing.assert_close(vector, expected["vector"], rtol=1e-5, atol=1e-6)
    assert torch.equal(counts, expected["count"])


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_self_test_accepts_the_stage_and_refuses_other_weights(classifier: Bundle, num_stages: int) -> None:
    for plan in bundle_plan(classifier, num_stages):
        stage = received(plan)
        with torch.inference_mode():
            assert plan.check_self_test(stage(plan.self_test_input)) is None
            for weight in stage.buffers():
                weight.mul_(1.5)
            assert plan.check_self_test(stage(plan.self_test_input)) is not None


def test_description_survives_json(text: Bundle) -> None:
    for plan in bundle_plan(text, 2):
        found = BundleStageSpec.from_json(plan.spec.to_json())
        assert found == plan.spec
        assert found.part == plan.spec.part


SPECS: dict[str, Callable[[dict[str, Any]], object]] = {
    "field unknown": lambda spec: spec.update(code="import os"),
    "stage beyond the last": lambda spec: spec.update(index=9),
    "number of stages": lambda spec: spec.update(num_stages=1 << 40),
    "unknown dimension": lambda spec: spec["inputs"][0]["shape"].append("other"),
    "element type": lambda spec: spec["inputs"][0].update(dtype="object"),
    "row of a terabyte": lambda spec: spec["inputs"][0].update(shape=["batch", 1 << 30, 1 << 10]),
    "other outputs": lambda spec: spec["outputs"][0].update(dtype="int64"),
    "other inputs": lambda spec: spec["inputs"][0].update(name="other"),
}


@pytest.mark.parametrize("case", SPECS)
def test_worker_refuses_a_hostile_description_with_one_line(classifier: Bundle, case: str) -> None:
    plan = bundle_plan(classifier, 2)[0]
    fields = json.loads(plan.spec.to_json())
    SPECS[case](fields)
    with pytest.raises(ModelError) as error:
        load_bundle_stage(BundleStageSpec.from_json(json.dumps(fields)), sent_weights(plan))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "5", "{}", "[" * 100_000])
def test_text_that_is_no_description_is_refused_with_one_line(text: str) -> None:
    with pytest.raises(StageError, match="stage description is") as error:
        BundleStageSpec.from_json(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_worker_refuses_a_hostile_graph_before_it_computes_anything() -> None:
    graph = json.dumps(HOSTILE["operators: operator that is not allowed"]).encode()
    sent = torch.tensor(bytearray(len(graph).to_bytes(8, "little") + graph), dtype=torch.uint8)
    image = TensorSpec("x", "float32", ("batch", 4, 6, 6))
    spec = BundleStageSpec(
        model="hostile",
        version="1",
        index=0,
        num_stages=1,
        inputs=(image,),
        outputs=(image,),
        dimensions={"batch": (1, 8)},
        probabilities=False,
    )
    with pytest.raises(ModelError, match="not allowed") as error:
        load_bundle_stage(spec, sent)
    assert "\n" not in str(error.value)


SENT: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda sent: b"",
    "no graph": lambda sent: bytes(len(sent)),
    "graph beyond the end": lambda sent: b"\xff" * 8 + sent[8:],
    "another graph": lambda sent: (64).to_bytes(8, "little") + b"[]".ljust(64) + sent,
    "weights missing": lambda sent: sent[:-1],
    "weights beyond the last": lambda sent: sent + b"0",
}


@pytest.mark.parametrize("case", SENT)
def test_worker_refuses_hostile_bytes_with_one_line(classifier: Bundle, case: str) -> None:
    plan = bundle_plan(classifier, 1)[0]
    changed = torch.tensor(bytearray(SENT[case](sent_weights(plan).numpy().tobytes())), dtype=torch.uint8)
    with pytest.raises(ModelError) as error:
        load_bundle_stage(plan.spec, changed)
    assert "\n" not in str(error.value)


def test_rows_of_another_format_are_refused(classifier: Bundle) -> None:
    stage = received(bundle_plan(classifier, 2)[1])
    with pytest.raises(BundleError, match="expected"):
        stage(torch.zeros(2, 3, dtype=torch.uint8))


def test_other_precision_tolerates_other_integers(text: Bundle) -> None:
    plan = bundle_plan(text, 1)[0]
    vector, count = plan.spec.output_rows.unpack(plan.self_test_output)
    rows_format = plan.spec.output_rows
    other = rows_format.pack([vector, count + 1])
    assert "deviates" in (plan.check_self_test(other) or "")
    lower = dataclasses.replace(plan, tuning=dataclasses.replace(plan.tuning, precision="bfloat16", optimize="fused"))
    assert lower.check_self_test(other) is None


def test_weights_file_may_be_gone_after_it_was_read(tmp_path: Path) -> None:
    bundle = classifier_bundle(tmp_path / "bundle")
    for file in (tmp_path / "bundle").iterdir():
        file.unlink()
    assert received(bundle_plan(bundle, 1)[0]) is not None
