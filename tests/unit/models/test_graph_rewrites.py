"""Rewritten stages of bundles compute what the graph says: folded, fused, in lower precision, with several tensors and variable lengths."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from multiworld_serving.models.bundle.files import Bundle
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.stage import BundleStage, BundleStageSpec, load_bundle_stage, stage_specs
from multiworld_serving.models.errors import StageSpecError
from multiworld_serving.models.export.trace import Dynamic, capture
from multiworld_serving.models.optimize import optimizing, tuning
from multiworld_serving.models.optimize.convolutions import FusedConv, SmallConv, Workload
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation
from multiworld_serving.models.optimize.fusing import fusable
from multiworld_serving.models.optimize.optimizing import OptimizedStage, folded, optimize
from multiworld_serving.models.optimize.tuning import ExecutionMode, Tuning
from multiworld_serving.models.optimize.winograd import WinogradConv
from multiworld_serving.server.leader.versions.stage_plan import make_bundle_plan
from multiworld_serving.workers.compute.transfers import Transfers
from tests.bundles import classifier_bundle, exported_bundle, text_bundle
from tests.fakes.gpu import GPU
from tests.fakes.tf32 import use_processor_with_tf32
from tests.resnets import sent_weights

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not fusable(CPU, torch.float32), reason="torch has no usable oneDNN")
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]
ROWS = 3


def stages(bundle: Bundle) -> list[BundleStage]:
    specs = stage_specs(bundle.manifest, bundle.stages)
    return [BundleStage(spec, bundle.build(stage)) for spec, stage in zip(specs, bundle.stages, strict=True)]


def check(stage: BundleStage, made: nn.Module, rows: Tensor, dtype: torch.dtype) -> None:
    """Raise AssertionError unless `made` computes what `stage` does, within the tolerance, and keeps its input."""
    before = rows.clone()
    with torch.inference_mode():
        found, expected = (stage.spec.output_rows.unpack(each(rows)) for each in (made, stage))
    assert torch.equal(rows, before)
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == two.dtype
        assert one.shape == two.shape
        limit = TOLERANCE[str(dtype).removeprefix("torch.")]
        probabilities = stage.spec.probabilities and dtype != torch.float32
        assert deviation(one, two, probabilities=probabilities) <= limit


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_onednn)])
@pytest.mark.parametrize("make", [classifier_bundle, text_bundle])
def test_rewritten_stages_of_bundles_equal_the_reference(
    make: Callable[[Path], Bundle], dtype: torch.dtype, fused: bool, tmp_path: Path
) -> None:
    """Images with normalisation, and texts of variable length with several tensors at each boundary."""
    for stage in stages(make(tmp_path / "bundle")):
        rows = stage.spec.example(ROWS)
        made = folded(stage, Workload(4, (1, 2)), dtype, fused=fused and fusable(CPU, dtype))
        check(stage, made, rows, dtype)


# -- patterns ---------------------------------------------------------------------------------------------------------------


class Patterns(nn.Module):
    """What may be fused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(8))
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        self.alone = nn.BatchNorm2d(8)
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.same_for_all_rows = nn.Parameter(torch.randn(1, 8, 6, 6))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        first = functional.relu(self.convs[0](images * 0.5 - 0.25))
        second = functional.hardswish(self.norm(self.depthwise(first)))
        third = functional.relu(self.convs[1](second) + first)
        fourth = self.convs[2](third) + second + images
        kept = functional.gelu(self.convs[3](fourth))
        fifth = functional.relu(self.convs[4](kept) + kept)
        viewed = fifth.flatten(2)
        sixth = functional.silu(self.convs[5](fifth) + fifth)
        seventh = self.convs[6](sixth) + self.same_for_all_rows
        eighth = self.alone(self.convs[7](seventh) * kept + viewed.view(-1, 8, 6, 6))
        vectors = eighth.permute(0, 2, 3, 1)
        hidden = functional.gelu(self.linears[0](vectors))
        return self.linears[2](self.linears[1](hidden) + vectors), kept


def patterns() -> BundleStage:
    module = Patterns().eval()
    graph, weights = capture(module, [torch.randn(2, 8, 6, 6)], ["images"], max_batch_size=8)
    memory = torch.cat([each.flatten() for each in weights.values()])  # as received: all weights in one file
    parts = torch.split(memory, [each.numel() for each in weights.values()])
    weights = {key: part.view(each.shape) for (key, each), part in zip(weights.items(), parts, strict=True)}
    tensors = [TensorSpec(name, "float32", ("batch", *shape)) for name, shape in (("a", (6, 6, 8)), ("b", (8, 6, 6)))]
    spec = BundleStageSpec(
        *(0, 1, "patterns", "1"),
        inputs=(TensorSpec("images", "float32", ("batch", 8, 6, 6)),),
        outputs=tuple(tensors),
        dimensions={"batch": (1, 8)},
        probabilities=False,
    )
    return BundleStage(spec, graph.build(weights, CPU))


@needs_onednn
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_fused_patterns_equal_the_graph(dtype: torch.dtype, layout: torch.memory_format) -> None:
    if not fusable(CPU, dtype):
        pytest.skip("not supported by this processor")
    stage = patterns()
    made = folded(stage, Workload(4, (1, 2)), dtype, fused=True)
    for rows in (1, 4):
        batch = torch.randn(rows, 8, 6, 6, generator=torch.Generator().manual_seed(rows))
        check(stage, made, batch.contiguous(memory_format=layout), dtype)


@needs_onednn
def test_convolutions_are_fused_with_what_follows_them() -> None:
    made = folded(patterns(), Workload(4, (1, 2)), fused=True)
    modules = dict(made.module.named_modules())
    fused = [node for node in made.module.graph.nodes if node.op == "call_module"]
    assert sum(isinstance(modules[str(node.target)], FusedConv) for node in fused) == 9
    assert sum(len(node.args) > 1 for node in fused) == 4, "with an addition"


class Prepared(nn.Module):
    """Prepares images before a convolution."""

    def __init__(self, prepare: Callable[..., Tensor]) -> None:
        super().__init__()
        self.prepare, self.conv = prepare, nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.rand(1, 3, 1, 1))

    def forward(self, images: Tensor, more: Tensor) -> Tensor:
        output: Tensor = self.conv(self.prepare(images, more, self.mean))
        return output


@pytest.mark.parametrize(
    ("prepare", "after"),
    [
        (lambda images, _, mean: (images.double() / 255 - mean).float(), ["_to_copy_default_1"]),
        (lambda images, _, mean: functional.max_pool2d(images - mean, 3, 1, 1), ["sub_tensor"]),
        (lambda images, more, _: images.relu() + more, ["input_1", "relu_default"]),
        (lambda images, *_: images.relu() - images.abs(), ["input_0"]),
    ],
)
def test_images_become_channels_last_after_element_wise_preparation(
    prepare: Callable[..., Tensor], after: list[str], tmp_path: Path
) -> None:
    module, example = Prepared(prepare).eval(), (torch.randn(2, 3, 8, 9), torch.randn(2, 3, 8, 9))
    stage = stages(exported_bundle(module, example, tmp_path, inputs=("images", "more")))[0]
    made = folded(stage, Workload(4, (1,)))
    nodes = [node for node in made.module.graph.nodes if node.target is torch.ops.aten.contiguous.default]
    assert sorted(str(node.args[0]) for node in nodes) == after
    check(stage, made, stage.spec.input_rows.pack([torch.randn(3, 3, 8, 9), torch.randn(3, 3, 8, 9)]), torch.float32)


class Small(nn.Module):
    """A convolution with what is fused with it, and one of a single pixel."""

    def __init__(self, conv: nn.Conv2d, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.activation, self.last = conv, activation, nn.Conv2d(conv.out_channels, 4, 1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        made = self.activation(self.conv(images))
        if made.shape == images.shape:
            made = functional.relu(self.conv(made) + images) + self.conv(made)
        output: Tensor = self.last(made.mean((2, 3), keepdim=True)).sigmoid()
        return output


CONVS = {  # height and width, and a convolution of 6 channels
    "a square": (2, 2, nn.Conv2d(6, 6, 3, padding=1)),
    "a row": (1, 2, nn.Conv2d(6, 5, (1, 3), padding=(0, 1), bias=False)),
    "a pixel": (1, 1, nn.Conv2d(6, 6, 3, padding=1)),
    "with stride": (2, 2, nn.Conv2d(6, 8, 3, stride=2, padding=1)),
    "with dilation": (1, 1, nn.Conv2d(6, 8, 3, dilation=2, padding=2)),
    "of all pixels": (3, 3, nn.Conv2d(6, 8, 3)),
}
OTHERS = {
    "a larger matrix": (3, 3, nn.Conv2d(6, 6, 3, padding=1)),
    "a pixel that is not read": (3, 1, nn.Conv2d(6, 6, (2, 1), dilation=2)),
    "groups": (2, 2, nn.Conv2d(6, 6, 3, padding=1, groups=2)),
}


@needs_onednn
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", [*CONVS, *OTHERS])
def test_convolutions_of_a_few_pixels_are_products_with_a_matrix(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if not fusable(CPU, dtype):
        pytest.skip("not supported by this processor")
    *size, conv = (CONVS | OTHERS)[name]
    for activation in (functional.relu, functional.hardswish):
        folder = tmp_path / activation.__name__
        stage = stages(exported_bundle(Small(conv, activation).eval(), (torch.randn(2, 6, *size),), folder))[0]
        made = folded(stage, Workload(4, (1, 2)), dtype, fused=True)
        kinds = [type(each) for each in made.modules() if isinstance(each, FusedConv | SmallConv)]
        assert kinds[-1] is SmallConv
        assert set(kinds[:-1]) == {SmallConv if name in CONVS else FusedConv}
        for rows in (1, 4):
            check(stage, made, torch.randn(rows, 6, *size, generator=torch.Generator().manual_seed(rows)), dtype)


@needs_onednn
def test_convolutions_of_images_of_any_size_are_not_products_with_a_matrix(tmp_path: Path) -> None:
    sides = tuple(Dynamic((("images", dim),), 2, 8) for dim in (2, 3))
    module, example = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU()).eval(), torch.randn(2, 3, 2, 2)
    stage = stages(exported_bundle(module, (example,), tmp_path, inputs=("images",), dynamic=sides))[0]
    made = folded(stage, Workload(4, (1,)), fused=True)
    assert not any(isinstance(each, SmallConv) for each in made.modules())
    rows = stage.spec.input_rows.pack([torch.randn(2, 3, 7, 4)])
    check(stage, made, rows, torch.float32)


class Wide(nn.Module):
    """Convolutions for Winograd's algorithm, with what may be fused."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(128, 136, 3, padding=padding)
        self.second = nn.Conv2d(136, 136, 3, padding=1, bias=False)
        self.last = nn.Conv2d(136, 128, 3, padding=(0, padding))

    def forward(self, images: Tensor) -> Tensor:
        made = functional.relu(self.first(images))
        made = functional.relu(self.second(made) + made)
        output: Tensor = self.last(self.second(made) + made)
        return output


@needs_onednn
@pytest.mark.parametrize(("height", "width", "padding"), [(7, 14, 1), (12, 9, 1), (14, 14, 0), (7, 8, 2)])
def test_winograd_is_as_accurate_as_a_convolution(height: int, width: int, padding: int, tmp_path: Path) -> None:
    module, example = Wide(padding).eval(), torch.randn(2, 128, height, width)
    stage = stages(exported_bundle(module, (example,), tmp_path))[0]
    made = folded(stage, Workload(8, (1, 2)), fused=True)
    assert [type(each) for each in made.modules()].count(WinogradConv) == 4
    for rows in (1, 2, 8):
        batch = torch.randn(rows, 128, height, width, generator=torch.Generator().manual_seed(rows))
        with torch.inference_mode():
            exact = module.double()(batch.double())
            off = (made(batch) - exact).abs().max() / exact.abs().max()
        module.float()
        assert off < 5e-6  # with the points 0, 1, -1, 2 and -2 it is larger
        check(stage, made, batch, torch.float32)


@needs_onednn
def test_rows_of_a_batch_do_not_depend_on_each_other(tmp_path: Path) -> None:
    stage = stages(exported_bundle(Wide(1), (torch.randn(2, 128, 7, 7),), tmp_path))[0]
    made, batch = folded(stage, Workload(8, (1,)), fused=True), torch.randn(8, 128, 7, 7)
    with torch.inference_mode():
        expected = made(batch)
        batch[3] = math.inf
        found = made(batch)
        layer = next(each for each in made.modules() if isinstance(each, WinogradConv))
        larger = torch.randn(8, 128, 9, 12)
        torch.testing.assert_close(layer(larger), layer.direct(larger))  # no image of this stage has this size
    assert not found[3].isfinite().any()
    assert found[:3].equal(expected[:3])
    assert found[4:].equal(expected[4:])


def unsuited() -> dict[str, nn.Conv2d]:
    return {
        "stride": nn.Conv2d(128, 128, 3, stride=2, padding=1),
        "dilation": nn.Conv2d(128, 128, 3, padding=2, dilation=2),
        "groups": nn.Conv2d(256, 256, 3, padding=1, groups=2),
        "few channels": nn.Conv2d(128, 64, 3, padding=1),
        "another size": nn.Conv2d(128, 128, 5, padding=2),
    }


@needs_onednn
@pytest.mark.parametrize("name", unsuited())
def test_other_convolutions_do_not_use_winograd(name: str, tmp_path: Path) -> None:
    conv = unsuited()[name]
    stage = stages(
        exported_bundle(nn.Sequential(conv), (torch.randn(2, conv.in_channels, 12, 12),), tmp_path, inputs=("input",))
    )[0]
    assert not any(isinstance(each, WinogradConv) for each in folded(stage, Workload(8, (1,)), fused=True).modules())


class Additions(nn.Module):
    """Additions to the output of convolutions; the last use of a tensor is in the second and in the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, size, padding=size // 2) for size in (3, 1, 3, 1, 3, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        first = functional.relu(self.convs[0](images) + images)  # the input belongs to the caller
        second = functional.relu(self.convs[1](self.convs[2](first)) + first)
        third = functional.relu(self.convs[3](second) + second)  # it is also what is convolved
        viewed, fourth = third.flatten(1), functional.relu(self.convs[4](third) + third)
        fifth = self.convs[5](fourth)
        sixth = functional.relu(self.convs[0](fifth) + fourth)  # it is used again
        seventh = functional.relu(self.convs[1](sixth) + self.convs[2](fourth))
        return seventh, viewed


@needs_onednn
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_addition_overwrites_a_tensor_in_its_last_use(dtype: torch.dtype, tmp_path: Path) -> None:
    if not fusable(CPU, dtype):
        pytest.skip("not supported by this processor")
    stage = stages(exported_bundle(Additions(), (torch.randn(2, 8, 6, 6),), tmp_path))[0]
    made = folded(stage, Workload(4, (1, 2)), dtype, fused=True)
    assert [each.in_place for each in made.modules() if isinstance(each, FusedConv)].count(True) == 2
    for rows in (1, 4):
        check(stage, made, torch.randn(rows, 8, 6, 6, generator=torch.Generator().manual_seed(rows)), dtype)


def test_normalisation_is_folded_into_weights() -> None:
    made = folded(patterns(), Workload(4, (1,)))
    called = [str(node.target) for node in made.module.graph.nodes if node.op == "call_function"]
    assert sum("batch_norm" in name for name in called) == 1  # what follows an addition


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_onednn)])
@pytest.mark.parametrize("make", [classifier_bundle, text_bundle])
def test_rewritten_stage_does_not_keep_the_received_bytes_in_memory(
    make: Callable[[Path], Bundle], fused: bool, tmp_path: Path
) -> None:
    plan = make_bundle_plan(make(tmp_path / "bundle"), 1)[0]
    sent = sent_weights(plan)
    stage = load_bundle_stage(plan.spec, sent)
    received = sent.untyped_storage().data_ptr()
    assert {each.untyped_storage().data_ptr() for each in stage.buffers()} == {received}
    made = folded(stage, Workload(4, (1,)), fused=fused)
    rows = stage.spec.example(ROWS)
    with torch.inference_mode():
        expected = plan.spec.output_rows.unpack(stage(rows))
    assert received not in {each.untyped_storage().data_ptr() for each in made.buffers()}
    with torch.inference_mode():
        torch.testing.assert_close(plan.spec.output_rows.unpack(made(rows)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", ["raises", "lies"])
def test_bundle_is_computed_as_written_with_a_warning_when_a_rewrite_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    bundle = classifier_bundle(tmp_path / "bundle")

    class Wrong(BundleStage):
        def forward(self, rows: Tensor) -> Tensor:
            if fault == "raises":
                raise IndexError("of a rewrite")
            return torch.full_like(super().forward(rows), float("nan"))

    def wrong(stage: BundleStage, workload: Workload, dtype: torch.dtype, *, fused: bool) -> BundleStage:
        return Wrong(stage.spec, folded(stage, workload, dtype, fused=fused).module)

    monkeypatch.setattr(optimizing, "folded", wrong)
    stage = stages(bundle)[0]
    rows = stage.spec.example(ROWS)
    found = optimize(stage, 4, Tuning("float32", "fused"), CPU)
    assert str(found.mode) == "eager/float32"
    assert ("of a rewrite" if fault == "raises" else "nan off") in found.why
    assert f"stage 0 is computed as written, slower and in float32: {found.why}" in caplog.text
    check(stages(bundle)[0], found.module, rows, torch.float32)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_log_names_the_precision_of_the_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    stage = stages(classifier_bundle(tmp_path / "bundle"))[0]
    lowered = folded(stage, Workload(4, (1,)), dtype)
    for module in (lowered, stage.to(dtype)):  # the latter as of a model that was exported in this precision
        assert str(OptimizedStage(module, ExecutionMode("fused"), "fast")) == f"fused/{str(dtype)[6:]} (fast)"


# -- modes and deviations --------------------------------------------------------------------------------------------------


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
    [
        ("int8", "fused", "int8"),
        ("float32", "fast", "fast"),
        ("bfloat16", "eager", "choose optimize fused"),
        ("tf32", "eager", "choose optimize fused"),
    ],
)
def test_invalid_tuning_is_refused(precision: str, optimize: str, word: str) -> None:
    with pytest.raises(StageSpecError, match=word):
        Tuning(precision, optimize)


@pytest.mark.parametrize("convolutions", ["tf32", "ieee"])
def test_flags_of_the_process_are_the_same_after_a_stage_has_been_computed(convolutions: str) -> None:
    """Also flags of which torch refuses to read the old ones, as a stage in Python may set them."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    before = [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, matmul.fp32_precision]
    cudnn.conv.fp32_precision = convolutions
    try:
        for precision, expected in (("float32", False), ("tf32", True)):
            with ExecutionMode("fused", precision).active(GPU):
                assert (matmul.allow_tf32, cudnn.allow_tf32) == (expected, expected)
            assert [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision] == [convolutions, before[1]]
            assert matmul.fp32_precision == before[2]
    finally:
        cudnn.conv.fp32_precision = before[0]


def test_tf32_is_float32_on_devices_without_it() -> None:
    assert Tuning("tf32", "fused").stage_precision(CPU) == "float32"


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_gpu_that_rounds_to_tf32_computes_fused_stages_with_and_without_it(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stages(classifier_bundle(tmp_path / "bundle"))[0]
    rows = stage.spec.example(ROWS)
    with torch.inference_mode():
        expected = stage(rows)
    use_processor_with_tf32(monkeypatch)
    found = optimize(stage, 4, Tuning(precision, "fused"), CPU)
    assert str(found.mode) == f"fused/{precision}", found.why
    with torch.inference_mode():
        off = deviation(found(rows), expected, probabilities=stage.spec.probabilities)
    for each in (off, float(found.why.removesuffix(" off"))):
        assert (each > TOLERANCE["float32"]) is (precision == "tf32")
        assert each <= TOLERANCE[precision]


def test_deviation_of_probabilities_equals_that_of_their_logits() -> None:
    logits = torch.linspace(-10, 10, 21).unsqueeze(0)
    off = logits.clone()
    off[0, 0] += 0.2
    assert deviation(off.softmax(1), logits.softmax(1), probabilities=True) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("value", [-math.inf, math.nan, torch.finfo(torch.float32).min])
def test_deviation_is_zero_only_if_infinity_and_nan_are_where_they_are_expected(value: float) -> None:
    expected = torch.tensor([[0.5, value]])
    assert deviation(expected.clone(), expected) == 0.0
    for other in ([value, 0.5], [0.5, 0.5], [value, value], [0.5, math.inf]):
        assert not deviation(torch.tensor([other]), expected) <= 1.0
    assert deviation(torch.tensor([[1.0, value]]), expected) == 1.0, "a mask does not hide a wrong value"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mask_between_stages_stays_a_mask_in_a_lower_precision(dtype: torch.dtype) -> None:
    for lowest in (-math.inf, torch.finfo(torch.float32).min):
        mask = torch.tensor([[0.5, lowest]])
        sent = Transfers().to_host(mask, dtype)
        assert sent.isfinite().all()
        assert deviation(sent, mask, dtype=dtype) == 0.0
        assert not deviation(sent, torch.tensor([[0.5, -1e30]]), dtype=dtype) <= 0.9, "an overflow is not a mask"


@pytest.mark.parametrize("bad", [float("nan"), -1.0, 7.0])
def test_deviation_of_invalid_probabilities_exceeds_any_tolerance(bad: float) -> None:
    expected = torch.full((1, 4), 0.25)
    output = expected.clone()
    output[0, 2] = bad
    assert not deviation(output, expected, probabilities=True) <= max(TOLERANCE.values())
