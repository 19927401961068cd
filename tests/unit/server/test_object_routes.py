"""The HTTP API of a pipeline in Python: /predict, a path of its own, validation, and the Open Inference Protocol."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from torch import Tensor

from multiworld_serving.common.service.predictor import Prediction, ServedModel
from multiworld_serving.models.stages.local import LocalPipeline
from multiworld_serving.models.stages.objects import OBJECT_ROWS, encode, rows_of
from tests.unit.server.frontend_app import ColourPredictor, running_frontend
from tests.unit.server.v2_requests import binary_tensor, request
from tests.unit.stages.pipelines import load

PIPELINE = """
    import msgspec
    import numpy as np
    import pydantic
    import torch

    class Ask(msgspec.Struct):
        do: str
        count: int = 1

    class Form(pydantic.BaseModel):
        do: str
        count: int = 1

    class Echo(Stage):
        def __call__(self, requests):
            return [self.result(each) for each in requests]

        def result(self, request):
            if request.inputs:
                return {name: self.changed(value) for name, value in request.inputs.items()}
            do = request.query.get("do") or (request.json().do if self.request else request.text)
            return {
                "bytes": b"raw", "text": "some text", "tensor": {"x": torch.ones(2), "y": np.arange(2)}, "none": None,
                "own": Response(b"<p>", "text/html", 201, {"X-Own": "1"}), "refuse": InvalidInput("not this"),
                "bad": Response(b"", "text/plain", 99), "split": Response(b"", "text/plain", 200, {"a": "b\\r\\nc: d"}),
                "headers": sorted(request.headers), "type": request.content_type, "body": request.body,
            }[do]

        def changed(self, value):
            return value.upper() if isinstance(value, bytes) else np.asarray(value) * 2

    class Typed(Echo):
        request = Ask

    class Modelled(Echo):
        request = Form

    path = {"typed": "/v1/typed", "modelled": "/v1/modelled"}
    pipeline = [Echo]
    typed = [Typed]
    modelled = [Modelled]
"""


def predictor(folder: Path, name: str, attribute: str) -> ColourPredictor:
    pipeline = load(folder, PIPELINE, f"{name}.py").source._replace(attribute=attribute).load()
    local = LocalPipeline(pipeline)

    def answer(rows: Tensor) -> Prediction:
        results, _ = local.run([OBJECT_ROWS.decoded(rows)[index] for index in range(len(rows))])
        return Prediction(rows_of([encode(each) for each in results]), "echo", "v1", 0, 0, 0, 1, ("w",))

    return ColourPredictor(answer=answer, serves=ServedModel("echo", "v1", (), (), pipeline=pipeline.describe()))


@pytest.fixture
async def client(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    attribute = getattr(request, "param", "pipeline")
    made = predictor(tmp_path, f"routes{abs(hash(request.node.nodeid)) % 10**9}", attribute)
    async with running_frontend(made, made.serves) as frontend:
        yield frontend.client


@pytest.mark.parametrize(
    ("do", "status", "content_type", "body"),
    [
        ("bytes", 200, "application/octet-stream", b"raw"),
        ("text", 200, "text/plain; charset=utf-8", b"some text"),
        ("tensor", 200, "application/json", b'{"x":[1.0,1.0],"y":[0,1]}'),
        ("none", 200, "application/json", b"null"),
        ("own", 201, "text/html; charset=utf-8", b"<p>"),
    ],
)
async def test_the_result_of_the_last_stage_is_the_response(
    client: httpx.AsyncClient, do: str, status: int, content_type: str, body: bytes
) -> None:
    response = await client.post("/predict/echo", content=do)
    assert (response.status_code, response.headers["content-type"], response.content) == (status, content_type, body)
    assert response.headers["x-model-version"] == "v1"
    if do == "own":
        assert response.headers["x-own"] == "1"


@pytest.mark.parametrize(
    ("do", "status", "reason"),
    [("refuse", 400, "invalid_input"), ("bad", 500, "stage_error"), ("split", 500, "stage_error")],
)
async def test_refusals_and_invalid_responses_have_a_reason(
    client: httpx.AsyncClient, do: str, status: int, reason: str
) -> None:
    response = await client.post("/predict", content=do)
    assert (response.status_code, response.json()["reason"]) == (status, reason)


async def test_the_first_stage_gets_body_query_and_headers_without_credentials(client: httpx.AsyncClient) -> None:
    given = {"authorization": "Bearer k", "cookie": "c", "x-mine": "1", "content-type": "text/x"}
    headers = (await client.post("/predict?do=headers", headers=given)).json()
    assert "x-mine" in headers
    assert not {"authorization", "cookie", "host"} & set(headers)
    assert (await client.post("/predict?do=type", headers=given)).text == "text/x"
    assert (await client.post("/predict?do=body", content=b"\xff\x00")).content == b"\xff\x00"
    large = b"x" * 150_000
    assert (await client.post("/predict?do=body", content=large)).content == large


@pytest.mark.parametrize("kind", ["typed", "modelled"])
async def test_bodies_are_validated_before_they_reach_a_worker_and_described(kind: str, tmp_path: Path) -> None:
    made = predictor(tmp_path, f"routes_{kind}", kind)
    async with running_frontend(made, made.serves) as frontend:
        client = frontend.client
        assert (await client.post(f"/v1/{kind}", json={"do": "text"})).text == "some text"
        for body, named in (
            (b'{"do": 5}', "$.do"),
            (b"{}", "'do'"),
            (b'{"do": "text", "count": "x"}', "$.count"),
            (b"{", "JSON"),
        ):
            response = await client.post("/predict", content=body)
            assert (response.status_code, response.json()["reason"]) == (400, "invalid_input")
            assert named in response.json()["error"]
        assert len(made.request_ids) == 1
        paths = (await client.get("/openapi.json")).json()["paths"]
    for path in ("/predict", f"/v1/{kind}"):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "count" in json.dumps(schema)


async def test_tensors_and_texts_of_the_open_inference_protocol_are_rows(client: httpx.AsyncClient) -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2], [3, 4]]},
        {"name": "t", "datatype": "BYTES", "shape": [2], "data": ["a", "ü"]},
        {"name": "n", "datatype": "INT64", "shape": [2], "data": [1, 2]},
    ]
    response = await client.post("/v2/models/echo/infer", json={"inputs": inputs})
    outputs = {each["name"]: each for each in response.json()["outputs"]}
    assert (outputs["x"]["datatype"], outputs["x"]["shape"], outputs["x"]["data"]) == ("FP32", [2, 2], [2, 4, 6, 8])
    assert (outputs["t"]["datatype"], outputs["t"]["data"]) == ("BYTES", ["A", "ü"])
    assert (outputs["n"]["datatype"], outputs["n"]["data"]) == ("INT64", [2, 4])
    only = await client.post("/v2/models/echo/infer", json={"inputs": inputs, "outputs": [{"name": "n"}]})
    assert [each["name"] for each in only.json()["outputs"]] == ["n"]


async def test_binary_data_goes_in_and_out(client: httpx.AsyncClient) -> None:
    values = np.array([[1.5, 2]], np.float32)
    described, data = binary_tensor("FP32", [1, 2], values.tobytes())
    arguments = request((described | {"name": "x"}, data), parameters={"binary_data_output": True})
    response = await client.post("/v2/models/echo/infer", **arguments)
    head = int(response.headers["inference-header-content-length"])
    assert np.frombuffer(response.content[head:], np.float32).tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"inputs": [{"name": "x", "datatype": "FP99", "shape": [1], "data": [1]}]}, "FP99"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [], "data": [1]}]}, "expected [N, …]"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1], "data": [1]}]}, "expected [N, …]"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1]}]}, "does not fill its shape"),
        ({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": [1]}]}, "must be texts"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1000], "data": [1] * 1000}]}, "expected 1 to"),
        (
            {
                "inputs": [
                    {"name": n, "datatype": "FP32", "shape": [c], "data": [1] * c} for n, c in (("a", 1), ("b", 2))
                ]
            },
            "equal",
        ),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}] * 2}, "given twice"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}], "outputs": [{"name": "q"}]}, "'q'"),
    ],
)
async def test_invalid_requests_of_the_protocol_are_refused(
    client: httpx.AsyncClient, body: dict[str, Any], why: str
) -> None:
    response = await client.post("/v2/models/echo/infer", json=body)
    assert response.status_code == 400
    assert why in response.json()["error"]


async def test_a_body_without_json_belongs_to_predict(client: httpx.AsyncClient) -> None:
    headers = {"inference-header-content-length": "0"}
    response = await client.post("/v2/models/echo/infer", content=b"x", headers=headers)
    assert (response.status_code, "/predict" in response.text) == (400, True)
