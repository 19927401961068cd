"""What every peer serves: a model of torchvision with random weights, frozen by TorchScript, or the encoder of texts of an example."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision.models import get_model, get_model_weights

from examples.text_classifier import model as text_model

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
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="of torch.autocast")
    return parser.parse_known_args(sys.argv[1:])[0]


def classifier(chosen: argparse.Namespace) -> "Classifier | TextClassifier":
    """The model in one worker. Its process is ready then: its id is in the folder of `--pids`."""
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    made = TextClassifier() if chosen.model == "text" else Classifier(chosen)
    (chosen.pids / str(os.getpid())).touch()
    return made


class Classifier:
    """The five best classes of a JPEG."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self._prepare = get_model_weights(chosen.model).IMAGENET1K_V1.transforms()
        self._device = torch.device(chosen.device)
        lower = chosen.precision == "bfloat16"
        self._layout = torch.channels_last if lower else torch.contiguous_format  # the faster one for each
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=lower, cache_enabled=False):
            model = get_model(chosen.model, weights=None).eval().to(memory_format=self._layout)
            example = torch.rand(1, 3, _IMAGE_SIZE, _IMAGE_SIZE).contiguous(memory_format=self._layout)
            traced = torch.jit.trace(model, example)  # type: ignore[no-untyped-call]
        self._model = torch.jit.freeze(traced.to(self._device))
        blank = self._prepare(Image.new("RGB", (_IMAGE_SIZE, _IMAGE_SIZE)))
        for rows in (1, MAX_BATCH_SIZE):
            self.classify([blank] * rows)

    def tensor(self, jpeg: bytes) -> Tensor:
        """[3, 224, 224], as the model takes it."""
        with Image.open(io.BytesIO(jpeg)) as image:
            prepared: Tensor = self._prepare(image.convert("RGB"))
        return prepared

    @torch.inference_mode()
    def classify(self, images: Sequence[Tensor]) -> list[dict[str, list[float]]]:
        """For each image, its five most probable classes."""
        batch = torch.stack(list(images)).contiguous(memory_format=self._layout)
        best = torch.topk(self._model(batch.to(self._device)).softmax(1), 5)
        return [
            {"classes": classes, "probabilities": probabilities}
            for classes, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


class TextClassifier:
    """The probabilities of two classes for a text of up to 200 tokens."""

    def __init__(self) -> None:
        text_model.MAX_TOKENS = 200
        self._tokenizer = BertWordPieceTokenizer(str(text_model.VOCABULARY))
        self._tokenizer.enable_truncation(text_model.MAX_TOKENS)
        self._model = text_model.make().eval()

    def tensor(self, body: bytes) -> Tensor:
        """The tokens: int64 [L]."""
        return torch.tensor(self._tokenizer.encode(body.decode()).ids)

    @torch.inference_mode()
    def classify(self, texts: Sequence[Tensor]) -> list[dict[str, list[float]]]:
        """For each text, its probabilities."""
        ids = pad_sequence(list(texts), batch_first=True)
        return [{"probabilities": each} for each in self._model(ids, ids > 0).tolist()]
