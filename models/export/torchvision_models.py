"""Models of torchvision: with published weights, a checkpoint or random weights, and as bundles.

`python -m multiworld_serving.models.export.torchvision_models` is how `bundle_cache` exports one.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from multiworld_serving.models.errors import ExportError, ModelError, WeightsError
from multiworld_serving.models.export.bundle_cache import SUFFIXES, WEIGHTS_STATUS, CachedModel, parse_seed
from multiworld_serving.models.export.checkpoints import load_state, read_checkpoint
from multiworld_serving.models.export.exporter import ExportReport, ExportSettings, export_model
from multiworld_serving.models.export.sources import num_classes
from multiworld_serving.models.preprocessing import ImageModel, Preprocessing

_STALL_TIMEOUT_S = 30.0
"""A download without progress for this long is aborted."""
_FC_STD = 0.5
INPUT, PROBABILITIES = "input", "probabilities"
"""Names of the input of images, and of the output of classifiers."""


@dataclass(frozen=True)
class LoadedModel:
    """A model of torchvision with its weights.

    Attributes:
        version: of the weights: "IMAGENET1K_V2", "random:0", or file name and short SHA-256 such as "digits-3f9ac01b22d7".
        module: float32, CPU, eval mode, without gradients.
        preprocessing: of the image that it takes; None if it takes something else.
        labels: one per class if it classifies images; else empty.
    """

    name: str
    version: str
    module: nn.Module
    preprocessing: Preprocessing | None
    labels: tuple[str, ...]

    @property
    def image(self) -> Preprocessing:
        """`preprocessing`. Raises ExportError if there is none."""
        if self.preprocessing is None:
            raise ExportError(
                f"{self.name} does not take one image: export it with `multiworld export {self.name} --input …` and serve the bundle"
            )
        return self.preprocessing

    def classifier(self) -> ImageModel:
        """The whole model: uint8 images [B,3,H,W] to float32 probabilities [B,classes]. Shares the weights."""
        return ImageModel(self.module, self.preprocessing, probabilities=bool(self.labels))


def load_model(name: str, weights: str = "random:0", *, image_size: int | None = None) -> LoadedModel:
    """Load a model. Blocks: reads files and may download.

    Args:
        weights: a published name such as DEFAULT; a file with a state dict, which also determines the number of classes; or "random:SEED".
        image_size: side in pixels that images are resized and cropped to. None: as published with the weights.
    Raises:
        ModelError: unknown model or weights, unreadable or wrong file, failed download.
    """
    check_name(name)
    published = published_weights(name)
    is_file = Path(weights).suffix.lower() in SUFFIXES
    if weights == "random" or weights.startswith("random:"):
        seed = parse_seed(weights)
        version, module = f"random:{seed}", _random_model(name, seed)
    elif is_file:
        checkpoint = read_checkpoint(weights)
        version, module = checkpoint.version, _module_with(name, checkpoint.tensors, weights)
    else:
        published = published_weights(name, weights)
        version, module = published.name, _fetched(name, published)
    module = module.eval().requires_grad_(False)
    image, labels = published_preprocessing(published), published_labels(published)
    if image is not None and image_size is not None:
        image = Preprocessing(image_size, image_size, image.mean, image.std)
    if is_file and labels:  # of its own classes
        labels = tuple(f"class_{index}" for index in range(num_classes(module, {}, image)))
    return LoadedModel(name, version, module, image, labels)


def export_loaded(
    model: LoadedModel,
    path: Path,
    *,
    max_batch_size: int = 64,
    num_stages: int = 2,
    progress: Callable[[str], object] = lambda _: None,
) -> ExportReport:
    """Export a model that takes one image. Classifiers return probabilities.

    Raises:
        ModelError: it takes something else, or cannot be exported.
    """
    options = ExportSettings(
        model.name,
        model.version,
        (INPUT,),
        max_batch_size=max_batch_size,
        num_stages=num_stages,
        image=model.image,
        labels=model.labels,
        output=PROBABILITIES if model.labels else None,
        checked=(1, 3),
    )
    return export_model(model.module, [torch.zeros(2, 3, 1, 1)], path, options, progress)


def check_name(name: str) -> None:
    """Raise ExportError if torchvision has no model with this name."""
    if name not in (known := torchvision.models.list_models()):
        near = " or ".join(difflib.get_close_matches(name, known))
        hint = f"did you mean {near}?" if near else "expected the name of a model such as resnet50"
        if name.endswith(".py"):
            hint = f"give {name}:FUNCTION, a function that returns the module"
        raise ExportError(f"torchvision {torchvision.__version__} has no model {name!r}; {hint}")


def _module_with(name: str, tensors: Mapping[str, Tensor], origin: str) -> nn.Module:
    """A model with the weights, and the number of classes, of a checkpoint. Raises WeightsError if they do not fit."""
    module = _empty_model(name)
    if (classes := _classes(module, tensors)) is not None:
        module = _empty_model(name, num_classes=classes)
    load_state(module, tensors, origin, name)
    return module


def _classes(module: nn.Module, tensors: Mapping[str, Tensor]) -> int | None:
    """Number of classes of a state dict, if its last layer has another number of rows than the module's."""
    lengths = {
        len(given)
        for name, own in module.state_dict().items()
        if (given := tensors.get(name)) is not None
        and own.ndim == given.ndim > 0
        and given.shape[1:] == own.shape[1:]
        and len(given) != len(own)
    }
    return lengths.pop() if len(lengths) == 1 else None


def _empty_model(name: str, **options: Any) -> nn.Module:
    """A model with the initial values of torchvision. Downloads nothing."""
    if "weights_backbone" in inspect.signature(torchvision.models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False, "aux_logits": False}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model


def _random_model(name: str, seed: int) -> nn.Module:
    """Weights drawn from a seed, identical in every call. Leaves the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _empty_model(name)
    if isinstance(model, ResNet):
        _draw_resnet(model, torch.Generator().manual_seed(seed))
    return model


def _draw_resnet(model: ResNet, generator: torch.Generator) -> None:
    """Draw the weights of a ResNet such that its output depends on the image.

    With the initial values of torchvision, the activations of an untrained ResNet grow with every residual block, until softmax returns
    exactly 0 or 1. So the last batch norm of each of the L residual blocks scales by 1/sqrt(L), and the last layer is drawn such that
    logits differ by a few units.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=_FC_STD, generator=generator)
            nn.init.zeros_(module.bias)
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    for block in blocks:
        last_norm = block.bn3 if isinstance(block, Bottleneck) else block.bn2
        nn.init.constant_(last_norm.weight, len(blocks) ** -0.5)


def published_preprocessing(published: Any | None) -> Preprocessing | None:
    """Preprocessing of published weights; None if their model takes something else than one image, such as a video or two frames."""
    preset = None if published is None else published.transforms()
    size = getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None)
    mean = getattr(preset, "mean", None)
    if preset is None or not size or mean is None or "video" in type(preset).__name__.lower():
        return None
    resize = getattr(preset, "resize_size", None) or size
    return Preprocessing(max(resize[0], size[0]), size[0], tuple(mean), tuple(preset.std))


def published_labels(published: Any | None) -> tuple[str, ...]:
    """Labels of published weights of a model for classification; else empty."""
    if published is None or type(published.transforms()).__name__ != "ImageClassification":
        return ()
    return tuple(published.meta["categories"])


def published_weights(name: str, weights: str | None = None) -> Any:
    """A member of the `WeightsEnum` of a model: the first one if `weights` is None, or None if there are none."""
    members = list(torchvision.models.get_model_weights(name))
    if weights is None:
        return members[0] if members else None
    try:
        return torchvision.models.get_model_weights(name)[weights.rpartition(".")[2]]
    except KeyError as error:
        known = ", ".join(member.name for member in members)
        raise WeightsError(
            f"{name} has no weights {weights!r}; expected one of DEFAULT, {known}, random:SEED, or a file ({', '.join(SUFFIXES)})"
        ) from error


def _fetched(name: str, published: Any) -> nn.Module:
    """The model with published weights, downloaded into torch.hub's cache if they are not there. Executes no code of the file.

    Raises:
        WeightsError: the download failed or stalled, or the cached file is damaged; the message says what to do.
    """
    file = Path(torch.hub.get_dir()) / "checkpoints" / published.url.rpartition("/")[2]
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_STALL_TIMEOUT_S)  # torch.hub opens its connection without a timeout
    try:
        with contextlib.redirect_stdout(sys.stderr):  # "Downloading: ..." is not the program's output
            # torchvision would run code in the file, this refuses it.
            torch.hub.load_state_dict_from_url(published.url, progress=False, check_hash=True, weights_only=True)
            model: nn.Module = torchvision.models.get_model(name, weights=published)
    except Exception as error:  # network, disk, hash and unpickling errors have no common base
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if file.exists():
            raise WeightsError(
                f"the cached weights {file} of {published} cannot be read ({reason}); delete that file and try again"
            ) from error
        raise WeightsError(
            f"cannot download {published} from {published.url} ({reason}); check the network, or download it elsewhere and put "
            f"it at {file}; --weights FILE takes your own, --weights random:0 serves an untrained model"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
    return model


def main(model: str, path: str) -> None:
    """Export a model into the cache. Prints each step.

    Args:
        model: JSON of a `CachedModel`.
    Raises:
        ModelError: it cannot be exported.
    """
    asked = CachedModel(**json.loads(model))
    torch.set_num_threads(1)  # the service keeps its cores while it loads a version
    os.nice(10)  # requests get most of the time of a busy core
    step = partial(print, flush=True)
    step("loading the model")
    loaded = load_model(asked.name, asked.weights, image_size=asked.image_size)
    export_loaded(loaded, Path(path), max_batch_size=asked.max_batch_size, progress=step)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ModelError as found:
        sys.stderr.write(re.sub(r"\s+", " ", str(found)))
        sys.exit(WEIGHTS_STATUS if isinstance(found, WeightsError) else 1)
