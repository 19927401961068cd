"""The models of a frontend by name, and the groups of leaders that serve them: one for each version."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope
from torch import Tensor

from multiworld_serving.common.service.errors import NoModelNamedError, NotReadyError, UnknownModelError
from multiworld_serving.common.service.model_versions import Share, model_and_version
from multiworld_serving.common.service.predictor import ModelVersion, Prediction
from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.server.frontend.api.generate.text_codec import TextCodec
from multiworld_serving.server.frontend.api.inference import Inference
from multiworld_serving.server.frontend.api.object_route import ObjectRoute
from multiworld_serving.server.frontend.api.oip.metadata import repository_index
from multiworld_serving.server.frontend.api.predict_route import PredictRoute, wrong_path
from multiworld_serving.server.frontend.api.shadow import Shadow
from multiworld_serving.server.frontend.api.streams import StreamRoute
from multiworld_serving.server.frontend.api.version_choice import VersionChoice, version_at
from multiworld_serving.server.frontend.http.route import Endpoint
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.event_feed import EventFeed
from multiworld_serving.server.frontend.observability.request_records import ModelRequests, RequestRecord

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ModelGroup:
    """One model of a frontend, or one of its versions.

    Attributes:
        pool: the leaders that serve it.
        requests: the counts of its requests.
        feed: of GET /events.
        inference: computes its requests; None until a leader has described the model.
        serves_predict: whether it has /predict: it classifies images, or is a pipeline in Python. True until a leader has described it.
        share: of the requests of the model.
        number: of its version in responses; None if it is the only one and its name has no version: the leaders number its weights.
        codec: texts and tokens of a decoder; None: the model does not generate text.
        path: that its pipeline names; empty if there is none.
        shadows: versions of the model that get copies of its requests.
        shadow: copies requests to this version.
    """

    pool: LeaderPool
    requests: ModelRequests
    feed: EventFeed
    inference: Inference | None = None
    serves_predict: bool = True
    share: Share = 100.0
    number: int | None = None
    codec: TextCodec | None = None
    path: str = ""
    shadows: Sequence[ModelGroup] = ()

    def __post_init__(self) -> None:
        self.shadow = Shadow(self.requests)

    @property
    def name(self) -> str:
        """NAME, or NAME@VERSION: in metrics, the log and commands. "" = its leaders have not told it yet."""
        return self.pool.name

    @property
    def model(self) -> str:
        """NAME: in requests and responses."""
        return model_and_version(self.name)[0]

    @property
    def version(self) -> ModelVersion:
        """The version that serves new requests, with its number in responses."""
        version = self.pool.version
        return version if self.number is None else version._replace(number=self.number)

    def respond(self, rows: Tensor, key: str, prediction: Prediction) -> Prediction:
        """Copy the rows of a request to the shadows. Returns the prediction with the model and version that the client sees."""
        for each in self.shadows:
            each.shadow.copy(each.inference, rows, key, self.described().signature.model, prediction)
        if self.number is None:
            return prediction
        return msgspec.structs.replace(
            prediction, model=self.model, version=str(self.number), version_number=self.number
        )

    def open(self, inference: Inference) -> None:
        """Serve the model, which is known now."""
        self.inference, model = inference, inference.signature.model
        inference.respond = self.respond
        self.path = "" if model.pipeline is None else model.pipeline.path
        if model.pipeline is not None and model.pipeline.decoder:
            self.codec = TextCodec(Path(model.pipeline.decoder))
            self.pool.metrics.declare_generation(self.name)
        self.serves_predict = self.codec is None and (model.pipeline is not None or model.classifies_images)
        if self.codec is not None:
            self._answer: Endpoint = wrong_path(model)
        elif model.pipeline is not None:
            streams = model.pipeline.stages[-1].streams
            self._answer = (StreamRoute if streams else ObjectRoute)(inference, model.pipeline).answer
        else:
            self._answer = PredictRoute(inference).answer if model.classifies_images else wrong_path(model)

    def described(self) -> Inference:
        """What computes its requests. Raises NotReadyError."""
        if self.inference is None:
            raise NotReadyError(f"the model {self.name!r} has not been ready yet; wait until its leader has started")
        return self.inference

    def statistics(self) -> dict[str, Any]:
        """One element of `model_stats`."""
        return self.requests.statistics(str(self.version.number)) | {"name": self.model}

    async def predict(self, request: Request) -> Response:
        """Respond to POST /predict. Raises RequestRejected."""
        self.described()
        return await self._answer(request)


class ModelGroups:
    """All models of a frontend. The first one is that of the status page and of paths that name none.

    Args:
        failing_file, shares_file, share_by: see `FrontendSettings`.
    """

    def __init__(
        self,
        *groups: ModelGroup,
        failing_file: Path | None = None,
        shares_file: Path | None = None,
        share_by: str | None = None,
    ) -> None:
        self._groups = groups
        self._failing_file = failing_file
        self._shares_file = shares_file
        self._shares_text = ""
        self._by_model: dict[str, list[ModelGroup]] = {}
        self._choice = VersionChoice(share_by)
        for group in groups:
            versions = self._versions(group.model)
            if len(versions) > 1 or "@" in group.name:
                group.number = model_and_version(group.name)[1]
            group.share = 100.0 if group is versions[0] else 0.0
        self.read_shares()

    def __iter__(self) -> Iterator[ModelGroup]:
        return iter(self._groups)

    @property
    def names(self) -> list[str]:
        """The names of all models."""
        return list(dict.fromkeys(group.model for group in self))

    @property
    def only(self) -> ModelGroup | None:
        """The only group; None if there are several."""
        return self._groups[0] if len(self._groups) == 1 else None

    def _versions(self, model: str) -> list[ModelGroup]:
        if model not in self._by_model:  # it is unknown, or its leaders have told its name meanwhile
            self._by_model.clear()
            for group in self:
                self._by_model.setdefault(group.model, []).append(group)
        return self._by_model.get(model, [])

    def read_shares(self) -> None:
        """Use the shares that the file has now. If it is invalid, nothing changes."""
        text = self._read(self._shares_file)
        if text and text != self._shares_text:
            self._shares_text = text
            try:
                given = msgspec.json.decode(text, type=dict[str, Share])
            except msgspec.MsgspecError as error:
                logger.error("the shares are unchanged: %s: %s", self._shares_file, error)  # noqa: TRY400
                return
            shares = {model_and_version(name): share for name, share in given.items()}
            for group in self:
                group.share = shares.get(model_and_version(group.name), group.share)
            for group in self:
                others = (each for each in self._versions(group.model) if each is not group)
                group.shadows = tuple(each for each in others if each.share == "shadow")
        for group in self:
            if group.name:
                group.requests.set_share(group.share)

    def choose(self, record: RequestRecord, scope: Scope, model: str, version: str | None = None) -> ModelGroup:
        """The version of a model that gets an inference request, which is counted for it. Raises UnknownModelError."""
        found = self.matching(model, version)
        group = found[0]
        if len(found) > 1:
            shares = [0.0 if isinstance(each.share, str) else each.share for each in found]
            usable = [each.share != "shadow" and each.pool.ready for each in found]
            group = found[version_at(self._choice.place(model, scope), shares, usable)]
        record.counts, record.version = group.requests, group.pool.version.name
        return group

    def matching(self, model: str, version: str | None = None) -> list[ModelGroup]:
        """The versions of the model NAME, or the one that NAME@VERSION or `version` names. Raises UnknownModelError."""
        name, number = model_and_version(model)
        found = self._versions(name)
        if not found:
            known = f"the only model is {self.only.model!r}" if self.only else f"the models are {_listed(self.names)}"
            raise UnknownModelError(f"Request for unknown model: {model[:64]!r}; {known}")
        if version is not None and found[0].number is None:
            found[0].described().signature.check_served(model, version, found[0].version)
            return found
        if version is None and name == model:
            return found
        wanted = version or str(number)
        chosen = [each for each in found if str(model_and_version(each.name)[1]) == wanted]
        if not chosen:
            listed = ", ".join(str(each.number) for each in found)
            raise UnknownModelError(f"the model {name!r} has no version {wanted[:64]!r}; its versions are {listed}")
        return chosen

    def find(self, name: str | None) -> ModelGroup | None:
        """The model with this name, or the only one; without a name that of /predict. None if there is none."""
        if name is None or self.only is not None:
            return self.of_predict
        return next(iter(self._versions(model_and_version(name)[0])), None)

    def at_path(self, path: str) -> ModelGroup | None:
        """The model whose pipeline names this path."""
        return next((group for group in self if group.path == path), None)

    def named(self, model: str, version: str | None = None) -> ModelGroup:
        """As `matching`: the version that is ready and has the largest share. Raises UnknownModelError."""
        return max(
            self.matching(model, version), key=lambda each: (each.pool.ready, each.share != "shadow", each.share)
        )

    def one(self, model: str) -> ModelGroup:
        """The model with this name, for an operation on one version. Raises UnknownModelError if it has several."""
        found = self.matching(model)
        if len(found) > 1:
            listed = _listed([f"{each.model}@{each.number}" for each in found])
            raise UnknownModelError(f"the model {model[:64]!r} has several versions; name one of {listed}")
        return found[0]

    @property
    def of_predict(self) -> ModelGroup | None:
        """The model that answers /predict without a name: the first one that has /predict. Added models come last."""
        return self.only or next((group for group in self if group.serves_predict), None)

    def chosen(self, request: Request) -> ModelGroup:
        """The model that the query parameter `model` names; without it the first one. Raises UnknownModelError."""
        name = request.query_params.get("model")
        return next(iter(self)) if name is None else self.named(name)

    def metadata(self, group: ModelGroup) -> dict[str, Any]:
        """The metadata of a model with the numbers of its versions."""
        versions = [str(each.version.number) for each in self._versions(group.model)]
        return group.described().signature.metadata(group.version) | {"versions": versions}

    def snapshot(self, group: ModelGroup) -> PipelineSnapshot:
        """The state of one model, with the states of all, the shares of its versions, and the processes that fail."""
        found, versions = group.pool.snapshot(), self._versions(group.model)
        models: dict[str, str] = {each.name: each.pool.snapshot().state for each in self} if self.only is None else {}
        shares = {each.name: each.share for each in versions} if len(versions) > 1 else {}
        failing = tuple(self._read(self._failing_file).splitlines())
        return replace(found, models=models, shares=shares, failing=failing) if models or failing else found

    @staticmethod
    def _read(file: Path | None) -> str:
        with contextlib.suppress(OSError, ValueError):
            return "" if file is None else file.read_text(encoding="utf-8")
        return ""

    def index(self, *, only_ready: bool = False, shares: bool = True) -> list[dict[str, Any]]:
        """The versions of all models, as Triton's repository extension describes them, and the shares of those side by side."""
        return [
            {**each, "share": group.share} if shares and group.number is not None else each
            for group in self
            for each in repository_index(group.pool.snapshot(), only_ready=only_ready)
        ]

    @property
    def not_ready(self) -> ModelGroup | None:
        """The first model of which no version is ready, and one is not unloaded; the first one if all are. None if the service is ready."""
        ready = {group.model for group in self if group.pool.ready and group.share != "shadow"}
        expected = [group for group in self if group.pool.snapshot().state != "unloaded"] or list(self)
        return next((group for group in expected if group.model not in ready), None)

    async def predict(self, request: Request) -> Response:
        """POST /predict and /predict/NAME."""
        first = self.of_predict
        name = request.path_params.get("model", first and first.model)
        if name is None:
            raise NoModelNamedError(
                f"the models here are {_listed(self.names)}; send the request to /v2/models/NAME/infer"
            )
        return await self.choose(RequestRecord.of(request.scope), request.scope, name).predict(request)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
