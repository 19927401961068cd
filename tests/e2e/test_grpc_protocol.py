"""The Open Inference Protocol over gRPC with NVIDIA's client: answers as over HTTP, from two frontends."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from multiworld_serving.testing.local_service import LocalService
from tests.e2e.images import png
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

MODEL = "resnet18"
SIDE = 32
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""Clients of one process share a connection otherwise."""
Pixels = NDArray[np.uint8]


@pytest.fixture(scope="module")
def pixels() -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (8, 3, SIDE, SIDE), np.uint8)


@pytest.fixture(scope="module")
def expected(running_service: LocalService, pixels: Pixels) -> NDArray[np.float32]:
    """The probabilities of each image, as JSON over HTTP gives them."""
    image = {"name": "input", "datatype": "UINT8", "shape": list(pixels.shape), "data": pixels.ravel().tolist()}
    found = httpx.post(f"{running_service.url}/v2/models/{MODEL}/infer", json={"inputs": [image]}, timeout=60).json()
    (output,) = found["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.fixture
def client(service: LocalService) -> Iterator[Any]:
    with triton.InferenceServerClient(service.grpc_address) as running:
        yield running


def tensor(images: Pixels, datatype: str = "UINT8") -> Any:
    data: NDArray[Any] = images
    if datatype == "FP32":
        data = images.astype(np.float32) / 255
    elif datatype == "BYTES":
        data = np.array([png(image) for image in images], dtype=np.object_)
    found = triton.InferInput("input", list(data.shape), datatype)
    found.set_data_from_numpy(data)
    return found


def assert_same(result: Any, expected: NDArray[np.float32]) -> None:
    # The same images in another batch: the last bits may differ.
    np.testing.assert_allclose(result.as_numpy("probabilities"), expected, rtol=1e-3, atol=1e-5)


def test_metadata_and_health_reach_the_client(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.get_server_metadata(as_json=True)["name"] == "multiworld-serving"
    metadata = client.get_model_metadata(MODEL, "1", as_json=True)
    assert metadata["inputs"] == [{"name": "input", "datatype": "UINT8", "shape": ["-1", "3", str(SIDE), str(SIDE)]}]
    assert client.get_model_repository_index(as_json=True)["models"] == [
        {"name": MODEL, "version": "1", "state": "READY"}
    ]


@pytest.mark.parametrize("datatype", ["UINT8", "FP32", "BYTES"])
def test_answers_equal_those_over_http(
    client: Any, pixels: Pixels, expected: NDArray[np.float32], datatype: str
) -> None:
    result = client.infer(MODEL, [tensor(pixels, datatype)], model_version="1", request_id="mine")
    assert_same(result, expected)
    assert (result.get_response().id, result.get_response().model_version) == ("mine", "1")
    best = client.infer(
        MODEL, [tensor(pixels[:1], datatype)], outputs=[triton.InferRequestedOutput("probabilities", class_count=2)]
    ).as_numpy("probabilities")
    assert [int(text.split(b":")[1]) for text in best[0]] == np.argsort(-expected[0])[:2].tolist()


def test_both_frontends_serve_the_port(service: LocalService) -> None:
    """The kernel chooses one of them for each connection."""
    asked = 0

    def answering() -> int:
        nonlocal asked
        with triton.InferenceServerClient(service.grpc_address, channel_args=OWN_CONNECTION) as client:
            for _ in range(3):
                with pytest.raises(InferenceServerException, match="no model"):
                    client.infer("x", [])
        asked += 3
        counts = [
            service.metric("multiworld_requests_total", protocol="grpc", reason="unknown_model", process=name)
            for name in ("frontend-0", "frontend-1")
        ]
        return sum(count > 0 for count in counts)

    wait_until(lambda: answering() == 2)
