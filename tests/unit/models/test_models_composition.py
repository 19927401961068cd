"""ResNets as classifiers: their preprocessing, their probabilities, and the images that they take."""

import pytest
import torch
from torchvision.models import ResNet18_Weights

from multiworld_serving.models.export.torchvision_models import load_model
from tests.unit.models.models_loaded import images


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_random_weights_give_probabilities_that_depend_on_the_image(name: str) -> None:
    with torch.inference_mode():
        probabilities = load_model(name).classifier()(images(3))
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(3))
    assert float(probabilities.max()) < 0.99
    assert float(probabilities.max(dim=1).values.min()) > 2 / 1000
    assert float((probabilities[0] - probabilities[1]).abs().max()) > 1e-3


def test_classifier_equals_torchvision_transform_and_softmax() -> None:
    model = load_model("resnet18", "random:1")
    batch = images(2, size=224)
    normalised = ResNet18_Weights.IMAGENET1K_V1.transforms(resize_size=224)(batch)
    with torch.inference_mode():
        assert torch.equal(model.classifier()(batch), model.module(normalised).softmax(dim=1))
