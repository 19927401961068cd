"""The models of a frontend by name, and the group of leaders that serves each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.service.errors import NoModelNamedError, NotReadyError, UnknownModelError
from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.server.frontend.api.inference import Inference
from multiworld_serving.server.frontend.api.object_route import ObjectRoute
from multiworld_serving.server.frontend.api.oip.metadata import repository_index
from multiworld_serving.server.frontend.api.predict_route import PredictRoute, wrong_path
from multiworld_serving.server.frontend.http.route import Endpoint
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.event_feed import EventFeed
from multiworld_serving.server.frontend.observability.request_records import ModelRequests


@dataclass(eq=False)
class ModelGroup:
    """One model of a frontend.

    Attributes:
        pool: the leaders that serve it.
        requests: the counts of its requests.
        feed: of GET /events.
        inference: computes its requests; None until a leader has described the model.
        serves_predict: whether it has /predict: it classifies images, or is a pipeline in Python. True until a leader has described it.
    """

    pool: LeaderPool
    requests: ModelRequests
    feed: EventFeed
    inference: Inference | None = None
    serves_predict: bool = True

    @property
    def name(self) -> str:
        """Of the model; "" = its leaders have not told it yet."""
        return self.pool.name

    @property
    def path(self) -> str:
        """The path that its pipeline names; empty if there is none."""
        pipeline = None if self.inference is None else self.inference.signature.model.pipeline
        return "" if pipeline is None else pipeline.path

    def open(self, inference: Inference) -> None:
        """Serve the model, which is known now."""
        self.inference, model = inference, inference.signature.model
        self.serves_predict = model.pipeline is not None or model.classifies_images
        if model.pipeline is not None:
            self._answer: Endpoint = ObjectRoute(inference, model.pipeline).answer
        else:
            self._answer = PredictRoute(inference).answer if model.classifies_images else wrong_path(model)

    def described(self) -> Inference:
        """What computes its requests. Raises NotReadyError."""
        if self.inference is None:
            raise NotReadyError(f"the model {self.name!r} has not been ready yet; wait until its leader has started")
        return self.inference

    def statistics(self) -> dict[str, Any]:
        """One element of `model_stats`."""
        return self.requests.statistics(str(self.pool.version.number))

    async def predict(self, request: Request) -> Response:
        """Respond to POST /predict. Raises RequestRejected."""
        self.described()
        return await self._answer(request)


class ModelGroups:
    """All models of a frontend. The first one is that of the status page and of paths that name none.

    Args:
        failing_file: see `FrontendSettings`.
    """

    def __init__(self, *groups: ModelGroup, failing_file: Path | None = None) -> None:
        self._groups = groups
        self._failing_file = failing_file

    def __iter__(self) -> Iterator[ModelGroup]:
        return iter(self._groups)

    @property
    def names(self) -> list[str]:
        """The names of all models."""
        return [group.name for group in self]

    @property
    def only(self) -> ModelGroup | None:
        """The only model; None if there are several."""
        return self._groups[0] if len(self._groups) == 1 else None

    def find(self, name: str | None) -> ModelGroup | None:
        """The model with this name, or the only one; without a name that of /predict. None if there is none."""
        return self.of_predict if name is None else self.only or self._with_name(name)

    def at_path(self, path: str) -> ModelGroup | None:
        """The model whose pipeline names this path."""
        return next((group for group in self if group.path == path), None)

    def _with_name(self, name: str) -> ModelGroup | None:
        return next((group for group in self if group.name == name), None)

    @property
    def of_predict(self) -> ModelGroup | None:
        """The model that answers /predict without a name: the first one that has /predict. Added models come last."""
        return self.only or next((group for group in self if group.serves_predict), None)

    def named(self, model: str, version: str | None = None) -> ModelGroup:
        """The model with this name. Raises UnknownModelError unless it serves, and this version of it if one is given."""
        if (found := self._with_name(model)) is None:
            known = f"the only model is {self.only.name!r}" if self.only else f"the models are {_listed(self.names)}"
            raise UnknownModelError(f"Request for unknown model: {model[:64]!r}; {known}")
        if version is not None:
            found.described().signature.check_served(model, version, found.pool.version)
        return found

    def chosen(self, request: Request) -> ModelGroup:
        """The model that the query parameter `model` names; without it the first one. Raises UnknownModelError."""
        name = request.query_params.get("model")
        return next(iter(self)) if name is None else self.named(name)

    def snapshot(self, group: ModelGroup) -> PipelineSnapshot:
        """The state of one model, with the states of all, and the processes that fail."""
        found = group.pool.snapshot()
        models: dict[str, str] = {each.name: each.pool.snapshot().state for each in self} if self.only is None else {}
        failing = self._failing() or ()
        return replace(found, models=models, failing=failing) if models or failing else found

    @suppress_errors
    def _failing(self) -> tuple[str, ...]:
        return () if self._failing_file is None else tuple(self._failing_file.read_text(encoding="utf-8").splitlines())

    def index(self, *, only_ready: bool = False) -> list[dict[str, str]]:
        """The versions of all models, as Triton's repository extension describes them."""
        return [each for group in self for each in repository_index(group.pool.snapshot(), only_ready=only_ready)]

    @property
    def not_ready(self) -> ModelGroup | None:
        """The first model that is not ready and not unloaded; the first one if all are unloaded. None if the service is ready."""
        expected = [group for group in self if group.pool.snapshot().state != "unloaded"] or list(self)
        return next((group for group in expected if not group.pool.ready), None)

    async def predict(self, request: Request) -> Response:
        """POST /predict and /predict/NAME."""
        name = request.path_params.get("model")
        group = self.of_predict if name is None else self.named(name)
        if group is None:
            raise NoModelNamedError(
                f"the models here are {_listed(self.names)}; send the request to /v2/models/NAME/infer"
            )
        return await group.predict(request)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
