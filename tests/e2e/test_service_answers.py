"""The whole service over HTTP: correct answers, clear refusals, and continued service."""

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch
from PIL import Image

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


def bomb() -> bytes:
    """A 20,000 x 20,000 PNG: 400 million pixels in some 50 KB."""
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


BAD_INPUT: dict[str, tuple[Callable[[], bytes], str, set[int]]] = {
    "not an image": (lambda: b"hello", "image/png", {415, 422}),
    "truncated": (lambda: png(torch.zeros(3, 64, 64, dtype=torch.uint8))[:60], "image/png", {422}),
    "1x1": (lambda: png(torch.zeros(3, 1, 1, dtype=torch.uint8)), "image/png", {422}),
    "decompression bomb": (bomb, "image/png", {413, 422}),
    "wrong content type": (lambda: b"{}", "application/json", {415}),
    "empty body": (lambda: b"", "image/png", {400, 422}),
    "body over the limit": (lambda: bytes(11 * 2**20), "image/png", {413}),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gets_a_clear_error_and_the_service_continues(service: LocalService, name: str) -> None:
    body, content_type, statuses = BAD_INPUT[name]
    answer = httpx.post(f"{service.url}/predict", content=body(), headers={"content-type": content_type}, timeout=60)
    assert answer.status_code in statuses, answer.text
    assert len(answer.json()["error"]) > 20
    good = httpx.post(
        f"{service.url}/predict",
        files={"image": ("zero.png", png(torch.full((3, 32, 32), 90, dtype=torch.uint8)))},
        timeout=60,
    )
    assert good.status_code == 200, good.text
    assert {"predictions", "model", "timings_ms"} <= good.json().keys()


def test_deadline_that_cannot_be_met_is_refused_in_time(service: LocalService) -> None:
    body = png(torch.zeros(3, 32, 32, dtype=torch.uint8))
    answer = httpx.post(
        f"{service.url}/predict",
        content=body,
        headers={"content-type": "image/png", "x-request-timeout-s": "0.0001"},
        timeout=60,
    )
    assert answer.status_code == 504, answer.text


def test_status_routes_describe_the_service(service: LocalService) -> None:
    assert httpx.get(f"{service.url}/healthz").status_code == 200
    assert httpx.get(f"{service.url}/readyz").status_code == 200
    status = httpx.get(f"{service.url}/status").json()
    assert [len(stage["replicas"]) for stage in status["stages"]] == [2, 2]
    for url in (f"{service.url}/metrics", service.metrics_url):
        text = httpx.get(url).text
        assert "multiworld_world_up" in text
        assert "multiworld_requests_total" in text
    json.dumps(status)
