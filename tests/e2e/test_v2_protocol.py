"""The Open Inference Protocol with NVIDIA's clients, over HTTP and gRPC, sync and asyncio: the answers of the model."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from numpy.typing import NDArray
from torch import Tensor
from tritonclient.utils import InferenceServerException

from examples.digits.train import IMAGE_SIZE, LABELS
from multiworld_serving.testing.local_service import LocalService
from tests.e2e.images import png
from tests.waiting import wait_until

MODEL = "resnet18"
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""gRPC clients of one process share a connection otherwise."""
SHAPE = [3, IMAGE_SIZE, IMAGE_SIZE]


@pytest.fixture
def client(service: LocalService) -> Iterator[Any]:
    with triton.InferenceServerClient(address(service)) as running:
        yield running


@pytest.fixture
async def aio_client(service: LocalService) -> AsyncIterator[Any]:
    async with triton_aio.InferenceServerClient(address(service)) as running:
        yield running


@pytest.fixture
def grpc_client(service: LocalService) -> Iterator[Any]:
    with triton_grpc.InferenceServerClient(service.grpc_address) as running:
        yield running


def address(service: LocalService) -> str:
    return service.url.removeprefix("http://")


def tensor(datatype: str, images: Tensor, *, binary: bool | None) -> Any:
    """The images as an input of this datatype, for HTTP as binary data or as JSON; for gRPC if `binary` is None."""
    data: NDArray[Any] = images.numpy()
    if datatype == "FP32":
        data = data.astype(np.float32) / 255
    elif datatype == "BYTES":
        data = np.array([png(image) for image in images], dtype=np.object_)
    if binary is None:
        return triton_grpc.InferInput("input", list(data.shape), datatype).set_data_from_numpy(data)
    return triton.InferInput("input", list(data.shape), datatype).set_data_from_numpy(data, binary_data=binary)


def output(*, binary: bool, classes: int = 0) -> list[Any]:
    return [triton.InferRequestedOutput("probabilities", binary_data=binary, class_count=classes)]


def assert_same(result: Any, expected: Tensor) -> None:
    np.testing.assert_allclose(result.as_numpy("probabilities"), expected, rtol=1e-3, atol=1e-4)


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


Way = tuple[str, bool, bool, str | None, str | None]
"""Data type, whether input and output are binary, and their compression."""
WAYS: list[Way] = [
    ("UINT8", True, True, None, None),
    ("UINT8", False, False, "gzip", None),
    ("UINT8", True, False, "deflate", "gzip"),
    ("FP32", True, True, "gzip", "deflate"),
    ("FP32", False, True, None, "gzip"),
    ("BYTES", True, True, None, None),
    ("BYTES", True, False, "deflate", "deflate"),
]


@pytest.mark.parametrize("way", WAYS)
async def test_both_clients_get_the_answers_of_the_model(
    client: Any, aio_client: Any, pixels: Tensor, expected: Tensor, way: Way
) -> None:
    datatype, binary_in, binary_out, packed_in, packed_out = way
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


# -- gRPC ------------------------------------------------------------------------------------------------------------------------


def test_metadata_and_health_reach_the_grpc_client(grpc_client: Any) -> None:
    assert grpc_client.is_server_live()
    assert grpc_client.is_server_ready()
    assert grpc_client.is_model_ready(MODEL)
    assert grpc_client.get_server_metadata(as_json=True)["name"] == "multiworld-serving"
    metadata = grpc_client.get_model_metadata(MODEL, "1", as_json=True)
    assert metadata["inputs"] == [{"name": "input", "datatype": "UINT8", "shape": ["-1", *map(str, SHAPE)]}]
    assert grpc_client.get_model_repository_index(as_json=True)["models"] == [
        {"name": MODEL, "version": "1", "state": "READY"}
    ]


@pytest.mark.parametrize("datatype", ["UINT8", "FP32", "BYTES"])
def test_grpc_client_gets_the_answers_of_the_model(
    grpc_client: Any, pixels: Tensor, expected: Tensor, datatype: str
) -> None:
    result = grpc_client.infer(MODEL, [tensor(datatype, pixels[:8], binary=None)], model_version="1", request_id="mine")
    assert_same(result, expected[:8])
    assert (result.get_response().id, result.get_response().model_version) == ("mine", "1")
    classes = [triton_grpc.InferRequestedOutput("probabilities", class_count=2)]
    best = grpc_client.infer(MODEL, [tensor(datatype, pixels[:1], binary=None)], outputs=classes)
    first, _ = (int(text.split(b":")[1]) for text in best.as_numpy("probabilities")[0])
    assert first == expected[0].argmax()


def test_both_frontends_serve_the_port(service: LocalService) -> None:
    """The kernel chooses one of them for each connection."""
    asked = 0

    def answering() -> int:
        nonlocal asked
        with triton_grpc.InferenceServerClient(service.grpc_address, channel_args=OWN_CONNECTION) as client:
            for _ in range(3):
                with pytest.raises(InferenceServerException, match="unknown model"):
                    client.infer("x", [])
        asked += 3
        counts = [
            service.metric("multiworld_requests_total", protocol="grpc", reason="unknown_model", process=name)
            for name in ("frontend-0", "frontend-1")
        ]
        return sum(count > 0 for count in counts)

    wait_until(lambda: answering() == 2)
