"""The real HTTP application with a fake pipeline: the class of an image is its strongest color."""

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from PIL import Image
from torch import Tensor

from multiworld_serving.common.service.predictor import ImageSizes, ModelVersion, Prediction, RestartStep, ServedModel
from multiworld_serving.common.service.snapshots import PipelineSnapshot, ReplicaState
from multiworld_serving.server.frontend.api.app import Application, create_api
from multiworld_serving.server.frontend.api.groups import ModelGroup, ModelGroups
from multiworld_serving.server.frontend.api.inference import Inference
from multiworld_serving.server.frontend.auth.authorizer import Authorizer
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.event_feed import EventFeed
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from multiworld_serving.server.frontend.observability.request_records import InferenceProtocol
from tests.unit.server.image_model import image_classifier
from tests.unit.server.pipelines import pipeline

MAX_BODY_BYTES = 200_000
SIDE = 16
MODEL = image_classifier("meancolour", "weights v1 ü", ("red", "green", "blue"), ImageSizes(18, SIDE))


@dataclass
class ColourPredictor(LeaderPool):
    """Returns which color is strongest. Can be told to fail or to wait."""

    failure: Exception | None = None
    rejection: Exception | None = None
    proceed: asyncio.Event | None = None
    answer: Callable[[Tensor], Prediction] | None = None
    serves: ServedModel = MODEL
    states: tuple[ReplicaState, ...] = ("ready", "ready")
    draining: bool = False
    asked: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    deadlines_s: list[float] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    cancelled: int = 0

    async def predict(self, rows: Tensor, *, key: str = "", **asked: Any) -> Prediction:
        assert self.answer or (rows.dtype, rows.shape[1:], key) == (torch.uint8, (3, SIDE, SIDE), "")
        self.deadlines_s.append(asked["deadline_s"])
        self.request_ids.append(asked["request_id"])
        self.keys.append(key)
        self.asked.release()
        try:
            if self.proceed is not None:
                await self.proceed.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        if self.answer is not None:
            return self.answer(rows)
        probabilities = rows.float().mean(dim=(2, 3)).div(64).softmax(1)
        path = ("stage0-0", "stage1-1")
        return Prediction(probabilities, MODEL.name, MODEL.version, 0.001, 0.002, 0.003, 2, path, version_digest="0f0f")

    def end(self) -> None:
        pass

    async def admit(self, deadline_s: float) -> None:
        if self.rejection is not None:
            raise self.rejection

    @property
    def version(self) -> ModelVersion:
        return ModelVersion(1, self.serves.version)

    @property
    def ready(self) -> bool:
        return not self.draining and all(state == "ready" for state in self.states)

    def snapshot(self) -> PipelineSnapshot:
        stages = ((state,) for state in self.states)
        name, version = self.serves.name, self.serves.version
        return pipeline(*stages, model=name, version=version, ready=self.ready, draining=self.draining)


@dataclass
class Repository(ColourPredictor):
    """Records load requests, and fails on demand."""

    loaded: list[str | None] = field(default_factory=list)
    unloaded: bool = False
    loading: str | None = None
    drained: list[tuple[str, bool]] = field(default_factory=list)
    steps: tuple[RestartStep | Exception, ...] = ()

    async def restart_workers(self) -> AsyncGenerator[RestartStep, None]:
        for step in self.steps:
            if isinstance(step, Exception):
                raise step
            yield step

    async def load_version(self, weights: str | None) -> ModelVersion:
        self.loaded.append(weights)
        if self.failure is not None:
            raise self.failure
        return ModelVersion(2, weights or "own")

    async def unload(self) -> None:
        self.unloaded = True

    async def drain(self, host: str, *, undo: bool) -> None:
        self.drained.append((host, undo))

    def snapshot(self) -> PipelineSnapshot:
        ready = not self.unloaded
        return pipeline(ready=ready, version_number=7, version_loading=self.loading, unloaded=self.unloaded)


def group_of(
    predictor: LeaderPool,
    metrics: FrontendMetrics,
    inference: Inference | None = None,
    protocols: Sequence[InferenceProtocol] = ("predict", "v2"),
    name: str = "",
) -> ModelGroup:
    """The group of a model; without inference, its leaders have not described it yet."""
    name = name or (MODEL.name if inference is None else inference.signature.model.name)
    requests = metrics.requests.of_model(name)
    predictor.name = name
    group = ModelGroup(predictor, requests, EventFeed(requests))
    if inference is not None:
        requests.declare(name, inference.signature.model.version, protocols)
        group.open(inference)
    return group


def client_of(app: Application) -> httpx.AsyncClient:
    """A client that calls the application without a network."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@dataclass(frozen=True)
class RunningFrontend:
    """The started application, a client of it, and its dependencies."""

    app: Application
    client: httpx.AsyncClient
    predictor: ColourPredictor
    metrics: FrontendMetrics

    async def assert_serves(self) -> None:
        """A valid request gets its answer: earlier requests did no harm."""
        response = await self.client.post("/predict", files={"image": image_bytes("blue")})
        assert response.status_code == 200, response.text
        assert response.json()["predictions"][0]["label"] == "blue"

    def sample(self, name: str, **labels: str) -> float | None:
        """The current value of one series."""
        return self.metrics.registry.get_sample_value(name, labels)


@asynccontextmanager
async def running_frontend(
    predictor: ColourPredictor | None = None,
    model: ServedModel = MODEL,
    *,
    authorizer: Authorizer | None = None,
    access_log: bool = False,
    admin_port: int | None = None,
    **limits: Any,
) -> AsyncIterator[RunningFrontend]:
    """The application with these limits, served in this process."""
    predictor, metrics = predictor or ColourPredictor(), FrontendMetrics()
    metrics.requests.log_all = access_log
    inference = Inference(predictor, model, RequestLimits(**limits))
    groups = ModelGroups(group_of(predictor, metrics, inference))
    app = create_api(groups, metrics, authorizer, admin_port=admin_port)
    async with inference.threads, inference.large_images, client_of(app) as client:
        yield RunningFrontend(app, client, predictor, metrics)


def image_bytes(
    colour: str | int | tuple[int, ...] = "blue",
    size: tuple[int, int] = (40, 30),
    file_format: str = "PNG",
    mode: str = "RGB",
    **options: Any,
) -> bytes:
    """An image file of one color."""
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, file_format, **options)
    return file.getvalue()
