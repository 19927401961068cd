"""Calibrated bundles: the format of their ranges, how workers compute them in int8, and what is refused."""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from multiworld_serving.models import BundleError, StageError, Tuning, load_bundle_stage, optimize
from multiworld_serving.models.bundle.files import Bundle, read_bundle
from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.manifest import Int8Accuracy, Manifest
from multiworld_serving.models.errors import ExportError
from multiworld_serving.models.export.calibration import Calibration, load_calibration
from multiworld_serving.models.export.exporter import ExportOptions, export_model
from multiworld_serving.models.optimize import execution_modes
from multiworld_serving.models.optimize.execution_modes import has_fast_int8
from multiworld_serving.models.optimize.folding import FoldedStage
from multiworld_serving.models.optimize.fusing import Workload, dequantize, quantize
from multiworld_serving.models.optimize.quantizing import QuantizedConv, QuantizedLinear, _max_pool
from multiworld_serving.models.preprocessing import Preprocessing
from multiworld_serving.server.versions.stage_plan import StagePlan
from tests.bundles import CLASSES, SIZE, classifier_bundle
from tests.cut_bundles import bundle_plan
from tests.resnets import sent_weights

CPU = torch.device("cpu")
INT8 = Tuning("int8", "eager")
IMAGE = Preprocessing(SIZE, SIZE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
needs_int8 = pytest.mark.skipif(
    not has_fast_int8(CPU), reason="this CPU has neither AMX nor VNNI, so int8 is not computed"
)


class Residual(nn.Module):
    """Convolutions with normalisation, one ReLU for all, a pooling, two additions, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.first = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32))
        self.shortcut = nn.Conv2d(16, 32, 1, stride=2)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        given = self.pool(self.relu(self.stem(images)))
        given = self.relu(self.first(given) + given)
        given = self.relu(self.second(given) + self.shortcut(given))
        found: Tensor = self.head(given.mean((2, 3))) * 8
        return found


def images(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


@cache
def calibrated() -> Bundle:
    from tempfile import TemporaryDirectory  # noqa: PLC0415 - the file may be gone after it was read

    with TemporaryDirectory() as folder:
        options = ExportOptions(
            *("residual", "1", ("images",)),
            max_batch_size=8,
            image=IMAGE,
            labels=tuple(f"label {number}" for number in range(CLASSES)),
            calibration=Calibration((images(24),), torch.zeros(24, dtype=torch.int64)),
        )
        export_model(Residual(), [torch.zeros(2, 3, SIZE, SIZE)], Path(folder) / "bundle", options)
        return read_bundle(Path(folder) / "bundle")


def received(plan: StagePlan) -> Any:
    """The stage as a worker loads it."""
    return load_bundle_stage(plan.spec, bytearray(sent_weights(plan)))


def int8_stage(plan: StagePlan) -> FoldedStage:
    return FoldedStage(received(plan), Workload(plan.input_shape, 8, (1, 2)), fused=True, int8=True)


@needs_int8
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_int8_stages_are_accepted_by_the_self_test_and_keep_their_input(num_stages: int) -> None:
    for plan in bundle_plan(calibrated(), num_stages, INT8):
        stage, int8 = received(plan), int8_stage(plan)
        for count in (1, 3, 8):
            rows = plan.self_test_input[:1].repeat(count, *[1] * (plan.self_test_input.dim() - 1))
            before = rows.clone()
            with torch.inference_mode():
                expected, found = stage(rows), int8(rows)
            assert torch.equal(rows, before)
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
            assert all(plan.check_self_test(row[None]) is None for row in found)


@needs_int8
def test_self_test_refuses_other_weights_in_int8() -> None:
    (plan,) = bundle_plan(calibrated(), 1, INT8)
    stage = received(plan)
    for weight in stage.buffers():
        weight.mul_(-1)
    int8 = FoldedStage(stage, Workload(plan.input_shape, 8, (1,)), fused=True, int8=True)
    with torch.inference_mode():
        assert plan.check_self_test(int8(plan.self_test_input)) is not None


@needs_int8
def test_values_stay_uint8_between_layers() -> None:
    (plan,) = bundle_plan(calibrated(), 1, INT8)
    body = int8_stage(plan).body
    targets = [node.target for node in body.graph.nodes]
    layers = [body.get_submodule(str(node.target)) for node in body.graph.nodes if node.op == "call_module"]
    assert sum(isinstance(layer, QuantizedConv) for layer in layers) == 4
    assert sum(isinstance(layer, QuantizedLinear) for layer in layers) == 1
    assert targets.count(quantize) == 2  # of the images, and before the linear layer
    assert targets.count(dequantize) == 0


class Branches(nn.Module):
    """A convolution whose result an int8 layer and a float32 operator take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1)

    def forward(self, images: Tensor) -> Tensor:
        given = self.first(images).relu()
        return torch.cat((self.second(given).mean((2, 3)), given.mean((2, 3))), 1)


@needs_int8
def test_value_that_float32_operators_also_take_is_converted(tmp_path: Path) -> None:
    rows = images(16).float() / 255
    options = ExportOptions(*("branches", "1", ("images",)), max_batch_size=8, calibration=Calibration((rows,), None))
    export_model(Branches(), [torch.zeros(2, 3, SIZE, SIZE)], tmp_path / "bundle", options)
    (plan,) = bundle_plan(read_bundle(tmp_path / "bundle"), 1, INT8)
    int8 = int8_stage(plan)
    assert [node.target for node in int8.body.graph.nodes].count(dequantize) == 1
    with torch.inference_mode():
        assert plan.check_self_test(int8(plan.self_test_input)) is None


@pytest.mark.parametrize("window", [((3, 3), (2, 2), (1, 1)), ((2, 3), (), (1, 0)), ((2, 2), (2, 1))])
def test_pooling_of_uint8_equals_that_of_floats(window: tuple[Sequence[int], ...]) -> None:
    values = torch.randint(0, 256, (2, 3, 13, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = torch.ops.aten.max_pool2d(values.float(), *window)
    assert torch.equal(_max_pool(values, *window).float(), expected)


@needs_int8
def test_accuracy_is_part_of_the_bundle() -> None:
    found = calibrated().manifest.int8
    assert found is not None
    assert found.rows == 24
    assert found.cosine > 0.99
    assert found.agreement is not None
    assert found.agreement > 0.8
    assert found.accuracy is not None
    assert "24 rows" in str(found)


@needs_int8
def test_worker_computes_in_int8_when_asked() -> None:
    for plan in bundle_plan(calibrated(), 2, INT8):
        made = optimize(received(plan), plan.input_shape, 8, INT8, CPU)
        assert str(made.mode) == "fused/int8", made.why


def test_worker_without_int8_computes_in_float32_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(execution_modes, "has_fast_int8", lambda device: False)
    (plan,) = bundle_plan(classifier_bundle(tmp_path / "bundle"), 1)
    with caplog.at_level(logging.WARNING):
        made = optimize(received(plan), plan.input_shape, 8, INT8, CPU)
    assert made.mode.precision == "float32"
    assert "stage=0 is computed in float32: int8 needs a CPU with" in caplog.text


def test_bundle_without_calibration_refuses_int8(tmp_path: Path) -> None:
    bundle = classifier_bundle(tmp_path / "bundle")
    with pytest.raises(BundleError, match="export it with --calibration"):
        bundle_plan(bundle, 1, INT8)


@pytest.mark.parametrize("optimize", ["none", "compile"])
def test_int8_needs_the_eager_mode(optimize: str) -> None:
    with pytest.raises(StageError, match="optimize eager"):
        Tuning("int8", optimize)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return classifier_bundle(tmp_path_factory.mktemp("plain") / "bundle")


def with_ranges(graph: Graph) -> Graph:
    floats = [node for node in graph.nodes if node.dtype == torch.float32 and node.kind in ("call", "item")]
    return dataclasses.replace(graph, ranges={node.name: (-0.1, 1 / 3) for node in floats})


def test_ranges_survive_json_and_cuts(plain: Bundle) -> None:
    graph = with_ranges(plain.graph)
    assert Graph.from_json(graph.to_json()) == graph
    stages = graph.cut(plain.manifest.cuts)
    for stage in stages:
        assert stage.ranges == {name: graph.ranges[name] for name in stage.by_name if name in graph.ranges}
    assert stages[1].inputs[0].name in stages[1].ranges


@pytest.mark.parametrize(
    "row",
    [
        ["range", "unknown", 0.0, 1.0],
        ["range", "images", 0.0, 1.0],
        ["range", "NAME", 0.5, 1.0],
        ["range", "NAME", 0.0, 1e300],
        ["range", "NAME", 0.0, math.inf],
        ["range", "NAME", math.nan, 1.0],
        ["range", "NAME", "0", "1"],
        ["range", "NAME", 0.0],
        ["range", ["NAME"], 0.0, 1.0],
        ["input", "late", "float32", ["batch"]],
    ],
)
def test_hostile_ranges_are_refused_with_one_line(plain: Bundle, row: list[Any]) -> None:
    graph = with_ranges(plain.graph)
    row = [next(iter(graph.ranges)) if part == "NAME" else part for part in row]
    rows = json.loads(graph.to_json())
    with pytest.raises(BundleError) as error:
        Graph.from_json(json.dumps([*rows[:-1], row, rows[-1]]))
    assert "\n" not in str(error.value)


def test_manifest_with_an_accuracy_has_the_next_format(plain: Bundle) -> None:
    old = json.loads(plain.manifest.to_json())
    assert old["format"] == 1
    assert "int8" not in old
    accuracy = Int8Accuracy(24, 0.99, 0.9, (0.8, 0.7))
    manifest = dataclasses.replace(plain.manifest, int8=accuracy)
    new = json.loads(manifest.to_json())
    assert new["format"] == 2
    assert Manifest.from_json(manifest.to_json().encode()) == manifest
    for wrong in (
        old | {"int8": new["int8"]},
        {name: value for name, value in new.items() if name != "int8"},
        new | {"int8": None},
        new | {"int8": new["int8"] | {"agreement": 2.0}},
        new | {"int8": new["int8"] | {"accuracy": [0.5]}},
        new | {"int8": new["int8"] | {"code": "import os"}},
    ):
        with pytest.raises(BundleError):
            Manifest.from_json(json.dumps(wrong).encode())
    with pytest.raises(BundleError, match="ranges"):
        manifest.check_graph(plain.graph)
    with pytest.raises(BundleError, match="ranges"):
        plain.manifest.check_graph(with_ranges(plain.graph))


def test_calibration_is_read_from_files_and_functions(tmp_path: Path) -> None:
    rows, classes = images(4), torch.tensor([0, 1, 2, 1])
    np.savez(tmp_path / "set.npz", images=rows.numpy(), labels=classes.numpy())
    save_file({"images": rows, "labels": classes}, tmp_path / "set.safetensors")
    (tmp_path / "own.py").write_text(
        "from safetensors.torch import load_file\n"
        f"def rows(): return load_file({str(tmp_path / 'set.safetensors')!r})\n"
    )
    for source in ("set.npz", "set.safetensors", "own.py:rows"):
        found = load_calibration(str(tmp_path / source), ["images"], None, [])
        assert torch.equal(found.inputs[0], rows)
        assert found.classes is not None
        assert torch.equal(found.classes, classes)


def test_calibration_is_read_from_folders_of_images(tmp_path: Path) -> None:
    for label, grey in (("dark", 10), ("light", 200)):
        (tmp_path / label).mkdir()
        Image.new("RGB", (40, 20), (grey, grey, grey)).save(tmp_path / label / "1.png")
    found = load_calibration(str(tmp_path), ["images"], IMAGE, ["light", "dark"])
    assert found.inputs[0].shape == (2, 3, SIZE, SIZE)
    assert found.inputs[0].float().mean((1, 2, 3)).tolist() == [10, 200]
    assert found.classes is not None
    assert found.classes.tolist() == [1, 0]
    assert load_calibration(str(tmp_path), ["images"], IMAGE, []).classes is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.npz", "cannot be read"),
        ("other.npz", "no 'images'"),
        ("rows.npz", "same number of rows"),
        ("objects.npz", "cannot be read"),
        ("empty", "contains no images"),
    ],
)
def test_invalid_calibration_sets_are_refused(tmp_path: Path, source: str, message: str) -> None:
    np.savez(tmp_path / "other.npz", pictures=np.zeros(3))
    np.savez(tmp_path / "rows.npz", images=np.zeros((3, 2)), labels=np.zeros(2))
    np.savez(tmp_path / "objects.npz", images=np.array([{}]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match=message):
        load_calibration(str(tmp_path / source), ["images"], IMAGE, [])
