"""The gRPC port on a socket of this process, with the pipeline of `frontend_app` and Triton's message classes."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from multiworld_serving.common.config.keys import KeySet
from multiworld_serving.common.http.listener import bind
from multiworld_serving.server.frontend.api.groups import ModelGroups
from multiworld_serving.server.frontend.api.inference import Inference
from multiworld_serving.server.frontend.api.oip_grpc.grpc_port import GrpcPort
from multiworld_serving.server.frontend.auth.authorizer import ApiKeys, Authorizer
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from tests.unit.server.frontend_app import MODEL, ColourPredictor, group_of

PATIENCE_S = 30.0


@dataclass
class RunningGrpc:
    """The port, a client of it, and its dependencies."""

    port: GrpcPort
    number: int
    stub: Any
    predictor: ColourPredictor
    metrics: FrontendMetrics

    def requests(self, **labels: str) -> float:
        """How many requests with these labels were counted."""
        labels = {"model": MODEL.name, "version": MODEL.version, "protocol": "grpc", **labels}
        return self.metrics.registry.get_sample_value("multiworld_requests_total", labels) or 0


@asynccontextmanager
async def running_grpc(predictor: ColourPredictor | None = None, **limits: Any) -> AsyncIterator[RunningGrpc]:
    """The port with these limits, served in this process."""
    predictor, metrics = predictor or ColourPredictor(), FrontendMetrics()
    inference = Inference(predictor, MODEL, RequestLimits(**limits))
    groups = ModelGroups(group_of(predictor, metrics, inference, protocols=("grpc",)))
    metrics.requests.log_all = True
    authorizer = Authorizer(ApiKeys(KeySet(), KeySet()))
    with bind("127.0.0.1", 0, "--grpc-port", reserve=True) as reserved:
        port = GrpcPort(groups, inference.gate.limits, metrics.requests, authorizer, reserved, 1000, None)
        number: int = reserved.getsockname()[1]
        async with inference.threads, port, channel(number) as opened:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(opened)
            yield RunningGrpc(port, number, stub, predictor, metrics)


def channel(port: int) -> Any:
    """A connection to this port."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}")


async def refused(call: Awaitable[Any], code: str, says: str = "") -> dict[str, Any]:
    """Check that a call fails with this code and text. Returns the trailing metadata."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert (raised.value.code().name, says in raised.value.details()) == (code, True), raised.value
    return dict(raised.value.trailing_metadata())


def parameters(given: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a message."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return {name: pb.InferParameter(**{kinds[type(value)]: value}) for name, value in given.items()}


def tensor(name: str, datatype: str, shape: list[int], given: dict[str, Any] | None = None, **contents: Any) -> Any:
    """An input, with its values in these contents if there are any."""
    found = pb.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, parameters=parameters(given or {})
    )
    if contents:
        found.contents.CopyFrom(pb.InferTensorContents(**contents))
    return found


def wanted(name: str, **given: Any) -> Any:
    """A requested output with these parameters."""
    return pb.ModelInferRequest.InferRequestedOutputTensor(name=name, parameters=parameters(given))


def infer(*inputs: Any, raw: list[bytes] | None = None, given: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A request for the color model, unless `fields` names another."""
    fields = {"model_name": MODEL.name, **fields}
    return pb.ModelInferRequest(
        inputs=inputs, raw_input_contents=raw or [], parameters=parameters(given or {}), **fields
    )
