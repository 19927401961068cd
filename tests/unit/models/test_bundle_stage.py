"""Stages of bundles as leaders send them and workers load them."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from multiworld_serving.models.bundle.files import Bundle, read_bundle
from multiworld_serving.models.bundle.stage import load_bundle_stage
from multiworld_serving.models.errors import ModelError
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan, make_bundle_plan
from tests.bundles import PREVIEW, Text, classifier_bundle, text_bundle
from tests.resnets import bundle_spec, sent_weights
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
            for plan in make_bundle_plan(bundle, num_stages):
                found = received(plan)(found)
        torch.testing.assert_close(found, expected)


def received(plan: BundlePlan) -> torch.nn.Module:
    """The stage as a worker loads it from the messages of a leader."""
    assignment = plan.assignment(8, 2)
    sent = sent_weights(plan)
    assert hashlib.sha256(sent.numpy().data).hexdigest() == assignment.weights_sha256
    assert len(sent) == assignment.weights_bytes
    return load_bundle_stage(bundle_spec(assignment.spec), sent)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "tokens"), [(1, 2), (3, 9), (8, 32)])
def test_stages_of_a_text_model_compute_what_the_model_computes(
    text: Bundle, num_stages: int, count: int, tokens: int
) -> None:
    plans = make_bundle_plan(text, num_stages)
    ids = torch.randint(0, 50, (count, tokens))
    mask = ids > 10
    values = plans[0].spec.input_rows.pack([ids, mask])
    with torch.inference_mode():
        for plan in plans:
            values = received(plan)(values)
        expected = Text().eval()(ids, mask)
    assert [each.name for each in text.manifest.outputs] == list(expected)
    vector, counts = plans[-1].spec.output_rows.unpack(values)
    torch.testing.assert_close(vector, expected["vector"], rtol=1e-5, atol=1e-6)
    assert torch.equal(counts, expected["count"])


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_self_test_accepts_the_stage_and_refuses_other_weights(classifier: Bundle, num_stages: int) -> None:
    for plan in make_bundle_plan(classifier, num_stages):
        stage = received(plan)
        with torch.inference_mode():
            assert plan.check_self_test(stage(plan.self_test_input)) is None
            for weight in stage.buffers():
                weight.mul_(1.5)
            assert plan.check_self_test(stage(plan.self_test_input)) is not None


def refusal(spec: str, sent: bytes) -> str:
    """Message of a worker that refuses what a leader has sent: one short line."""
    with pytest.raises(ModelError) as error:
        load_bundle_stage(bundle_spec(spec), torch.tensor(bytearray(sent), dtype=torch.uint8))
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


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
    plan = make_bundle_plan(classifier, 2)[0]
    fields = json.loads(plan.spec.to_json())
    SPECS[case](fields)
    refusal(json.dumps(fields), bytes(sent_weights(plan)))


@pytest.mark.parametrize("text", ["", "5", "{}", "[" * 100_000])
def test_text_that_is_no_description_is_refused_with_one_line(text: str) -> None:
    assert "stage description is" in refusal(text, b"")


def test_worker_refuses_a_hostile_graph_before_it_computes_anything(classifier: Bundle) -> None:
    graph = json.dumps(HOSTILE["operators: operator that is not allowed"]).encode()
    spec = make_bundle_plan(classifier, 1)[0].spec.to_json()
    assert "not allowed" in refusal(spec, len(graph).to_bytes(8, "little") + graph)


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
    plan = make_bundle_plan(classifier, 1)[0]
    refusal(plan.spec.to_json(), SENT[case](bytes(sent_weights(plan))))


def test_other_precision_tolerates_other_integers(text: Bundle) -> None:
    plan = make_bundle_plan(text, 1)[0]
    vector, count = plan.spec.output_rows.unpack(plan.self_test_output)
    rows_format = plan.spec.output_rows
    other = rows_format.pack([vector, count + 1])
    assert "deviates" in (plan.check_self_test(other) or "")
    lower = dataclasses.replace(plan, tuning=dataclasses.replace(plan.tuning, precision="bfloat16", optimize="fused"))
    assert lower.check_self_test(other) is None
