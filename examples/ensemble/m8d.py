"""One of four ResNets that answer together: the answer is the average of the logits of all current members.

Run: python -m examples.launch ensemble --kill-rank 1,2
"""

import argparse
import asyncio
import io
import sys

import httpx
import torch
from PIL import Image
from torch.distributed import ReduceOp

from examples.elastic_members import member_parser, run_member
from examples.resnet.images import prepare
from multiworld.elastic import ElasticWorld
from multiworld_serving.models.export.torchvision_models import LoadedModel, load_model
from multiworld_serving.models.preprocessing import Normalize

IMAGE_TIMEOUT_S = 600.0
"""Seconds that a member waits for the next image."""


class EnsembleMember:
    """A member of the ensemble. It fetches the images by number and classifies each one together with the other members."""

    def __init__(self, model: LoadedModel, front: httpx.AsyncClient) -> None:
        self._model = model
        self._normalize = Normalize(model.image.mean, model.image.std)
        self._front = front

    async def answer(self, world: ElasticWorld, number: int, step_number: int) -> None:
        """Classify image `step_number`. Every member sends the answer to the front, which takes the first one; all are equal."""
        image = await self._front.get(f"/images/{step_number}")
        image.raise_for_status()
        # In a thread, so that the event loop keeps running.
        logits = await asyncio.to_thread(self._logits, image.content)
        outcome = await world.all_reduce_with_retry(logits, ReduceOp.AVG)
        probability, class_id = logits.softmax(dim=1)[0].max(dim=0)
        label, models = self._model.labels[int(class_id)], max(outcome.contributors[0], 1)
        print(
            f"member {number}: image {step_number} shows {label} ({float(probability):.1%}), average of {models} models"
        )
        reply = {"label": label, "probability": float(probability), "models": models}
        (await self._front.post(f"/answers/{step_number}", json=reply)).raise_for_status()

    def _logits(self, image: bytes) -> torch.Tensor:
        """Return the logits of an encoded image, float32 [1,num_classes]."""
        with torch.inference_mode():
            pixels = prepare(Image.open(io.BytesIO(image)), self._model.image)
            logits: torch.Tensor = self._model.module(self._normalize(pixels))
        return logits.clone()


async def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # the members of an example share one machine
    models = options.models.split(",")
    weights = options.weights if options.weights != "random" else f"random:{options.number}"
    model = load_model(models[options.number % len(models)], weights)
    async with httpx.AsyncClient(
        base_url=f"http://{options.addr}:{options.http_port}", timeout=IMAGE_TIMEOUT_S
    ) as front:
        return await run_member(EnsembleMember(model, front).answer, options)


def parse_options() -> argparse.Namespace:
    parser = member_parser()
    parser.add_argument("--http-port", type=int, default=8000, help="port of the front (default: %(default)s)")
    parser.add_argument(
        "--models",
        default="resnet18,resnet34,resnet50,resnet101",
        help="models of the members, in turn (default: %(default)s)",
    )
    parser.add_argument(
        "--weights",
        default="random",
        help="DEFAULT for those of torchvision; random for random weights that differ by member (default: %(default)s)",
    )
    options = parser.parse_args()
    if options.number is None:
        parser.error("--number is required; the front is python -m examples.ensemble.front")
    return options


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse_options())))
