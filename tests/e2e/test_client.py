"""The Python client against a running service, with every kind of input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.digits.train import LABELS
from multiworld_client import AsyncClient, Client, InputError, Prediction
from multiworld_serving.testing.local_service import LocalService
from tests.e2e.images import pil_image, png


@pytest.fixture
def client(service: LocalService) -> Iterator[Client]:
    with Client(service.url, timeout_s=60.0) as running:
        yield running


@pytest.fixture
async def aio_client(service: LocalService) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.url, timeout_s=60.0) as running:
        yield running


def assert_right(prediction: Prediction, row: Tensor) -> None:
    best = int(row.argmax())
    assert (prediction.label, prediction.best.class_id) == (LABELS[best], best)
    assert prediction.probability == pytest.approx(float(row[best]), rel=1e-3, abs=1e-4)
    assert prediction.version.startswith("digits-")
    assert prediction.model == "resnet18"
    assert len(prediction.path) == 2
    assert prediction.attempts >= 1
    assert prediction.tries >= 1


def write(image: Tensor, folder: Path) -> Path:
    (folder / "ü.png").write_bytes(png(image))
    return folder / "ü.png"


KINDS: dict[str, Callable[[Tensor, Path], object]] = {
    "path": write,
    "path as text": lambda image, folder: str(write(image, folder)),
    "bytes": lambda image, folder: png(image),
    "Pillow": lambda image, folder: pil_image(image),
    "Pillow with alpha": lambda image, folder: pil_image(image).convert("RGBA"),
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
async def test_predict_accepts_every_kind_of_input(
    client: Client, aio_client: AsyncClient, pixels: Tensor, expected: Tensor, kind: str, tmp_path: Path
) -> None:
    given = KINDS[kind](pixels[0], tmp_path)
    for prediction in (client.predict(given, request_id="mine"), await aio_client.predict(given, request_id="mine")):
        assert_right(prediction, expected[0])
        assert prediction.request_id == "mine"
        assert len(prediction.labels) == 5
    assert len(client.predict(given, top_k=2).labels) == 2


async def test_predict_batch_returns_one_prediction_per_image(
    client: Client, aio_client: AsyncClient, pixels: Tensor, expected: Tensor
) -> None:
    for given in (pixels, pixels.numpy(), [png(image) for image in pixels], [pil_image(image) for image in pixels]):
        for predictions in (client.predict_batch(given, top_k=1), await aio_client.predict_batch(given, top_k=1)):
            assert len({prediction.request_id for prediction in predictions}) == 1
            for prediction, row in zip(predictions, expected, strict=True):
                assert_right(prediction, row)


INVALID_INPUTS: dict[str, tuple[object, str]] = {
    "None": (None, "is not an image"),
    "a path that does not exist": ("no/such/file.jpg", "cannot read"),
    "a path with a zero byte": ("a\0b", "cannot read"),
    "bytes that are not an image": (b"hello", "not a JPEG, PNG or WebP"),
    "empty": (b"", "not a JPEG, PNG or WebP"),
    "float64": (np.zeros((3, 32, 32)), "float64 cannot be sent"),
    "channels last": (np.zeros((32, 32, 3), np.uint8), "expected \\[3, S, S\\]"),
    "two at once": (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "expected \\[3, S, S\\]"),
}


@pytest.mark.parametrize("name", INVALID_INPUTS)
async def test_invalid_input_is_not_sent(client: Client, aio_client: AsyncClient, name: str) -> None:
    given, message = INVALID_INPUTS[name]
    with pytest.raises(InputError, match=message):
        client.predict(given)
    with pytest.raises(InputError, match=message):
        await aio_client.predict(given)


def test_invalid_batch_or_request_id_is_not_sent(client: Client) -> None:
    invalid: list[object] = [[], b"x", "x", None, np.zeros((0, 3, 32, 32), np.uint8)]
    for given in invalid:
        with pytest.raises(InputError):
            client.predict_batch(given)
    with pytest.raises(InputError, match="without spaces"):
        client.predict(np.zeros((3, 32, 32), np.uint8), request_id="a b")


def test_client_imports_no_heavy_libraries_and_nothing_of_the_service() -> None:
    unwanted = {"torch", "numpy", "PIL", "multiworld", "multiworld_serving"}
    program = f"import multiworld_client, sys; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
