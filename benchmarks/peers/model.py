"""What every peer serves: a ResNet with random weights, as torchvision gives it or as we make it; the five best classes of a JPEG."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.models import get_model, get_model_weights
from torchvision.transforms import v2

from benchmarks.bare_loop import whole_model
from multiworld_serving.models.optimize.optimizing import optimize
from multiworld_serving.models.optimize.tuning import Tuning

MAX_BATCH_SIZE = 8
BATCH_TIMEOUT_S = 0.002
_RESIZE, _CROP = 256, 224


def options() -> argparse.Namespace:
    """What all peers are told; what else there is on the command line, is the server's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pids", type=Path, required=True, help="folder where each worker that is ready leaves its id")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="compute threads a worker; 0: as torch has it")
    parser.add_argument("--optimised", action="store_true", help="our way to compute the model, and not torchvision's")
    parser.add_argument("--precision", default="float32", help="of our way to compute it")
    return parser.parse_known_args(sys.argv[1:])[0]


class Classifier:
    """The model in one worker. To make one is to be ready: the worker's process id is in the folder of `--pids` then."""

    def __init__(self) -> None:
        chosen = options()
        if chosen.threads:
            torch.set_num_threads(chosen.threads)
        torch.manual_seed(0)
        if chosen.optimised:
            self._prepare, self._probabilities = _ours(chosen.model, chosen.precision)
        else:
            self._prepare, self._probabilities = _torchvisions(chosen.model)
        blank = self._prepare(Image.new("RGB", (_CROP, _CROP)))
        for rows in (1, MAX_BATCH_SIZE):
            self.classify([blank] * rows)
        (chosen.pids / str(os.getpid())).touch()

    def tensor(self, jpeg: bytes) -> Tensor:
        """[3, 224, 224], as the model takes it."""
        with Image.open(io.BytesIO(jpeg)) as image:
            return self._prepare(image.convert("RGB"))

    @torch.inference_mode()
    def classify(self, images: Sequence[Tensor]) -> list[dict[str, list[float]]]:
        """For each image, its five most probable classes."""
        best = torch.topk(self._probabilities(torch.stack(list(images))), 5)
        return [
            {"classes": classes, "probabilities": probabilities}
            for classes, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def _torchvisions(name: str) -> tuple[Callable[[Image.Image], Tensor], Callable[[Tensor], Tensor]]:
    """Transforms and model, as torchvision's page on them says."""
    model = get_model(name, weights=None).eval()
    return get_model_weights(name).IMAGENET1K_V1.transforms(), lambda batch: model(batch).softmax(1)


def _ours(name: str, precision: str) -> tuple[Callable[[Image.Image], Tensor], Callable[[Tensor], Tensor]]:
    """The same sizes; what a worker of this service computes when it holds the whole model."""
    stage, shape = whole_model(name, _CROP)
    tuning = Tuning(precision, "fused")
    made = optimize(stage, shape, MAX_BATCH_SIZE, tuning, torch.device("cpu")).module
    return v2.Compose([v2.Resize(_RESIZE), v2.CenterCrop(_CROP), v2.PILToTensor()]), made
