"""The whole service over HTTP answers as the unsplit model does."""

import asyncio
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch

from examples.digits.train import LABELS
from multiworld_serving.models.export.torchvision_models import load_model
from multiworld_serving.testing.local_service import LocalService
from tests.e2e.images import png

pytestmark = pytest.mark.timeout(300)


async def classify(url: str, images: list[bytes], clients: int = 8) -> list[dict[str, object]]:
    authorizer = asyncio.Semaphore(clients)
    async with httpx.AsyncClient(timeout=60.0) as client:

        async def one(body: bytes) -> dict[str, object]:
            async with authorizer:
                answer = await client.post(f"{url}/predict", content=body, headers={"content-type": "image/png"})
            assert answer.status_code == 200, answer.text
            found: dict[str, object] = answer.json()["predictions"][0]
            return found

        return await asyncio.gather(*(one(body) for body in images))


async def test_answers_equal_those_of_the_unsplit_model(service: LocalService, digits: Path) -> None:
    held_out = safetensors.torch.load_file(digits / "held_out.safetensors")
    model = load_model("resnet18", str(digits / "digits.safetensors"), image_size=32)
    with torch.inference_mode():
        expected = model.classifier()(held_out["images"])
    answers = await classify(service.url, [png(image) for image in held_out["images"]])
    classes = torch.tensor([int(str(answer["class_id"])) for answer in answers])
    right = (classes == held_out["labels"]).float().mean().item()
    unsplit = (expected.argmax(1) == held_out["labels"]).float().mean().item()
    assert unsplit > 0.9
    assert right == pytest.approx(unsplit)
    probabilities = torch.tensor([float(str(answer["probability"])) for answer in answers])
    torch.testing.assert_close(probabilities, expected.max(1).values, atol=1e-4, rtol=1e-3)
    assert all(answer["label"] == LABELS[int(str(answer["class_id"]))] for answer in answers)
