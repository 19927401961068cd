"""A model that classifies images, as a frontend and a leader serve it."""

from multiworld_serving.common.service.predictor import ImageSizes, ServedModel
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.nodes import BATCH


def image_classifier(name: str, version: str, labels: tuple[str, ...], sizes: ImageSizes) -> ServedModel:
    """A model with an image `input` and the `probabilities` of classes."""
    image = TensorSpec("input", "uint8", (BATCH, 3, sizes.crop_size, sizes.crop_size))
    probabilities = TensorSpec("probabilities", "float32", (BATCH, len(labels)))
    return ServedModel(name, version, (image,), (probabilities,), {}, sizes, labels)
