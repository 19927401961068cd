"""What the fault injection counts as wrong, and how it starts a service."""

import os
from typing import Any

import numpy as np
import pytest

from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import start_program

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
        ({1: 0.5, 2: 0.3, 3: 0.1}, {7: 0.5, 8: 0.3, 9: 0.1}),
        ({1: 0.5, 2: 0.3, 3: 0.1}, {}),
        ({"y": ARRAY}, {"y": ARRAY[::-1]}),
        ({"body": '{"spam": 0.25}'}, {"body": '{"spam": 0.5}'}),
        ({"body": '{"spam": 0.25}'}, {"body": '{"ham": 0.25}'}),
    ],
)
def test_answer_is_wrong_when_it_belongs_to_another_request(expected: dict[Any, Any], answer: dict[Any, Any]) -> None:
    assert ReferenceRequest(b"", expected=expected).find_mismatch(answer).startswith("wrong answer")


def test_signal_for_the_driver_does_not_reach_the_service() -> None:
    """Ctrl-C goes to the whole process group of a terminal."""
    with start_program(["--version"]) as service:
        assert os.getpgid(service.pid) == service.pid
        service.communicate()
