"""Models and preprocessing of torchvision are found by name."""

from pathlib import Path

import pytest
import torch
import torchvision

from multiworld_serving.models.errors import ExportError
from multiworld_serving.models.export.sources import parse_dynamic, parse_input
from multiworld_serving.models.export.torchvision_models import (
    load_model,
    published_labels,
    published_preprocessing,
    published_weights,
)


@pytest.mark.parametrize(
    ("name", "weights", "size"),
    [
        ("convnext_tiny", None, 224),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1", 384),
        ("vit_b_16", "ViT_B_16_Weights.DEFAULT", 224),
        ("deeplabv3_resnet50", None, 520),
        ("r3d_18", None, None),
        ("fasterrcnn_resnet50_fpn", None, None),
    ],
)
def test_preprocessing_is_that_of_the_weights(name: str, weights: str | None, size: int | None) -> None:
    found = published_preprocessing(published_weights(name, weights))
    assert (None if found is None else found.crop_size) == size


def test_labels_are_those_of_the_weights_when_the_model_classifies() -> None:
    assert len(published_labels(published_weights("convnext_tiny"))) == 1000
    assert published_labels(published_weights("deeplabv3_resnet50")) == ()


@pytest.mark.parametrize("name", ["squeezenet1_1", "lraspp_mobilenet_v3_large"])
def test_model_of_torchvision_is_created_without_a_download_when_no_weights_are_given(name: str) -> None:
    module = load_model(name).module
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1"])
def test_model_of_torchvision_has_the_classes_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    fine_tuned = torchvision.models.get_model(name, num_classes=37)
    torch.save(fine_tuned.state_dict(), tmp_path / "tuned.pth")
    module = load_model(name, str(tmp_path / "tuned.pth")).module
    for key, tensor in fine_tuned.state_dict().items():
        assert module.state_dict()[key].equal(tensor)


def test_input_and_dimensions_are_parsed() -> None:
    name, example = parse_input("ids:int64[batch, 12]")
    assert (name, example.dtype, example.shape) == ("ids", torch.int64, (2, 12))
    dynamic = parse_dynamic("ids:1,mask:1=1..512")
    assert (dynamic.places, dynamic.least, dynamic.most, dynamic.name) == ((("ids", 1), ("mask", 1)), 1, 512, "ids_1")


@pytest.mark.parametrize("text", ["ids=1..2", "ids:0=1..2", "ids:1=2..1", "ids:1=0..4", "ids:1,=1..2", "ids:1=1..", ""])
def test_dimension_is_refused_when_it_is_malformed(text: str) -> None:
    with pytest.raises(ExportError, match=r"LEAST\.\.MOST"):
        parse_dynamic(text)
