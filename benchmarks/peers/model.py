"""What every peer serves: ResNet-18 with random weights, one compute thread a worker, the five most probable classes of a JPEG."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torchvision.models import resnet18
from torchvision.transforms import v2

MAX_BATCH_SIZE = 8
BATCH_TIMEOUT_S = 0.002


def options() -> argparse.Namespace:
    """`--port` and `--pids DIR`, of the server and of the workers that it starts; what else there is, is the server's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pids", type=Path, required=True)
    return parser.parse_known_args(sys.argv[1:])[0]


class Classifier:
    """The model in one worker. To make one is to be ready: the worker's process id is in the folder of `--pids` then."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = resnet18().eval()
        self._prepare = v2.Compose(
            [
                v2.PILToTensor(),
                v2.Resize(256),
                v2.CenterCrop(224),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )
        self.classify([torch.zeros(3, 224, 224)] * MAX_BATCH_SIZE)
        (options().pids / str(os.getpid())).touch()

    def tensor(self, jpeg: bytes) -> torch.Tensor:
        """float32 [3, 224, 224]."""
        with Image.open(io.BytesIO(jpeg)) as image:
            tensor: torch.Tensor = self._prepare(image.convert("RGB"))
        return tensor

    @torch.inference_mode()
    def classify(self, images: Sequence[torch.Tensor]) -> list[dict[str, list[float]]]:
        """For each image, its five most probable classes."""
        best = torch.topk(torch.softmax(self._model(torch.stack(list(images))), 1), 5)
        return [
            {"classes": classes, "probabilities": probabilities}
            for classes, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
