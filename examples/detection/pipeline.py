"""Two models of a photo: `pipeline` detects objects with SSDlite of torchvision as a whole; `labelled` also classifies each of them.

All crops of a photo are one input of the bundle, which computes them together.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision.models.detection import ssdlite320_mobilenet_v3_large
from torchvision.transforms.functional import pil_to_tensor, resized_crop

from multiworld_serving import Bundle, InvalidInput, Request, Stage

MAX_SIDE = 320
LABELS = Path(__file__).parents[1].joinpath("own_model", "labels.txt").read_text().splitlines()
SIZE = 64


class Decode(Stage):
    """Images of any size as float32 [3,H,W]."""

    def __call__(self, requests: Sequence[Request]) -> list[Any]:
        return [decoded(each.body) for each in requests]


class Detect(Stage):
    max_batch_size = 4

    def setup(self, device: str) -> None:
        torch.manual_seed(0)  # no published weights: `weights="DEFAULT"` downloads them
        self.place = torch.device(device)
        self.model = ssdlite320_mobilenet_v3_large(
            weights=None, weights_backbone=None, score_thresh=0.0, topk_candidates=20, detections_per_img=5
        )
        self.model.eval().to(self.place)

    def __call__(self, images: Sequence[torch.Tensor]) -> list[Any]:
        found = self.model([each.to(self.place) for each in images])
        return [{name: tensor.cpu() for name, tensor in each.items()} for each in found]

    def example(self) -> list[torch.Tensor]:
        return [torch.zeros(3, 64, 64)]


class Boxes(Stage):
    def __call__(self, rows: Sequence[dict[str, torch.Tensor]]) -> list[Any]:
        return [
            [
                {"box": [round(side, 1) for side in box], "class": label, "score": round(score, 3)}
                for box, label, score in zip(
                    *(row[name].tolist() for name in ("boxes", "labels", "scores")), strict=True
                )
            ]
            for row in rows
        ]


class Find(Detect):
    """The detector, which also keeps the photo."""

    def __call__(self, images: Sequence[torch.Tensor]) -> list[Any]:
        boxes = [each["boxes"] for each in super().__call__(images)]
        return [{"photo": image, "boxes": box} for image, box in zip(images, boxes, strict=True)]


class Crop(Stage):
    """The parts of the photo as uint8 [boxes,3,SIZE,SIZE], an input of the bundle with a dimension for samples."""

    def __call__(self, rows: Sequence[dict[str, torch.Tensor]]) -> list[Any]:
        return [{"images": crops(row["photo"], row["boxes"]), "boxes": row["boxes"]} for row in rows]


class Label(Stage):
    def __call__(self, rows: Sequence[dict[str, torch.Tensor]]) -> list[Any]:
        return [
            [
                {"box": [round(side) for side in box], "label": LABELS[best], "probability": round(probability, 3)}
                for box, best, probability in zip(
                    row["boxes"].tolist(), row["output"].argmax(1).tolist(), row["output"].amax(1).tolist(), strict=True
                )
            ]
            for row in rows
        ]


def crops(photo: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    found = []
    for left, top, right, bottom in boxes.round().int().tolist():
        part = resized_crop(photo, top, left, max(1, bottom - top), max(1, right - left), [SIZE, SIZE], antialias=True)
        found.append((part * 255).to(torch.uint8))
    crops_of_photo: torch.Tensor = torch.stack(found) if found else torch.empty((0, 3, SIZE, SIZE), dtype=torch.uint8)
    return crops_of_photo


def decoded(body: bytes) -> torch.Tensor:
    """The pixels of an image, at most MAX_SIDE on each side, from 0 to 1. Raises InvalidInput."""
    try:
        with Image.open(io.BytesIO(body), formats=("JPEG", "PNG", "WEBP")) as image:
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            pixels: torch.Tensor = pil_to_tensor(image.convert("RGB")).float() / 255
            return pixels
    except (OSError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"the body is not an image: {error}") from error


pipeline = [Decode, Detect, Boxes]
labelled = [Decode, Find, Crop, Bundle("clocks.bundle"), Label]
