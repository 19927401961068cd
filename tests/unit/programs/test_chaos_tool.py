"""What the fault injection counts as lost, wrong or possible."""

from typing import Any

import numpy as np
import pytest

from multiworld_serving.testing.chaos.campaign import CampaignResult, Injection, Plan
from multiworld_serving.testing.chaos.faults import BY_NAME
from multiworld_serving.testing.chaos.report import summarize
from multiworld_serving.testing.load.clients import Load, Sample
from multiworld_serving.testing.load.requests import ReferenceRequest

QUESTION = ReferenceRequest(b"", expected={1: 0.5, 2: 0.3, 3: 0.1})


ARRAY = np.linspace(-1, 1, 8, dtype=np.float32)


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ({1: 0.5, 2: 0.3, 3: 0.1}, {1: 0.5001, 2: 0.2999, 3: 0.1}),
        ({1: 0.5, 2: 0.3, 3: 0.1}, {1: 0.5, 2: 0.3, 4: 0.1}),  # classes of nearly equal probability swap ranks
        ({"y": ARRAY}, {"y": ARRAY + 1e-4}),
        ({"body": '{"spam": 0.25}'}, {"body": '{"spam": 0.25001}'}),
    ],
)
def test_answer_is_right_when_it_differs_by_rounding(expected: dict[Any, Any], answer: dict[Any, Any]) -> None:
    assert ReferenceRequest(b"", expected=expected).find_mismatch(answer) == ""


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ({1: 0.5, 2: 0.3, 3: 0.1}, {1: 0.4, 2: 0.4, 3: 0.1}),
        ({1: 0.5, 2: 0.3, 3: 0.1}, {7: 0.5, 8: 0.3, 9: 0.1}),
        ({1: 0.5, 2: 0.3, 3: 0.1}, {}),
        ({"y": ARRAY}, {"y": ARRAY[::-1]}),
        ({"y": ARRAY}, {"y": ARRAY[:4]}),
        ({"y": ARRAY}, {}),
        ({"body": '{"spam": 0.25}'}, {"body": '{"spam": 0.5}'}),
        ({"body": '{"spam": 0.25}'}, {"body": '{"ham": 0.25}'}),
    ],
)
def test_answer_is_wrong_when_it_belongs_to_another_request(expected: dict[Any, Any], answer: dict[Any, Any]) -> None:
    assert ReferenceRequest(b"", expected=expected).find_mismatch(answer).startswith("wrong answer")


@pytest.mark.parametrize(
    ("sample", "fault", "until_s", "excused"),
    [
        (Sample(12.0, 16.0, 503), "stage", 30.0, True),
        (Sample(12.0, 16.0, 503), "kill", 30.0, False),  # another replica was left
        (Sample(12.0, 16.0, 503), "stage", 20.0, False),  # the stage recovered within the grace
        (Sample(40.0, 1.0, 503), "stage", 30.0, False),  # long after it
        (Sample(12.0, 16.0, 504), "stage", 30.0, False),  # refused for another reason
    ],
)
def test_refusal_is_excused_only_when_a_stage_was_empty_beyond_the_grace(
    sample: Sample, fault: str, until_s: float, excused: bool
) -> None:
    result = CampaignResult(Plan([], [BY_NAME[fault]], grace_s=15.0))
    result.injections, result.load = [Injection(fault, (), 10.0, until_s)], Load([sample])
    report = summarize(result)
    assert (report.total.excused, report.total.failed) == ((1, 0) if excused else (0, 1))
    assert bool(report.verdict) != excused
