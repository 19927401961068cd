"""The Python client against a real service: the answers of the service, whatever the picture is given as."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

from deploy.service import LocalService
from examples.digits.train import IMAGE_SIZE, LABELS
from models import load_model, reference
from multiworld_client import (
    AsyncClient,
    Client,
    DeadlineError,
    InputError,
    InvalidRequestError,
    Prediction,
    UnreachableError,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pixels(digits: Path) -> Tensor:
    """uint8 [8,3,S,S]."""
    return safetensors.torch.load_file(digits / "held_out.safetensors")["images"][:8]


@pytest.fixture(scope="module")
def expected(digits: Path, pixels: Tensor) -> Tensor:
    """float32 [8,10]."""
    model = load_model(
        "resnet18", str(digits / "digits.safetensors"), labels=str(digits / "labels.txt"), image_size=IMAGE_SIZE
    )
    with torch.inference_mode():
        found: Tensor = reference(model)(pixels)
    return found


@pytest.fixture
def client(service: LocalService) -> Iterator[Client]:
    with Client(service.url, timeout_s=60.0) as running:
        yield running


@pytest.fixture
async def aio_client(service: LocalService) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.url, timeout_s=60.0) as running:
        yield running


def picture(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def png(image: Tensor) -> bytes:
    file = io.BytesIO()
    picture(image).save(file, "PNG")
    return file.getvalue()


def assert_right(prediction: Prediction, row: Tensor) -> None:
    best = int(row.argmax())
    assert (prediction.label, prediction.best.class_id) == (LABELS[best], best)
    assert prediction.probability == pytest.approx(float(row[best]), rel=1e-3, abs=1e-4)
    assert prediction.version.startswith("digits-")
    assert prediction.model == "resnet18"
    assert len(prediction.path) == prediction.attempts == 2
    assert prediction.tries == 1


def write(image: Tensor, folder: Path) -> Path:
    (folder / "ü.png").write_bytes(png(image))
    return folder / "ü.png"


KINDS: dict[str, Callable[[Tensor, Path], object]] = {
    "path": write,
    "path as text": lambda image, folder: str(write(image, folder)),
    "bytes": lambda image, folder: png(image),
    "Pillow": lambda image, folder: picture(image),
    "Pillow with alpha": lambda image, folder: picture(image).convert("RGBA"),
    "numpy": lambda image, folder: image.numpy(),
    "numpy float": lambda image, folder: image.numpy().astype(np.float32) / 255,
    "torch": lambda image, folder: image,
    "torch float": lambda image, folder: image / 255,
    "torch, batch of one": lambda image, folder: image[None],
    "numpy, not contiguous": lambda image, folder: np.ascontiguousarray(image.numpy().transpose(1, 2, 0)).transpose(
        2, 0, 1
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_picture_is_answered_whatever_it_is_given_as(
    client: Client, aio_client: AsyncClient, pixels: Tensor, expected: Tensor, kind: str, tmp_path: Path
) -> None:
    given = KINDS[kind](pixels[0], tmp_path)
    for prediction in (client.predict(given, request_id="mine"), await aio_client.predict(given, request_id="mine")):
        assert_right(prediction, expected[0])
        assert prediction.request_id == "mine"
        assert len(prediction.labels) == 5
    assert len(client.predict(given, top_k=2).labels) == 2


async def test_several_pictures_are_answered_together(
    client: Client, aio_client: AsyncClient, pixels: Tensor, expected: Tensor
) -> None:
    for given in (pixels, pixels.numpy(), [png(image) for image in pixels], [picture(image) for image in pixels]):
        for predictions in (client.predict_batch(given, top_k=1), await aio_client.predict_batch(given, top_k=1)):
            assert len({prediction.request_id for prediction in predictions}) == 1
            for prediction, row in zip(predictions, expected, strict=True):
                assert_right(prediction, row)


async def test_many_tasks_get_their_own_answers(aio_client: AsyncClient, pixels: Tensor, expected: Tensor) -> None:
    predictions = await asyncio.gather(*(aio_client.predict(pixels[number % 8]) for number in range(32)))
    for number, prediction in enumerate(predictions):
        assert_right(prediction, expected[number % 8])


NO_PICTURES: dict[str, tuple[object, str]] = {
    "nothing": (None, "is no picture"),
    "text that is no path": ("no/such/file.jpg", "cannot be read"),
    "a path with a zero byte": ("a\0b", "cannot be read"),
    "bytes that are no image": (b"hello", "no JPEG, PNG or WebP"),
    "empty": (b"", "no JPEG, PNG or WebP"),
    "float64": (np.zeros((3, 32, 32)), "float64 cannot be sent"),
    "planes last": (np.zeros((32, 32, 3), np.uint8), "expected \\[3, S, S\\]"),
    "two at once": (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "expected \\[3, S, S\\]"),
}


@pytest.mark.parametrize("name", NO_PICTURES)
async def test_what_is_no_picture_is_not_sent(client: Client, aio_client: AsyncClient, name: str) -> None:
    given, says = NO_PICTURES[name]
    with pytest.raises(InputError, match=says):
        client.predict(given)
    with pytest.raises(InputError, match=says):
        await aio_client.predict(given)


def test_batch_of_nothing_is_not_sent(client: Client) -> None:
    nothing: list[object] = [[], b"x", "x", None, np.zeros((0, 3, 32, 32), np.uint8)]
    for given in nothing:
        with pytest.raises(InputError):
            client.predict_batch(given)


async def test_refusal_that_stays_is_raised_at_once(client: Client, aio_client: AsyncClient, pixels: Tensor) -> None:
    torn = png(pixels[0])[:60]
    with pytest.raises(InvalidRequestError) as raised:
        client.predict(torn, request_id="torn-1")
    error = raised.value
    assert (error.status, error.reason, error.request_id) == (422, "invalid_image", "torn-1")
    with pytest.raises(InvalidRequestError, match="expected \\[N, 3, 32, 32\\]"):
        await aio_client.predict(np.zeros((3, 16, 16), np.uint8))
    with pytest.raises(InputError, match="without spaces"):
        client.predict(torn, request_id="a b")


async def test_deadline_is_told_to_the_service_and_kept(
    client: Client, aio_client: AsyncClient, pixels: Tensor
) -> None:
    with pytest.raises(DeadlineError):
        client.predict(png(pixels[0]), timeout_s=0.0002)
    with pytest.raises(DeadlineError):
        await aio_client.predict(png(pixels[0]), timeout_s=0.0002)


async def test_service_says_whether_it_is_ready(client: Client, aio_client: AsyncClient) -> None:
    assert client.is_ready()
    assert await aio_client.is_ready()


async def test_nobody_there_is_an_error_after_the_time_is_over() -> None:
    with Client("http://127.0.0.1:9", timeout_s=0.5) as client:
        assert not client.is_ready()
        with pytest.raises(UnreachableError):
            client.predict(b"\xff\xd8\xff")
    async with AsyncClient("http://127.0.0.1:9", timeout_s=0.5) as aio_client:
        with pytest.raises(UnreachableError):
            await aio_client.predict(b"\xff\xd8\xff")


def test_client_imports_neither_torch_nor_numpy_nor_pillow() -> None:
    program = (
        "import multiworld_client, sys; print([m for m in ('torch', 'numpy', 'PIL', 'server') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
