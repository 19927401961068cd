"""The Open Inference Protocol with NVIDIA's client, sync and asyncio: the same answers as /predict."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from numpy.typing import NDArray

from examples.digits.train import IMAGE_SIZE, LABELS
from multiworld_serving.testing.local_service import LocalService
from tests.e2e.images import png

pytestmark = pytest.mark.timeout(300)

MODEL = "resnet18"
CONCURRENCY = 16
SHAPE = [3, IMAGE_SIZE, IMAGE_SIZE]
Pixels = NDArray[np.uint8]
Probabilities = NDArray[np.float32]


@pytest.fixture(scope="module")
def pixels(digits: Path) -> Pixels:
    """uint8 [N,3,S,S]."""
    images: Pixels = safetensors.torch.load_file(digits / "images.safetensors")["images"].numpy()
    assert list(images.shape[1:]) == SHAPE
    return images


@pytest.fixture(scope="module")
def expected(running_service: LocalService, pixels: Pixels) -> Probabilities:
    """float32 [N,10], the answers of POST /predict."""
    answers = np.zeros((len(pixels), len(LABELS)), np.float32)
    with httpx.Client(timeout=60.0) as client:
        for row, image in zip(answers, pixels, strict=True):
            url = f"{running_service.url}/predict?top_k={len(LABELS)}"
            found = client.post(url, content=png(image), headers={"content-type": "image/png"}).raise_for_status()
            for prediction in found.json()["predictions"]:
                row[prediction["class_id"]] = prediction["probability"]
    assert answers.sum(1) == pytest.approx(1, abs=1e-4)
    return answers


@pytest.fixture
def client(service: LocalService) -> Iterator[Any]:
    with triton.InferenceServerClient(address(service), concurrency=CONCURRENCY) as running:
        yield running


@pytest.fixture
async def aio_client(service: LocalService) -> AsyncIterator[Any]:
    async with triton_aio.InferenceServerClient(address(service)) as running:
        yield running


def address(service: LocalService) -> str:
    return service.url.removeprefix("http://")


def tensor(datatype: str, images: Pixels, *, binary: bool) -> Any:
    """The images as an input of this datatype."""
    data: NDArray[Any] = images
    if datatype == "FP32":
        data = images.astype(np.float32) / 255
    elif datatype == "BYTES":
        data = np.array([png(image) for image in images], dtype=np.object_)
    found = triton.InferInput("input", list(data.shape), datatype)
    found.set_data_from_numpy(data, binary_data=binary)
    return found


def output(*, binary: bool, classes: int = 0) -> list[Any]:
    return [triton.InferRequestedOutput("probabilities", binary_data=binary, class_count=classes)]


def assert_same(result: Any, expected: Probabilities) -> None:
    # The same images in another batch: the last bits may differ.
    np.testing.assert_allclose(result.as_numpy("probabilities"), expected, rtol=1e-3, atol=1e-5)


def test_metadata_and_health_reach_the_client(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready(MODEL, "2")
    assert not client.is_model_ready("other")
    server = client.get_server_metadata()
    assert server["name"] == "multiworld-serving"
    assert {"binary_tensor_data", "classification", "statistics"} <= set(server["extensions"])
    (index,) = client.get_model_repository_index()
    assert index == {"name": MODEL, "version": "1", "state": "READY", "reason": ""}
    for version in ("", "1"):
        metadata, config = client.get_model_metadata(MODEL, version), client.get_model_config(MODEL, version)
        assert (metadata["name"], metadata["versions"]) == (MODEL, ["1"])
        assert metadata["inputs"] == [{"name": "input", "datatype": "UINT8", "shape": [-1, *SHAPE]}]
        assert metadata["outputs"] == [{"name": "probabilities", "datatype": "FP32", "shape": [-1, len(LABELS)]}]
        assert (config["name"], config["input"][0]["dims"]) == (MODEL, SHAPE)
        assert config["max_batch_size"] >= 1
        assert client.get_inference_statistics(MODEL, version)["model_stats"][0]["name"] == MODEL
    assert client.get_inference_statistics()["model_stats"][0]["name"] == MODEL


WAYS = [
    ("UINT8", True, True, None, None),
    ("UINT8", False, False, "gzip", None),
    ("UINT8", True, False, "deflate", "gzip"),
    ("FP32", True, True, "gzip", "deflate"),
    ("FP32", False, True, None, "gzip"),
    ("BYTES", True, True, None, None),
    ("BYTES", True, False, "deflate", "deflate"),
]


@pytest.mark.parametrize(("datatype", "binary_in", "binary_out", "packed_in", "packed_out"), WAYS)
async def test_both_clients_get_the_answers_of_predict(
    client: Any,
    aio_client: Any,
    pixels: Pixels,
    expected: Probabilities,
    datatype: str,
    binary_in: bool,
    binary_out: bool,
    packed_in: str | None,
    packed_out: str | None,
) -> None:
    arguments = {
        "inputs": [tensor(datatype, pixels[:3], binary=binary_in)],
        "outputs": output(binary=binary_out),
        "request_id": "mine",
        "request_compression_algorithm": packed_in,
        "response_compression_algorithm": packed_out,
    }
    for result in (
        client.infer(MODEL, **arguments),
        client.infer(MODEL, model_version="1", **arguments),
        await aio_client.infer(MODEL, **arguments),
        await aio_client.infer(MODEL, model_version="1", **arguments),
    ):
        assert_same(result, expected[:3])
        head = result.get_response()
        assert (head["model_name"], head["model_version"], head["id"]) == (MODEL, "1", "mine")


def test_concurrent_requests_get_their_own_answers(client: Any, pixels: Pixels, expected: Probabilities) -> None:
    slices = [slice(at, at + 1 + at % 3) for at in range(len(pixels) - 3)]
    asked = [client.async_infer(MODEL, [tensor("UINT8", pixels[part], binary=True)]) for part in slices]
    for handle, part in zip(asked, slices, strict=True):
        assert_same(handle.get_result(), expected[part])
