"""Execution modes of a stage are close to the reference."""

import ctypes

import pytest
import torch
from torch import Tensor, nn

from multiworld_serving.models.errors import ModelError, StageError
from multiworld_serving.models.optimize import tuning
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation
from multiworld_serving.models.optimize.fusing import FusedConv, Workload, fusable, torch_threads
from multiworld_serving.models.optimize.tuning import Tuning

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not fusable(CPU, torch.float32), reason="torch has no usable oneDNN")


@needs_onednn
@torch.inference_mode()
def test_fused_convolution_uses_the_preferred_layout_for_batch_size_and_threads() -> None:
    """Weights in another layout would be reordered in every call. Equal layouts share the weights."""
    conv = nn.Conv2d(256, 512, 1).to(memory_format=torch.channels_last)

    def fused_for(max_batch_size: int, threads: tuple[int, ...]) -> FusedConv:
        window = (conv.padding, conv.stride, conv.dilation, conv.groups)
        workload = Workload(max_batch_size, threads)
        return FusedConv(conv.weight.detach(), conv.bias, window, None, workload, (2, 256, 14, 14), 2)

    fused = fused_for(8, (1, 2, 3))
    for threads in (1, 2, 3):
        for rows in (1, 8):
            batch = torch.randn(rows, 256, 14, 14).contiguous(memory_format=torch.channels_last)
            with torch_threads(threads):
                window = (conv.padding, conv.stride, conv.dilation, conv.groups)
                wanted = torch.ops.mkldnn._reorder_convolution_weight(conv.weight, *window, batch.shape)
                assert raw(fused.weight_for(rows)) == raw(wanted)
                assert torch.allclose(fused(batch), conv(batch), atol=1e-4)


def raw(packed: Tensor) -> bytes:
    """The bytes of a tensor in oneDNN's own layout."""
    return ctypes.string_at(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))


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
