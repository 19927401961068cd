"""The Open Inference Protocol with NVIDIA's client, sync and asyncio: the same answers as /predict."""

import asyncio
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
from tritonclient.utils import InferenceServerException

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
    """uint8 [N,3,S,S], digits that the model was not trained on."""
    images: Pixels = safetensors.torch.load_file(digits / "held_out.safetensors")["images"].numpy()
    assert list(images.shape[1:]) == SHAPE
    return images[:96]


@pytest.fixture(scope="module")
def expected(service: LocalService, pixels: Pixels) -> Probabilities:
    """float32 [N,10], the answers of POST /predict."""
    answers = np.zeros((len(pixels), len(LABELS)), np.float32)
    with httpx.Client(timeout=60.0) as client:
        for row, image in zip(answers, pixels, strict=True):
            url = f"{service.url}/predict?top_k={len(LABELS)}"
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


def assert_describes_the_model(server: Any, metadata: Any, config: Any, index: Any) -> None:
    assert server["name"] == "multiworld-serving"
    assert {"binary_tensor_data", "classification", "statistics"} <= set(server["extensions"])
    assert (metadata["name"], metadata["versions"]) == (MODEL, ["1"])
    assert metadata["inputs"] == [{"name": "input", "datatype": "UINT8", "shape": [-1, *SHAPE]}]
    assert metadata["outputs"] == [{"name": "probabilities", "datatype": "FP32", "shape": [-1, len(LABELS)]}]
    assert (config["name"], config["input"][0]["dims"]) == (MODEL, SHAPE)
    assert config["max_batch_size"] >= 1
    assert index == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]


def test_metadata_and_health_reach_the_client(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready(MODEL, "2")
    assert not client.is_model_ready("other")
    for version in ("", "1"):
        assert_describes_the_model(
            client.get_server_metadata(),
            client.get_model_metadata(MODEL, version),
            client.get_model_config(MODEL, version),
            client.get_model_repository_index(),
        )
        assert client.get_inference_statistics(MODEL, version)["model_stats"][0]["name"] == MODEL
    assert client.get_inference_statistics()["model_stats"][0]["name"] == MODEL


async def test_metadata_and_health_reach_the_asyncio_client(aio_client: Any) -> None:
    assert await aio_client.is_server_live()
    assert await aio_client.is_server_ready()
    assert await aio_client.is_model_ready(MODEL)
    assert await aio_client.is_model_ready(MODEL, "1")
    assert not await aio_client.is_model_ready("other")
    for version in ("", "1"):
        assert_describes_the_model(
            await aio_client.get_server_metadata(),
            await aio_client.get_model_metadata(MODEL, version),
            await aio_client.get_model_config(MODEL, version),
            await aio_client.get_model_repository_index(),
        )
        assert (await aio_client.get_inference_statistics(MODEL, version))["model_stats"][0]["name"] == MODEL
    assert (await aio_client.get_inference_statistics())["model_stats"][0]["name"] == MODEL


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


def test_outputs_are_binary_by_default(client: Any, pixels: Pixels, expected: Probabilities) -> None:
    result = client.infer(MODEL, [tensor("UINT8", pixels[:2], binary=True)])
    assert "binary_data_size" in result.get_output("probabilities")["parameters"]
    assert_same(result, expected[:2])


@pytest.mark.parametrize("binary", [True, False])
def test_classes_have_value_index_and_label(client: Any, pixels: Pixels, expected: Probabilities, binary: bool) -> None:
    result = client.infer(
        MODEL, [tensor("BYTES", pixels[:4], binary=True)], outputs=output(binary=binary, classes=3)
    ).as_numpy("probabilities")
    assert result.shape == (4, 3)
    for row, probabilities in zip(result, expected, strict=False):
        for text in row:
            value, index, label = (text.decode() if isinstance(text, bytes) else text).split(":")
            assert float(value) == pytest.approx(float(probabilities[int(index)]), rel=1e-3, abs=1e-5)
            assert label == LABELS[int(index)]
        best = row[0].decode() if isinstance(row[0], bytes) else row[0]
        assert int(best.split(":")[1]) == probabilities.argmax()


def test_concurrent_requests_get_their_own_answers(
    service: LocalService, client: Any, pixels: Pixels, expected: Probabilities
) -> None:
    before = statistics(service)
    slices = [slice(at, at + 1 + at % 3) for at in range(len(pixels) - 3)]
    asked = [client.async_infer(MODEL, [tensor("UINT8", pixels[part], binary=True)]) for part in slices]
    for handle, part in zip(asked, slices, strict=True):
        assert_same(handle.get_result(), expected[part])
    images = sum(part.stop - part.start for part in slices)
    assert_counted(before, statistics(service), requests=len(slices), images=images)


async def test_concurrent_asyncio_requests_get_their_own_answers(
    service: LocalService, aio_client: Any, pixels: Pixels, expected: Probabilities
) -> None:
    before = statistics(service)
    authorizer = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int) -> None:
        async with authorizer:
            datatype = ("UINT8", "FP32", "BYTES")[number % 3]
            images = tensor(datatype, pixels[number : number + 1], binary=True)
            assert_same(await aio_client.infer(MODEL, [images]), expected[number : number + 1])

    await asyncio.gather(*(one(number) for number in range(len(pixels))))
    assert_counted(before, statistics(service), requests=len(pixels), images=len(pixels))


def statistics(service: LocalService) -> dict[str, Any]:
    (model,) = httpx.get(f"{service.url}/v2/models/{MODEL}/stats").raise_for_status().json()["model_stats"]
    found: dict[str, Any] = model
    return found


def assert_counted(before: dict[str, Any], after: dict[str, Any], *, requests: int, images: int) -> None:
    """Check that the statistics grew by exactly this."""
    assert after["inference_count"] - before["inference_count"] == images
    assert 1 <= after["execution_count"] - before["execution_count"] <= images
    for phase in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        grown = {
            key: after["inference_stats"][phase][key] - before["inference_stats"][phase][key] for key in ("count", "ns")
        }
        assert grown["count"] == requests, phase
        assert grown["ns"] > 0, phase
    assert after["inference_stats"]["fail"] == before["inference_stats"]["fail"]


def test_refusals_raise_the_clients_exception(client: Any, pixels: Pixels) -> None:
    image = tensor("UINT8", pixels[:1], binary=True)
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"model_name": "other", "inputs": [image]}, "404", "the only model is 'resnet18'"),
        ({"model_name": MODEL, "model_version": "7", "inputs": [image]}, "404", "no version '7'"),
        ({"model_name": MODEL, "inputs": [image], "timeout": 1}, "504", "."),
        ({"model_name": MODEL, "inputs": [image, image]}, "400", "given 2 times"),
        ({"model_name": MODEL, "inputs": [image], "sequence_id": 3}, "400", "stateful"),
        ({"model_name": MODEL, "inputs": [triton.InferInput("x", [1], "BYTES")]}, "400", "no input 'x'"),
    ]
    for arguments, status, says in refused:
        with pytest.raises(InferenceServerException, match=says) as raised:
            client.infer(**arguments)
        assert raised.value.status() == status
    with pytest.raises(InferenceServerException, match="the only model is") as raised:
        client.get_model_metadata("other")
    assert raised.value.status() == "404"


async def test_refusals_raise_the_asyncio_clients_exception(aio_client: Any, pixels: Pixels) -> None:
    with pytest.raises(InferenceServerException, match="expected \\[N, 3, 32, 32\\]") as raised:
        await aio_client.infer(MODEL, [tensor("UINT8", pixels[:1, :, :8], binary=True)])
    assert raised.value.status() == "400"
