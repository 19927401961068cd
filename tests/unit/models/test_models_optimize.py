"""Execution modes of a stage: close to the reference, selected by measurement, and never a faster wrong one."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from multiworld_serving.models import (
    NO_TUNING,
    TOLERANCE,
    BundleStage,
    BundleStageSpec,
    CompiledStageCache,
    ExecutionMode,
    ModelError,
    StageError,
    Tuning,
    compiles,
    deviation,
    may_be_compiled,
    optimize,
)
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.optimize import execution_modes
from multiworld_serving.models.optimize.execution_modes import StagePrecision, candidates
from multiworld_serving.models.optimize.folding import FoldedStage
from multiworld_serving.models.optimize.fusing import FusedConv, Workload, fusable, torch_threads
from multiworld_serving.models.optimize.selection import Trial, choose, fastest
from tests.resnets import plan_of, sent_stage
from tests.unit.models.models_loaded import IMAGE_SIZE, images, loaded

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not fusable(CPU, torch.float32), reason="torch has no usable oneDNN")
UNOPTIMIZED, EAGER, BFLOAT16 = ExecutionMode("none"), ExecutionMode("eager"), ExecutionMode("eager", "bfloat16")


def folded(stage: BundleStage, dtype: torch.dtype = torch.float32, *, fused: bool = False) -> FoldedStage:
    workload = Workload(stage.spec.input_rows.row_shape or (), 4, (1, 2))
    return FoldedStage(stage, workload, dtype, fused=fused)


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


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("num_stages", [1, 3])
@torch.inference_mode()
def test_folded_stages_equal_the_reference_within_the_tolerance(name: str, num_stages: int) -> None:
    outputs = through(name, num_stages, folded, images(3))
    for output, expected in pairs(outputs):
        assert deviation(output, expected) <= TOLERANCE["float32"] / 10


@needs_onednn
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("num_stages", [1, 3, 10])
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


@torch.inference_mode()
def test_folding_does_not_change_the_original_stage_and_input() -> None:
    stage, batch = sent_stage(plan_of(loaded("resnet18"), 1)[0]), images(2)
    weights = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    expected, before = stage(batch), batch.clone()
    folded(stage)(batch)
    assert torch.equal(batch, before)
    assert torch.equal(stage(batch), expected)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in stage.state_dict().items())


def test_folded_first_stage_rejects_input_that_is_not_a_uint8_rgb_batch() -> None:
    first = folded(sent_stage(plan_of(loaded("resnet18"), 2)[0]))
    with pytest.raises(ModelError, match="expected uint8"):
        first(torch.zeros(1, 3, 8, 8))


def test_unoptimized_stage_equals_the_reference_bit_for_bit() -> None:
    stage = sent_stage(plan_of(loaded("resnet18"), 1)[0])
    made = optimize(stage, (3, IMAGE_SIZE, IMAGE_SIZE), 8, NO_TUNING, CPU)
    assert made.mode == UNOPTIMIZED
    with torch.inference_mode():
        assert torch.equal(made.module(images(2)), stage(images(2)))


# -- selection --------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when a `Timed` module runs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed(nn.Module):
    def __init__(self, clock: Clock, takes_s: float, off: float = 0.0) -> None:
        super().__init__()
        self._clock, self._takes_s, self._off = clock, takes_s, off

    def forward(self, batch: Tensor) -> Tensor:
        self._clock.now_s += self._takes_s
        return batch * (1 + self._off)


def middle() -> BundleStageSpec:
    """Of a stage that is neither the first nor the last."""
    tensor = TensorSpec("x", "float32", ("batch", 3, 2, 2))
    return BundleStageSpec("m", "1", 1, 3, (tensor,), (tensor,), {"batch": (1, 8)}, False, "0" * 64)


def chosen(*ways: tuple[ExecutionMode, float, float], limit_s: float = 1e9) -> tuple[ExecutionMode, str]:
    """Which of (recipe, duration in seconds, deviation) is selected, and why."""
    clock = Clock()
    makers = [(recipe, lambda t=takes_s, o=off: Timed(clock, t, o)) for recipe, takes_s, off in ways]
    made = choose(makers, Timed(clock, 0.0), middle(), torch.ones(4, 3, 2, 2), CPU, limit_s, clock)
    return made.mode, made.why


def test_fastest_mode_is_selected_when_all_are_accurate() -> None:
    recipe, why = chosen((UNOPTIMIZED, 3.0, 0.0), (EAGER, 2.0, 1e-6), (BFLOAT16, 1.0, 1e-2))
    assert recipe == BFLOAT16
    assert "3000.0" in why
    assert "1000.0" in why


@pytest.mark.parametrize("off", [1e-3, 1.0, float("nan")])
def test_fast_inaccurate_mode_is_never_selected(off: float) -> None:
    recipe, why = chosen((UNOPTIMIZED, 3.0, 0.0), (EAGER, 0.001, off))
    assert recipe == UNOPTIMIZED
    assert "is allowed" in why


def test_simpler_mode_is_kept_when_the_gain_is_within_noise() -> None:
    assert chosen((UNOPTIMIZED, 1.0, 0.0), (EAGER, 0.99, 0.0))[0] == UNOPTIMIZED


def test_no_further_mode_is_tried_when_time_is_up() -> None:
    recipe, why = chosen((EAGER, 3.0, 0.0), (BFLOAT16, 1.0, 0.0), limit_s=1.0)
    assert recipe == EAGER
    assert "eager/bfloat16 no time to try" in why


def test_most_promising_mode_is_tried_first_when_time_is_short() -> None:
    recipe, why = chosen((UNOPTIMIZED, 3.0, 0.0), (EAGER, 2.0, 0.0), (BFLOAT16, 1.0, 0.0), limit_s=1.0)
    assert recipe == BFLOAT16
    assert "eager/float32 no time to try" in why


def test_unmeasured_mode_never_replaces_an_earlier_one() -> None:
    ways = [Trial(UNOPTIMIZED, nn.Identity()), Trial(EAGER, nn.Identity())]
    assert fastest(ways) is ways[0]


def test_auto_selects_a_mode_and_reports_its_measurements() -> None:
    plan = plan_of(loaded("resnet18"), 3)[1]
    stage = sent_stage(plan)
    made = optimize(stage, plan.input_shape, 2, Tuning(optimize="measure", limit_s=60), CPU)
    assert made.mode in candidates(Tuning("float32", "measure"), CPU)
    assert "none/float32" in made.why
    assert str(candidates(Tuning("float32", "measure"), CPU)[-1]) in made.why
    batch = torch.rand(2, *plan.input_shape)
    with torch.inference_mode():
        assert deviation(made.module(batch), stage(batch)) <= TOLERANCE["float32"]


@pytest.mark.parametrize(("fast", "expected"), [(True, (UNOPTIMIZED, EAGER, BFLOAT16)), (False, (UNOPTIMIZED, EAGER))])
def test_auto_tries_bfloat16_only_if_the_device_supports_it(
    monkeypatch: pytest.MonkeyPatch, fast: bool, expected: tuple[ExecutionMode, ...]
) -> None:
    monkeypatch.setattr(execution_modes, "has_native_bfloat16", lambda device: fast)
    monkeypatch.setattr(execution_modes, "fusable", lambda device, dtype: False)
    assert candidates(Tuning("auto", "measure"), CPU) == expected


def test_gpu_also_tries_graphs_when_compilation_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_modes, "has_native_bfloat16", lambda device: True)
    gpu, graphs = torch.device("cuda"), (ExecutionMode("graphed"), ExecutionMode("graphed", "bfloat16"))
    assert candidates(Tuning("auto", "measure"), gpu) == (UNOPTIMIZED, EAGER, BFLOAT16, *graphs)
    assert candidates(Tuning("bfloat16", "compile"), gpu) == (BFLOAT16, graphs[1])
    assert candidates(Tuning("bfloat16", "eager"), gpu) == (BFLOAT16,)


def test_failing_mode_is_skipped_except_for_the_first() -> None:
    clock = Clock()

    def refuse() -> nn.Module:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    sound = lambda: Timed(clock, 1.0)  # noqa: E731
    sample = torch.ones(4, 3, 2, 2)
    made = choose([(EAGER, sound), (BFLOAT16, refuse)], Timed(clock, 0.0), middle(), sample, CPU, 1e9, clock)
    assert made.mode == EAGER
    assert "eager/bfloat16 cannot be built (operation not permitted when stream is capturing)" in made.why
    with pytest.raises(RuntimeError, match="not permitted"):
        choose([(EAGER, refuse), (BFLOAT16, sound)], Timed(clock, 0.0), middle(), sample, CPU, 1e9, clock)


def test_convolutions_are_fused_if_device_and_precision_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_modes, "has_native_bfloat16", lambda device: True)
    monkeypatch.setattr(execution_modes, "fusable", lambda device, dtype: dtype == torch.float32)
    assert candidates(Tuning("auto", "eager"), CPU) == (ExecutionMode("fused"), BFLOAT16)


def test_only_the_requested_precision_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_modes, "fusable", lambda device, dtype: False)
    assert candidates(Tuning("bfloat16", "measure"), CPU) == (BFLOAT16,)
    assert candidates(Tuning("float32", "eager"), CPU) == (EAGER,)
    assert candidates(Tuning("auto", "none"), CPU) == (UNOPTIMIZED,)


@pytest.mark.parametrize(
    ("precision", "chosen", "expected"),
    [
        ("float32", "float32", False),
        ("bfloat16", "bfloat16", True),
        ("float16", "float16", True),
        ("auto", "bfloat16", True),
        ("auto", "float32", False),
    ],
)
def test_auto_compiles_what_cpus_compute_in_16_bits(
    precision: str, chosen: StagePrecision, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_modes, "has_native_bfloat16", lambda device: True)
    mode, tuning = ExecutionMode("fused", chosen), Tuning(precision, "auto")
    assert candidates(tuning, CPU) == candidates(Tuning(precision, "eager"), CPU)
    assert compiles(tuning, mode) == expected
    assert not compiles(tuning, ExecutionMode("compiled", chosen))
    assert not compiles(tuning, UNOPTIMIZED), "the rewritten graph was not accurate"
    assert not compiles(Tuning(precision, "eager"), mode)
    assert may_be_compiled(tuning, CPU) == (expected or precision == "auto")
    assert not may_be_compiled(tuning, torch.device("cuda"))


@pytest.mark.parametrize(
    ("precision", "optimize", "word"),
    [("int4", "eager", "int4"), ("float32", "fast", "fast"), ("bfloat16", "none", "choose optimize eager")],
)
def test_invalid_tuning_is_refused(precision: str, optimize: str, word: str) -> None:
    with pytest.raises(StageError, match=word):
        Tuning(precision, optimize)


def test_compile_cache_has_a_folder_when_the_user_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with an unknown user id: `Path.home` would raise, and no worker would start."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    assert CompiledStageCache().folder.is_absolute()
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/some")
    assert CompiledStageCache().folder == Path("/var/cache/some/multiworld/compiled")


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
