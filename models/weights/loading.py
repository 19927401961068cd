"""Loads a model with weights, labels and preprocessing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from multiworld_serving.models.architectures import published_weights
from multiworld_serving.models.errors import WeightsError
from multiworld_serving.models.preprocessing import ImageModel, Preprocessing
from multiworld_serving.models.weights import pretrained
from multiworld_serving.models.weights.checkpoints import SUFFIXES, read_checkpoint
from multiworld_serving.models.weights.labels import placeholder_labels, read_labels
from multiworld_serving.models.weights.random_weights import parse_seed, random_model
from multiworld_serving.models.weights.state_dict import load_into


@dataclass(frozen=True)
class LoadedModel:
    """A whole model with its weights."""

    name: str
    """As in `MODEL_NAMES`: "resnet50"."""
    version: str
    """Version of the weights: "IMAGENET1K_V2", "random:0", or file stem and short SHA-256 such as "digits-3f9ac01b22d7"."""
    module: nn.Module
    """torchvision's ResNet: eval mode, float32, CPU, gradients off. Float32 [B,3,H,W] normalised to logits."""
    labels: tuple[str, ...]
    """One per class."""
    preprocessing: Preprocessing

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    def classifier(self) -> ImageModel:
        """The whole model: uint8 images [B,3,H,W] to float32 probabilities [B,num_classes]. Shares the weights."""
        return ImageModel(self.module, self.preprocessing, probabilities=True)


@dataclass(frozen=True)
class _Source:
    """A module with its weights, and the published weights, if any, whose labels and preprocessing are used."""

    module: nn.Module
    version: str
    published: Any | None


def load_model(
    name: str,
    weights: str,
    *,
    labels: str | None = None,
    image_size: int | None = None,
    resize_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> LoadedModel:
    """Load model `name` with `weights`. Blocks: reads files and may download.

    Args:
        name: one of `MODEL_NAMES`.
        weights: a name of torchvision's published weights ("IMAGENET1K_V1", "IMAGENET1K_V2", "DEFAULT"; from torch.hub's cache or
            downloaded); the path of a `.pth`, `.pt`, `.ckpt` or `.safetensors` file, which also determines the number of classes;
            "random:SEED" (1000 classes, untrained); or "auto": DEFAULT if cached or downloadable, otherwise random:0 with a warning,
            after at most `pretrained.PROBE_TIMEOUT_S` if the host does not answer.
        labels: file with one label per class (see `labels.read_labels`). Default: the labels that torchvision publishes with the weights
            (also for a file with the same content), ImageNet's for random weights, else "class_0", "class_1", ...
        image_size: side in pixels that the image is resized and cropped to.
        resize_size: side in pixels that the shorter side is resized to before the crop; at least `image_size`.
        mean: of each channel (R, G, B) of images in 0..1.
        std: of each channel, likewise. A value of None is taken from the weights' metadata, or is ImageNet's (256, 224).
    Raises:
        ModelError: unknown model or weights, unreadable or wrong file, failed download, wrong labels or sizes.
    """
    enum = published_weights(name)
    source = _load_weights(name, weights)
    published = source.published or enum.IMAGENET1K_V1
    preprocessing = Preprocessing.from_weights(published).with_overrides(
        image_size=image_size, resize_size=resize_size, mean=mean, std=std
    )
    return LoadedModel(name, source.version, source.module, _labels(source, labels), preprocessing)


def _load_weights(name: str, weights: str) -> _Source:
    if weights == "auto":
        return _load_auto(name)
    if weights == "random" or weights.startswith("random:"):
        seed = parse_seed(weights)
        return _Source(random_model(name, seed), f"random:{seed}", published_weights(name).IMAGENET1K_V1)
    published = pretrained.weights_named(name, weights)
    if published is not None:
        return _load_published(name, published)
    if Path(weights).suffix.lower() in SUFFIXES:
        return _load_file(name, weights)
    raise WeightsError(
        f"unknown weights {weights!r} for {name}; expected {', '.join(pretrained.weight_names(name))}, auto, "
        f"random:SEED, or a file that ends in {', '.join(SUFFIXES)}"
    )


def _load_auto(name: str) -> _Source:
    default = published_weights(name).DEFAULT
    reason = f"{default.url} does not answer within {pretrained.PROBE_TIMEOUT_S:g} s"
    if pretrained.is_reachable(default):
        try:
            return _load_published(name, default)
        except WeightsError as error:
            reason = str(error)
    pretrained.warn_untrained(name, reason)
    return _load_weights(name, pretrained.UNTRAINED)


def _load_published(name: str, published: Any) -> _Source:
    module = load_into(name, pretrained.fetch(published), str(published))
    return _Source(module, published.name, published)


def _load_file(name: str, path: str) -> _Source:
    checkpoint = read_checkpoint(path)
    module = load_into(name, checkpoint.tensors, path)
    return _Source(module, checkpoint.version, pretrained.weights_with_content(name, checkpoint.sha256))


def _labels(source: _Source, labels_file: str | None) -> tuple[str, ...]:
    num_classes = source.module.get_parameter("fc.weight").shape[0]
    if labels_file is not None:
        return read_labels(labels_file, num_classes)
    return placeholder_labels(num_classes) if source.published is None else tuple(source.published.meta["categories"])
