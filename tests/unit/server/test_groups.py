"""A frontend with several models: which one gets a request, and what it says about all of them."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import httpx
import msgspec
import pytest

from multiworld_serving.common.config.keys import KeySet, hash_key, parse_keys
from multiworld_serving.common.service.model_change import ModelChange, request_change
from multiworld_serving.server.frontend.api.app import create_admin_app, create_api
from multiworld_serving.server.frontend.api.groups import ModelGroup, ModelGroups
from multiworld_serving.server.frontend.api.inference import Inference
from multiworld_serving.server.frontend.auth.authorizer import ApiKeys, Authorizer
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from multiworld_serving.server.supervisor.notify import unix_socket
from tests.unit.server.frontend_app import MODEL, ColourPredictor, Repository, client_of, group_of, image_bytes

INFER = {"inputs": [{"name": "input", "datatype": "UINT8", "shape": [1, 3, 16, 16], "data": [0] * 768}]}


@asynccontextmanager
async def frontend(
    *names: str, absent: tuple[str, ...] = (), texts: tuple[str, ...] = (), keys: KeySet | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, FrontendMetrics]]:
    """A frontend with these models. No leader has described the absent ones yet; `texts` have no labels, and so no /predict."""
    metrics, groups = FrontendMetrics(), list[ModelGroup]()
    async with AsyncExitStack() as stack:
        for name in names:
            model = replace(MODEL, name=name, labels=() if name in texts else MODEL.labels)
            inference = Inference(ColourPredictor(), model, RequestLimits())
            await stack.enter_async_context(inference.threads)
            groups.append(group_of(inference.gate.pipeline, metrics, inference))
        for name in absent:
            groups.append(group_of(ColourPredictor(states=("broken",)), metrics, name=name))
        authorizer = None if keys is None else Authorizer(ApiKeys(keys, KeySet()))
        yield await stack.enter_async_context(client_of(create_api(ModelGroups(*groups), metrics, authorizer))), metrics


async def test_request_goes_to_the_model_that_its_path_names_and_is_counted_for_it() -> None:
    async with frontend("a", "b") as (client, metrics):
        for path in ("/v2/models/b/infer", "/v2/models/b/versions/1/infer"):
            response = await client.post(path, json=INFER)
            assert response.status_code == 200, response.text
        assert (await client.post("/predict/b", files={"image": image_bytes("blue")})).status_code == 200
        assert (await client.get("/v2/models")).json() == {"models": ["a", "b"]}
        assert (await client.get("/v2/models/b")).json()["name"] == "b"
        index = (await client.post("/v2/repository/index")).json()
    assert len(index) == 2
    counted = metrics.registry.get_sample_value
    assert counted("multiworld_images_total", {"model": "b", "version": MODEL.version}) == 3
    assert counted("multiworld_images_total", {"model": "a", "version": MODEL.version}) == 0


async def test_request_without_a_known_model_is_refused_with_the_names_of_the_others() -> None:
    async with frontend("a", "b") as (client, metrics):
        for path in ("/v2/models/c/infer", "/predict/c"):
            response = await client.post(path, json=INFER)
            assert (response.status_code, response.json()["reason"]) == (404, "unknown_model")
            assert "Request for unknown model: 'c'; the models are 'a', 'b'" in response.json()["error"]
    assert 'model="c"' not in metrics.text().decode(), "clients cannot create series"


@pytest.mark.parametrize(
    ("names", "texts", "absent", "status", "model"),
    [
        (("a", "b"), (), (), 200, "a"),
        (("a", "b"), (), ("c",), 200, "a"),
        (("a", "b"), ("a",), (), 200, "b"),
        ((), (), ("a", "b"), 503, ""),
        (("a", "b"), ("a", "b"), (), 400, ""),
    ],
)
async def test_predict_without_a_name_is_the_first_model_that_has_it(
    names: tuple[str, ...], texts: tuple[str, ...], absent: tuple[str, ...], status: int, model: str
) -> None:
    async with frontend(*names, absent=absent, texts=texts) as (client, metrics):
        response = await client.post("/predict", files={"image": image_bytes("blue")})
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert response.status_code == status, response.text
    assert ("/predict" in paths) == bool(model)
    assert ("/predict/b" in paths) == (len(names) - len(texts) > 1)
    if model:
        assert metrics.registry.get_sample_value("multiworld_images_total", {"model": model, "version": MODEL.version})
        assert f'multiworld_requests_total{{code="200",model="{model}",protocol="predict"' in metrics.text().decode()


async def test_other_models_serve_while_one_is_not_ready() -> None:
    async with frontend("a", absent=("b",)) as (client, _):
        assert (await client.post("/v2/models/a/infer", json=INFER)).status_code == 200
        assert (await client.post("/predict", files={"image": image_bytes("blue")})).status_code == 200
        late = await client.post("/v2/models/b/infer", json=INFER)
        assert (late.status_code, late.json()["reason"]) == (503, "not_ready")
        assert (await client.get("/v2/models/a/ready")).status_code == 200
        assert (await client.get("/v2/models/b/ready")).status_code == 503
        assert (await client.get("/v2/health/ready")).status_code == 503
        assert (await client.get("/readyz")).json() == {"ready": True, "models": ["a"]}
        assert (await client.get("/openapi.json")).status_code == 200


async def test_status_is_that_of_the_named_model_and_lists_all() -> None:
    async with frontend("a", "b") as (client, _):
        first, named = (await client.get("/status")).json(), (await client.get("/status?model=b")).json()
        assert first["models"] == named["models"] == {"a": "ready", "b": "ready"}
        assert (await client.get("/status?model=c")).status_code == 404
        assert (await client.get("/readyz")).json() == {"ready": True, "models": ["a", "b"]}


async def test_key_of_some_models_permits_inference_with_these_only() -> None:
    keys = parse_keys(f"alice:{hash_key('one')}:b\nbob:{hash_key('all')}", "keys")
    async with frontend("a", "b", keys=keys) as (client, _):
        for key, path, status in (
            ("one", "/v2/models/b/infer", 200),
            ("one", "/v2/models/a/infer", 403),
            ("all", "/v2/models/a/infer", 200),
            ("none", "/v2/models/b/infer", 401),
        ):
            response = await client.post(path, json=INFER, headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == status, (key, path, response.text)


async def test_operations_go_to_the_named_model() -> None:
    metrics, first, second = FrontendMetrics(), Repository(), Repository()
    groups = ModelGroups(group_of(first, metrics, name="a"), group_of(second, metrics, name="b"))
    async with client_of(create_admin_app(metrics.scrape, groups)) as client:
        loaded = await client.post("/v2/repository/models/b/load", json={"parameters": {"weights": "random:2"}})
        assert (loaded.status_code, loaded.json()["name"]) == (200, "b")
        assert (await client.post("/v2/repository/models/b/unload")).status_code == 200
        assert (await client.post("/v2/repository/models/c/unload")).status_code == 404
        assert (await client.post("/admin/rolling-restart?model=c", json={})).status_code == 404
    assert (first.loaded, first.unloaded, second.loaded, second.unloaded) == ([], False, ["random:2"], True)


REMOVE = '{"action": "remove", "name": "a", "timeout_s": 0.2}'


@pytest.mark.parametrize(
    ("reply", "body", "status", "says"),
    [
        (b'""', REMOVE, 200, ""),
        (b'"it is the last model"', REMOVE, 409, "it is the last model"),
        (b"", REMOVE, 503, "the supervisor has not confirmed the change: it has closed the connection"),
        ("frozen", REMOVE, 503, "it has not replied within 0.2 s"),
        ("gone", REMOVE, 503, "the supervisor has not confirmed the change"),
        (None, REMOVE, 400, "not started by `multiworld serve`"),
        (b"", '{"action": "drop", "name": "a"}', 400, "the body is invalid"),
    ],
)
async def test_change_of_models_has_the_reply_of_the_supervisor_or_says_that_there_is_none(
    reply: bytes | str | None, body: str, status: int, says: str
) -> None:
    metrics, replaced, received = FrontendMetrics(), asyncio.Event(), []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(msgspec.json.decode(await reader.readline(), type=ModelChange))
        assert isinstance(reply, bytes)
        writer.write(reply)
        writer.close()
        replaced.set()

    listener, name = unix_socket(socket.SOCK_STREAM)
    change = partial(request_change, name, replaced=replaced, stop_s=0)
    app = create_admin_app(
        metrics.scrape,
        ModelGroups(group_of(Repository(), metrics, name="a")),
        change_models=None if reply is None else lambda given: change(change=given),
    )
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        if isinstance(reply, bytes):
            stack.callback((await asyncio.start_unix_server(answer, sock=listener)).close)
        elif reply == "frozen":
            listener.listen()
        else:
            listener.close()
        client = await stack.enter_async_context(client_of(app))
        headers = {"content-type": "application/json"}
        response = await client.post("/admin/models", content=body, headers=headers)
        assert (response.status_code, says in response.text) == (status, True), response.text
        response = await client.post("/admin/models", content=body, headers={"content-type": "text/plain"})
        assert response.status_code == 415
    assert received == (
        [msgspec.json.decode(REMOVE, type=ModelChange)] if isinstance(reply, bytes) and body == REMOVE else []
    )
