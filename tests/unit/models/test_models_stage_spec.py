"""Stage descriptions survive JSON, and malformed ones are refused."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from multiworld_serving.models import ModelError, StageSpec, split_model
from tests.unit.models.models_loaded import loaded


def middle() -> StageSpec:
    """Stage 1 of 3 of a ResNet-18 (10 blocks)."""
    return replace(split_model(loaded("resnet18"), 3)[1], first_block=3, end_block=6)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_spec_is_equal_after_a_round_trip(num_stages: int) -> None:
    for spec in split_model(loaded("resnet50"), num_stages):
        assert StageSpec.from_json(spec.to_json()) == spec
        assert hash(StageSpec.from_json(spec.to_json())) == hash(spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "vgg16"}, "expected one of resnet18"),
        ({"model": ["resnet18"]}, "expected one of resnet18"),
        ({"version": ""}, "version"),
        ({"version": 1}, "version"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"num_classes": 10**9}, "num_classes"),
        ({"num_classes": 10.0}, "num_classes is 10.0"),
        ({"num_stages": 11}, "num_stages is 11; expected a whole number from 1 to 10"),
        ({"num_stages": True}, "num_stages"),
        ({"index": -1}, "index is -1"),
        ({"index": 3}, "index is 3"),
        ({"index": "1"}, "index is '1'"),
        ({"first_block": 0}, "first_block is 0"),  # only stage 0 starts with the first block
        ({"first_block": 9}, "first_block is 9"),  # leaves no block for stage 2
        ({"first_block": 6}, "end_block is 6"),  # empty
        ({"end_block": 10}, "end_block is 10"),  # leaves no block for stage 2
        ({"index": 0, "first_block": 1}, "first_block is 1"),
        ({"index": 2, "end_block": 9}, "end_block is 9"),
        ({"mean": [0.5, 0.5]}, "mean"),
        ({"mean": "abc"}, "mean"),
        ({"mean": [0.5, 0.5, float("nan")]}, "mean"),
        ({"std": [1.0, 1.0, 0.0]}, "std"),
        ({"std": [1.0, 1.0, None]}, "std"),
    ],
)
def test_spec_is_refused_when_a_value_is_out_of_range(change: dict[str, Any], message: str) -> None:
    text = json.dumps(asdict(middle()) | change)
    with pytest.raises(ModelError, match=message):
        StageSpec.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "[" * 100_000])
def test_spec_is_refused_when_the_text_is_not_a_json_object(text: str) -> None:
    with pytest.raises(ModelError, match="stage description"):
        StageSpec.from_json(text)


def test_spec_is_refused_when_fields_are_missing_or_unknown() -> None:
    fields = asdict(middle())
    without = {name: value for name, value in fields.items() if name != "version"}
    with pytest.raises(ModelError, match=r"lacks \['version'\]"):
        StageSpec.from_json(json.dumps(without))
    with pytest.raises(ModelError, match=r"unknown \['precision'\]"):
        StageSpec.from_json(json.dumps(fields | {"precision": "int4"}))
