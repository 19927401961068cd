"""Small models that tests export."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiworld_serving.models.bundle.files import Bundle, read_bundle
from multiworld_serving.models.export.exporter import ExportSettings, export_model
from multiworld_serving.models.export.trace import Dynamic
from multiworld_serving.models.preprocessing import Preprocessing

SIZE = 16
CLASSES = 5
PREVIEW = Path(__file__).parent / "data" / "preview_bundle.zip"
"""Made by `classifier_bundle` at commit 75110a2, where cuts were measured."""


class Computing(nn.Module):
    """Applies a function, to the result of a layer if there is one."""

    def __init__(self, function: Callable[[Tensor], Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x: Tensor) -> Any:
        if self.layer is not None:
            x = self.layer(x)
        return self.function(x)


def exported_bundle(module: nn.Module, example: Sequence[Tensor], folder: Path, **options: Any) -> Bundle:
    """The module in eval mode as a bundle in this folder, by default with the input `x` and at most 8 rows.

    After an error, the folder is empty.
    """
    given: dict[str, Any] = {"name": "tested", "version": "1", "inputs": ("x",), "max_batch_size": 8} | options
    try:
        export_model(module.eval(), example, folder / "bundle", ExportSettings(**given))
    except Exception:
        assert not list(folder.iterdir())
        raise
    return read_bundle(folder / "bundle")


class Classifier(nn.Module):
    """Three convolutions with normalisation, and a linear layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        widths = [3, 8, 8, 8]
        layers = [
            nn.Sequential(nn.Conv2d(first, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU())
            for first, second in pairwise(widths)
        ]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(images)) * 8
        return found


class Text(nn.Module):
    """Embeds tokens of variable number, mixes them, and returns a vector and the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(self.embedding(ids))
        weights = mask.to(hidden.dtype)[..., None]
        return {"vector": (hidden * weights).sum(1) / weights.sum(1).clamp_min(1), "count": mask.long().sum(1)}


def classifier_bundle(path: Path, seed: int = 0, version: str = "1", labels: int = CLASSES) -> Bundle:
    """A bundle of `Classifier` with two stages. Each process exports it once and copies it, because an export takes seconds."""
    shutil.copytree(_exported_classifier(seed, version, labels), path)
    return read_bundle(path)


def text_bundle(path: Path, num_stages: int = 3) -> Bundle:
    """A bundle of `Text`, of which both inputs have a variable length. Each process exports it once."""
    shutil.copytree(_exported_text(num_stages), path)
    return read_bundle(path)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="bundles-")


@cache
def _exported_classifier(seed: int, version: str, labels: int) -> Path:
    path = Path(_folder().name) / f"classifier-{seed}-{version}-{labels}"
    image = Preprocessing(SIZE, SIZE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    options = ExportSettings(
        "classifier",
        version,
        ("images",),
        max_batch_size=8,
        num_stages=2,
        image=image,
        labels=tuple(f"label {number}" for number in range(labels)),
    )
    export_model(Classifier(seed), [torch.zeros(2, 3, SIZE, SIZE)], path, options)
    return path


@cache
def _exported_text(num_stages: int) -> Path:
    path = Path(_folder().name) / f"text-{num_stages}"
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    options = ExportSettings(
        "text",
        "1",
        ("ids", "mask"),
        max_batch_size=8,
        num_stages=num_stages,
        dynamic=(Dynamic((("ids", 1), ("mask", 1)), 2, 32),),
    )
    export_model(Text(), [ids, ids > 3], path, options)
    return path
