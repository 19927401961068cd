"""Execution modes of a stage are close to the reference."""

import pytest
import torch

from multiworld_serving.models.errors import ModelError, StageError
from multiworld_serving.models.optimize import tuning
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation
from multiworld_serving.models.optimize.fusing import torch_threads
from multiworld_serving.models.optimize.tuning import Tuning

CPU = torch.device("cpu")


def test_thread_count_is_restored_after_a_block() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with pytest.raises(ModelError), torch_threads(before + 1):
        raise ModelError
    assert torch.get_num_threads() == before


# -- tuning -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fast", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_bfloat16_only_if_the_device_supports_it(
    monkeypatch: pytest.MonkeyPatch, fast: bool, expected: str
) -> None:
    monkeypatch.setattr(tuning, "has_native_bfloat16", lambda device: fast)
    assert Tuning("auto", "fused").stage_precision(CPU) == expected
    assert Tuning("auto", "eager").stage_precision(CPU) == "float32"
    assert Tuning("float16", "compile").stage_precision(CPU) == "float16"


@pytest.mark.parametrize(
    ("precision", "optimize", "word"),
    [("int8", "fused", "int8"), ("float32", "fast", "fast"), ("bfloat16", "eager", "choose optimize fused")],
)
def test_invalid_tuning_is_refused(precision: str, optimize: str, word: str) -> None:
    with pytest.raises(StageError, match=word):
        Tuning(precision, optimize)


# -- deviation --------------------------------------------------------------------------------------------------------------


def test_deviation_of_probabilities_equals_that_of_their_logits() -> None:
    logits = torch.linspace(-10, 10, 21).unsqueeze(0)
    off = logits.clone()
    off[0, 0] += 0.2
    assert deviation(off.softmax(1), logits.softmax(1), probabilities=True) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("bad", [float("nan"), -1.0, 7.0])
def test_deviation_of_invalid_probabilities_exceeds_any_tolerance(bad: float) -> None:
    expected = torch.full((1, 4), 0.25)
    output = expected.clone()
    output[0, 2] = bad
    assert not deviation(output, expected, probabilities=True) <= max(TOLERANCE.values())
