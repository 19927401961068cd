"""What every peer serves: a model of torchvision with random weights, frozen by TorchScript; the five best classes of a JPEG."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.models import get_model, get_model_weights

MAX_BATCH_SIZE = 8
BATCH_TIMEOUT_S = 0.002
_IMAGE_SIZE = 224


def options() -> argparse.Namespace:
    """What all peers are told; what else there is on the command line, is the server's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pids", type=Path, required=True, help="folder where each worker that is ready leaves its id")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="compute threads a worker; 0: as torch has it")
    parser.add_argument("--device", default="cpu")
    return parser.parse_known_args(sys.argv[1:])[0]


class Classifier:
    """The model in one worker. To make one is to be ready: the worker's process id is in the folder of `--pids` then."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        if chosen.threads:
            torch.set_num_threads(chosen.threads)
        torch.manual_seed(0)
        self._prepare = get_model_weights(chosen.model).IMAGENET1K_V1.transforms()
        model = get_model(chosen.model, weights=None).eval()
        traced = torch.jit.trace(model, torch.rand(1, 3, _IMAGE_SIZE, _IMAGE_SIZE))  # type: ignore[no-untyped-call]
        self._device = torch.device(chosen.device)
        self._model = torch.jit.freeze(traced.to(self._device))
        blank = self._prepare(Image.new("RGB", (_IMAGE_SIZE, _IMAGE_SIZE)))
        for rows in (1, MAX_BATCH_SIZE):
            self.classify([blank] * rows)
        (chosen.pids / str(os.getpid())).touch()

    def tensor(self, jpeg: bytes) -> Tensor:
        """[3, 224, 224], as the model takes it."""
        with Image.open(io.BytesIO(jpeg)) as image:
            prepared: Tensor = self._prepare(image.convert("RGB"))
        return prepared

    @torch.inference_mode()
    def classify(self, images: Sequence[Tensor]) -> list[dict[str, list[float]]]:
        """For each image, its five most probable classes."""
        best = torch.topk(self._model(torch.stack(list(images)).to(self._device)).softmax(1), 5)
        return [
            {"classes": classes, "probabilities": probabilities}
            for classes, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
