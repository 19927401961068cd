"""Execution modes of a stage are close to the reference."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from multiworld_serving.models.bundle.stage import BundleStage
from multiworld_serving.models.errors import ModelError, StageError
from multiworld_serving.models.optimize import folding, tuning
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation
from multiworld_serving.models.optimize.fusing import FusedConv, Workload, fusable, torch_threads
from multiworld_serving.models.optimize.tuning import Tuning
from tests.resnets import plan_of, sent_stage
from tests.unit.models.models_loaded import IMAGE_SIZE, images, loaded

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not fusable(CPU, torch.float32), reason="torch has no usable oneDNN")


def folded(stage: BundleStage, dtype: torch.dtype = torch.float32, *, fused: bool = False) -> BundleStage:
    workload = Workload(stage.spec.input_rows.row_shape or (), 4, (1, 2))
    return folding.folded(stage, workload, dtype, fused=fused)


def through(
    name: str, num_stages: int, make: Callable[[BundleStage], Callable[[Tensor], Tensor]], batch: Tensor
) -> list[Tensor]:
    """The output of each converted stage for the reference input of that stage."""
    outputs = []
    for plan in plan_of(loaded(name), num_stages):
        stage = sent_stage(plan)
        output = make(stage)(batch)
        assert output.dtype == torch.float32
        assert output.is_contiguous()
        outputs += [output, batch := stage(batch)]
    return outputs


@pytest.mark.parametrize(("name", "num_stages"), [("resnet18", 3), ("resnet50", 1)])
@torch.inference_mode()
def test_folded_stages_equal_the_reference_within_the_tolerance(name: str, num_stages: int) -> None:
    outputs = through(name, num_stages, folded, images(3))
    for output, expected in pairs(outputs):
        assert deviation(output, expected) <= TOLERANCE["float32"] / 10


@needs_onednn
@pytest.mark.parametrize(("name", "num_stages"), [("resnet18", 1), ("resnet18", 10), ("resnet50", 3)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@torch.inference_mode()
def test_fused_stages_equal_the_reference_and_keep_their_input(
    name: str, num_stages: int, layout: torch.memory_format
) -> None:
    """Also if the first block adds to its own input, and if that is already channels-last."""

    def through_fused(stage: BundleStage) -> Callable[[Tensor], Tensor]:
        fused = folded(stage, fused=True)

        def run(batch: Tensor) -> Tensor:
            given = batch.contiguous(memory_format=layout if batch.ndim == 4 else torch.contiguous_format)
            output: Tensor = fused(given)
            assert torch.equal(given, batch)
            return output

        return run

    for output, expected in pairs(through(name, num_stages, through_fused, images(3))):
        assert deviation(output, expected) <= TOLERANCE["float32"] / 10


@needs_onednn
@torch.inference_mode()
def test_fused_convolution_uses_the_preferred_layout_for_batch_size_and_threads() -> None:
    """Weights in another layout would be reordered in every call. Equal layouts share the weights."""
    conv = nn.Conv2d(256, 512, 1).to(memory_format=torch.channels_last)

    def fused_for(max_batch_size: int, threads: tuple[int, ...]) -> FusedConv:
        window = (conv.padding, conv.stride, conv.dilation, conv.groups)
        workload = Workload((256, 14, 14), max_batch_size, threads)
        return FusedConv(conv.weight.detach(), conv.bias, window, ("none", [], ""), workload, (2, 256, 14, 14), 2)

    fused = fused_for(8, (1, 2, 3))
    for threads in (1, 2, 3):
        for rows in (1, 8):
            batch = torch.randn(rows, 256, 14, 14).contiguous(memory_format=torch.channels_last)
            with torch_threads(threads):
                window = (conv.padding, conv.stride, conv.dilation, conv.groups)
                wanted = torch.ops.mkldnn._reorder_convolution_weight(conv.weight, *window, batch.shape)
                assert raw(fused.weight.wanted_for(rows > 1)) == raw(wanted)
                assert torch.allclose(fused(batch), conv(batch), atol=1e-4)
    assert 1 <= fused.weight.num_layouts <= 6
    assert fused_for(1, (1,)).weight.num_layouts == 1


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


def pairs(values: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(values[::2], values[1::2], strict=True))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@torch.inference_mode()
def test_reduced_precision_differs_from_the_reference_within_its_tolerance(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float16
    for output, expected in pairs(through("resnet18", 2, lambda stage: folded(stage, dtype), images(2))):
        off = deviation(output, expected, probabilities=expected.ndim == 2)
        assert 0 < off <= TOLERANCE[precision]


@torch.inference_mode()
def test_folded_normalization_is_exact_at_the_borders() -> None:
    """With the mean folded into the weights, the convolution's zero padding would mean black instead of the mean."""
    stage = sent_stage(plan_of(loaded("resnet18"), 10)[0])
    black = torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8)
    expected, output = stage(black), folded(stage)(black)
    assert float((output - expected).abs()[..., 0, :].max()) <= 1e-5 * float(expected.abs().max())
    assert deviation(output, expected) <= TOLERANCE["float32"] / 10


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
