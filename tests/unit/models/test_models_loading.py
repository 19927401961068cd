"""Loading weights: every accepted format gives the same model; every other gives a clear error."""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torchvision.models import get_model, resnet18

from multiworld_serving.models.errors import ModelError, WeightsError
from multiworld_serving.models.export.sources import read_labels
from multiworld_serving.models.export.torchvision_models import (
    load_model,
    published_labels,
    published_preprocessing,
    published_weights,
)
from multiworld_serving.models.preprocessing import Preprocessing

IMAGENET = Preprocessing(256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """State dict of a ResNet-18 with 10 classes."""
    return dict(resnet18(num_classes=10).state_dict())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    path = tmp_path_factory.mktemp("weights") / "ten.safetensors"
    safetensors.torch.save_file(weights, path)
    return path


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_random_weights_depend_only_on_the_seed_and_keep_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    first = load_model("resnet18", "random:7")
    torch.rand(3)
    torch.random.set_rng_state(before)
    second = load_model("resnet18", "random:07")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (first.labels[0], first.labels[999], first.preprocessing) == ("tench", "toilet tissue", IMAGENET)
    assert_same(first.module.state_dict(), second.module.state_dict())
    other = load_model("resnet18", "random:8").module
    drawn = [
        load_model("resnet18").module.get_parameter(name).view(-1)[0].item() for name in ("conv1.weight", "fc.weight")
    ]
    assert drawn == pytest.approx([-0.02843175, -0.13534380]), "every release draws the same"
    assert not torch.equal(other.get_parameter("conv1.weight"), first.module.get_parameter("conv1.weight"))


@pytest.mark.parametrize(
    ("name", "weights", "size", "labels"),
    [
        ("convnext_tiny", None, 224, 1000),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1", 384, 1000),
        ("vit_b_16", "ViT_B_16_Weights.DEFAULT", 224, 1000),
        ("deeplabv3_resnet50", None, 520, 0),
        ("r3d_18", None, None, 0),
        ("fasterrcnn_resnet50_fpn", None, None, 0),
    ],
)
def test_preprocessing_and_labels_are_those_of_the_weights(
    name: str, weights: str | None, size: int | None, labels: int
) -> None:
    published = published_weights(name, weights)
    preprocessing = published_preprocessing(published)
    assert (None if preprocessing is None else preprocessing.crop_size) == size
    assert len(published_labels(published)) == labels


def test_squeezenet_has_the_classes_of_its_checkpoint(tmp_path: Path) -> None:
    expected = get_model("squeezenet1_1", num_classes=37).state_dict()  # the last layer is a convolution
    torch.save(expected, tmp_path / "tuned.pth")
    assert_same(load_model("squeezenet1_1", str(tmp_path / "tuned.pth")).module.state_dict(), expected)


def test_safetensors_file_is_loaded_with_its_number_of_classes(file: Path, weights: dict[str, Tensor]) -> None:
    model = load_model("resnet18", str(file))
    assert_same(model.module.state_dict(), weights)
    assert model.labels == tuple(f"class_{i}" for i in range(10))
    assert model.version == f"ten-{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    assert model.preprocessing == IMAGENET


FORMS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda weights: weights,
    "state_dict": lambda weights: {"state_dict": weights, "epoch": 3},
    "model": lambda weights: {"model": weights, "optimizer": {}, "lr": 0.1},
    "nested": lambda weights: {"state_dict": {f"module._orig_mod.{name}": each for name, each in weights.items()}},
    "lightning": lambda weights: {"state_dict": {f"model.{name}": each for name, each in weights.items()}},
    "float64": lambda weights: {name: t.double() if t.is_floating_point() else t for name, t in weights.items()},
    "no counters": lambda weights: {name: t for name, t in weights.items() if "num_batches_tracked" not in name},
}


@pytest.mark.parametrize("form", FORMS)
def test_pth_file_is_loaded_in_each_common_format(tmp_path: Path, weights: dict[str, Tensor], form: str) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save(FORMS[form](weights), path, _use_new_zipfile_serialization=form != "model")
    model = load_model("resnet18", str(path))
    assert_same(model.module.state_dict(), weights)
    assert all(t.dtype in (torch.float32, torch.int64) for t in model.module.state_dict().values())


class Bomb:
    """Would write a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_pickle_with_code_is_refused_and_not_executed(tmp_path: Path, form: str) -> None:
    path, victim = tmp_path / "evil.pth", tmp_path / "victim"
    if form == "torch":
        torch.save({"fc.weight": Bomb(victim)}, path)
    else:
        path.write_bytes(pickle.dumps(Bomb(victim)))
    with pytest.raises(WeightsError, match=r"code, which is never loaded.*torch\.save\(model\.state_dict\(\), path\)"):
        load_model("resnet18", str(path))
    assert not victim.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_truncated_file_is_refused(tmp_path: Path, weights: dict[str, Tensor], suffix: str, keep: float) -> None:
    path = tmp_path / f"cut{suffix}"
    if suffix == ".pth":
        torch.save(weights, path)
    else:
        safetensors.torch.save_file(weights, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(WeightsError, match=r"is not a whole|is damaged") as caught:
        load_model("resnet18", str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "contains a list"),
        ({}, "contains an empty dict"),
        ({"fc.weight": 3}, "contains a int under 'fc.weight'"),
        (torch.zeros(3), "contains a Tensor"),
        ({"fc.weight": torch.zeros(10**6, 1)}, "does not fit resnet18"),
        ({"fc.weight": torch.zeros(())}, "does not fit resnet18"),
        ({"fc.bias": torch.full((10,), float("nan"))}, "fc.bias contains NaN or infinity"),
        ({"fc.bias": torch.zeros(10, dtype=torch.int8)}, "fc.bias is torch.int8"),
    ],
)
def test_file_is_refused_when_it_has_no_usable_state_dict(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "strange.pth"
    torch.save(content, path)
    with pytest.raises(ModelError, match=message):
        load_model("resnet18", str(path))


@pytest.mark.parametrize(
    ("name", "weights_text", "message"),
    [
        ("resnet19", "random:0", "has no model 'resnet19'; did you mean resnet1"),
        ("resnet18", "IMAGENET1K_V2", "has no weights 'IMAGENET1K_V2'; expected one of DEFAULT, IMAGENET1K_V1"),
        ("resnet18", "", "has no weights ''"),
        ("resnet18", "random", "expected random:SEED"),
        ("resnet18", "random:x", "expected random:SEED"),
        ("resnet18", "random:-1", "expected random:SEED"),
        ("resnet18", "random:" + "9" * 5000, "expected random:SEED"),
        ("resnet18", "nowhere.pth", "there is no file nowhere.pth"),
    ],
)
def test_unknown_weights_name_is_refused(name: str, weights_text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(name, weights_text)


# -- labels -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["cat\ndog\nsea cow\n", "\ufeffcat\r\ndog\r\nsea cow\r\n\r\n"])
def test_labels_are_read_in_class_order(tmp_path: Path, content: str) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(content.encode())
    assert read_labels(str(path), 3) == ("cat", "dog", "sea cow")


@pytest.mark.parametrize(
    ("filename", "content", "message"),
    [
        ("labels.txt", b"cat\ndog\n", "has 2 labels, but the model has 3 classes"),
        ("labels.txt", b"cat\n\ndog\n", "empty line 2"),
        ("labels.txt", b"", "is empty"),
        ("labels.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("labels.json", b'["cat", "dog", "sea cow"]', "is JSON; expected UTF-8 text with one label per line"),
    ],
)
def test_invalid_labels_file_is_refused(tmp_path: Path, filename: str, content: bytes, message: str) -> None:
    path = tmp_path / filename
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_labels(str(path), 3)
    for missing in (tmp_path / "nowhere.txt", tmp_path):
        with pytest.raises(ModelError, match="cannot read labels"):
            read_labels(str(missing), 3)
