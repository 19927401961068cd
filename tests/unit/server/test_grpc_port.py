"""The gRPC port: answers, status codes, limits, keys, TLS and the end, with a client of gRPC's own."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2 as model_config
from tritonclient.grpc import service_pb2 as pb

from multiworld_serving.common.service import errors
from multiworld_serving.common.service.errors import STATUS_OF_REASON
from multiworld_serving.server.frontend.api.oip_grpc import grpc_port
from multiworld_serving.server.frontend.api.oip_grpc.grpc_port import STATUS_CODES
from tests.unit.server.frontend_app import MODEL, ColourPredictor
from tests.unit.server.grpc_port import PATIENCE_S, channel, infer, refused, running_grpc, tensor
from tests.unit.server.v2_requests import COLOURS, pixels
from tests.waiting import until

SHAPE = list(pixels("red").shape)


def colours(*names: str, **fields: Any) -> Any:
    data = pixels(*names)
    return infer(tensor("input", "UINT8", list(data.shape)), raw=[data.numpy().tobytes()], **fields)


def strongest(response: Any) -> list[str]:
    (output,) = response.outputs
    values = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(output.shape)
    return [COLOURS[index] for index in values.argmax(1)]


async def test_infer_is_answered_logged_and_counted_as_over_http(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_grpc() as port:
        call = port.stub.ModelInfer(colours("green", "blue", id="mine"), metadata=(("x-request-id", "first"),))
        response = await call
        assert (strongest(response), response.id) == (["green", "blue"], "mine")
        trailers = dict(await call.trailing_metadata())
        assert trailers == {
            "x-request-id": "first",
            "x-model-version": "weights%20v1%20%C3%BC",
            "x-model-digest": "0f0f",
            "x-path": "stage0-0,stage1-1",
            "x-attempts": "2",
        }
        assert port.predictor.request_ids == ["first"]
        await until(lambda: port.requests(code="200", reason="ok") == 1)
        images = {"model": MODEL.name, "version": MODEL.version}
        assert port.metrics.registry.get_sample_value("multiworld_images_total", images) == 2
    (line,) = [record for record in caplog.records if record.message == "request"]
    assert (line.request_id, line.target, line.status, line.path) == (  # type: ignore[attr-defined]
        *("first", "/inference.GRPCInferenceService/ModelInfer", 200),
        "stage0-0,stage1-1",
    )


def test_every_reason_has_a_status_code() -> None:
    assert set(STATUS_OF_REASON.values()) <= STATUS_CODES.keys()


@pytest.mark.parametrize(
    ("failure", "code", "reason", "pushback"),
    [
        (errors.OverloadedError("full", retry_after_s=2.5), "RESOURCE_EXHAUSTED", "overloaded", "2500"),
        (errors.NoReplicaError("no replica"), "UNAVAILABLE", "no_replica", "1000"),
        (errors.PoisonError("poison"), "INTERNAL", "poison", None),
        (RuntimeError("a bug"), "INTERNAL", "internal", None),
    ],
)
async def test_failures_have_code_reason_and_time_of_a_retry(
    failure: Exception, code: str, reason: str, pushback: str | None
) -> None:
    async with running_grpc(ColourPredictor(failure=failure)) as port:
        says = failure.detail if isinstance(failure, errors.RequestRejected) else "search its log for the request id"
        trailers = await refused(port.stub.ModelInfer(colours("red")), code, says)
        assert (trailers["reason"], trailers.get("grpc-retry-pushback-ms")) == (reason, pushback)
        await until(lambda: port.requests(code=str(STATUS_OF_REASON[reason]), reason=reason) == 1)
        port.predictor.failure = None
        assert strongest(await port.stub.ModelInfer(colours("blue"))) == ["blue"]


async def test_invalid_requests_harm_nobody() -> None:
    async with running_grpc(max_body_bytes=100_000) as port:
        asked = asyncio.create_task(_answers(port.stub, 20))
        await refused(port.stub.ModelInfer(colours("red", model_name="x")), "NOT_FOUND", "the only model is")
        await refused(port.stub.ModelInfer(infer()), "INVALID_ARGUMENT", "length >= 1")
        large = infer(tensor("input", "UINT8", SHAPE), raw=[bytes(200_000)])
        await refused(port.stub.ModelInfer(large), "RESOURCE_EXHAUSTED", "larger than max")
        await refused(port.stub.ModelInfer(colours("red"), compression=grpc.Compression.Gzip), "UNIMPLEMENTED", "gzip")
        await refused(port.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest()), "UNIMPLEMENTED")
        await until(lambda: port.requests(code="413", reason="body_too_large") == 1)
        assert await asked == ["red"] * 20


async def _answers(stub: Any, count: int) -> list[str]:
    return [strongest(await stub.ModelInfer(colours("red")))[0] for _ in range(count)]


async def test_the_clients_deadline_is_that_of_the_request() -> None:
    async with running_grpc(ColourPredictor(proceed=asyncio.Event())) as port:
        for timeout_s in (0.3, 3.0, 20.0):  # within a short one, the call may not even reach a slow server
            await refused(port.stub.ModelInfer(colours("red"), timeout=timeout_s), "DEADLINE_EXCEEDED")
            own = colours("red", given={"timeout": int(timeout_s * 1e6)})
            await refused(port.stub.ModelInfer(own), "DEADLINE_EXCEEDED")
            if len(port.predictor.deadlines_s) > 1:
                break
        await until(lambda: port.predictor.cancelled)
        # The client ends the call at its own deadline: on a slow machine this looks like a cancellation.
        counted = (("504", "deadline"), ("499", "cancelled"))
        await until(lambda: sum(port.requests(code=code, reason=reason) for code, reason in counted))
        near, *_, far = port.predictor.deadlines_s
        assert abs(far - near) < PATIENCE_S


async def test_a_cancelled_call_cancels_the_request() -> None:
    async with running_grpc(ColourPredictor(proceed=asyncio.Event())) as port:
        call = port.stub.ModelInfer(colours("red"))
        running = asyncio.create_task(call.code())
        await port.predictor.asked.acquire()
        call.cancel()
        assert await running is grpc.StatusCode.CANCELLED
        await until(lambda: port.predictor.cancelled == 1)
        await until(lambda: port.requests(code="499", reason="cancelled") == 1)


async def never() -> AsyncIterator[bytes]:
    """A message that never arrives."""
    await asyncio.Event().wait()
    yield b""


async def test_calls_that_send_nothing_keep_out_neither_probes_nor_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_port, "_SLOW_S", 0.2)
    monkeypatch.setattr(grpc_port, "_SMALL_S", PATIENCE_S)
    async with running_grpc(max_body_bytes=1 << 20, max_held_bytes=4 << 20) as port, channel(port.number) as opened:
        # As many as there are places: nothing waits behind the calls of the test, so that these have no limit of time themselves.
        methods = ["ServerLive", "ModelReady", "ModelInfer"] * 4
        silent = [opened.stream_unary(f"/inference.GRPCInferenceService/{each}")(never()) for each in methods]
        await until(lambda: port.port._infer_places._free.locked() and port.port._places._free.locked())
        assert (await port.stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S)).live
        assert (await port.stub.ModelReady(pb.ModelReadyRequest(name=MODEL.name), timeout=PATIENCE_S)).ready
        assert strongest(await port.stub.ModelInfer(colours("red"), timeout=PATIENCE_S)) == ["red"]
        for call in silent:
            call.cancel()


async def test_a_message_that_never_arrives_ends_with_the_servers_timeout() -> None:
    async with running_grpc(timeout_s=0.3) as port, channel(port.number) as opened:
        silent = opened.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        await refused(silent(never()), "DEADLINE_EXCEEDED", "send it faster")


async def test_a_call_without_a_message_is_invalid() -> None:
    async with running_grpc() as port, channel(port.number) as opened:
        empty = opened.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        await refused(empty(iter(())), "INVALID_ARGUMENT", "there is no message")


async def test_stop_answers_what_is_in_flight_and_accepts_nothing_more() -> None:
    predictor = ColourPredictor(proceed=asyncio.Event())
    async with running_grpc(predictor) as port:
        call = asyncio.create_task(_answers(port.stub, 1))
        await predictor.asked.acquire()
        port.port.stop(PATIENCE_S)
        async with channel(port.number) as opened:
            late = opened.unary_unary("/inference.GRPCInferenceService/ServerLive")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await late(b"")
            # CANCELLED: the connection was made just before the port closed.
            assert raised.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert predictor.proceed is not None
        predictor.proceed.set()
        assert await call == ["red"]


async def test_configuration_and_statistics_are_those_of_http() -> None:
    async with running_grpc() as port:
        await port.stub.ModelInfer(colours("green", "blue"))
        for name in (MODEL.name, ""):
            (found,) = (await port.stub.ModelStatistics(pb.ModelStatisticsRequest(name=name))).model_stats
            assert (found.name, found.version, found.inference_count) == (MODEL.name, "1", 2)
            assert (found.inference_stats.success.count, found.batch_stats[0].compute_infer.count) == (1, 2)
        config = (await port.stub.ModelConfig(pb.ModelConfigRequest(name=MODEL.name, version="1"))).config
        assert (config.name, list(config.version_policy.specific.versions)) == (MODEL.name, [1])
        (given,) = config.input
        assert (given.name, list(given.dims)) == ("input", SHAPE[1:])
        assert given.data_type == model_config.DataType.TYPE_UINT8
        assert given.format == model_config.ModelInput.FORMAT_NCHW
        assert config.output[0].data_type == model_config.DataType.TYPE_FP32
        assert config.parameters["weights"].string_value
        for method, message in (("ModelConfig", pb.ModelConfigRequest), ("ModelStatistics", pb.ModelStatisticsRequest)):
            wrong = getattr(port.stub, method)(message(name="other"))
            await refused(wrong, "NOT_FOUND", "Request for unknown model: 'other'; the only model is")


async def test_a_service_that_is_not_ready_says_so() -> None:
    predictor = ColourPredictor(states=("ready", "broken"), rejection=errors.NotReadyError("not ready: stage 1"))
    async with running_grpc(predictor) as port:
        assert (await port.stub.ServerLive(pb.ServerLiveRequest())).live
        assert not (await port.stub.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await port.stub.ModelReady(pb.ModelReadyRequest(name=MODEL.name))).ready
        assert not (await port.stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models
        trailers = await refused(port.stub.ModelInfer(colours("red")), "UNAVAILABLE", "not ready: stage 1")
        assert (trailers["reason"], trailers["grpc-retry-pushback-ms"]) == ("not_ready", "1000")
