"""A stage whose rows are objects: its description, and how a worker computes it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.bundle.stage import BundleStageSpec, PlacedSpec
from multiworld_serving.models.errors import BundleError, StageSpecError
from multiworld_serving.models.generate.decoder import decoder_part
from multiworld_serving.models.stages.api import InvalidInput, Request, Stage
from multiworld_serving.models.stages.objects import OBJECT_ROWS, EncodedObject, StreamStep, encode, rows_of
from multiworld_serving.models.stages.pipeline import PipelineSource, is_streaming
from multiworld_serving.models.stages.streams import Streams

MAX_ROWS = 1024
Allocate = Callable[..., Tensor]


class ObjectStageSpec(PlacedSpec, frozen=True, forbid_unknown_fields=True, tag="objects"):
    """A stage of a pipeline in Python: a class, or a part of a bundle.

    Attributes:
        model, version, index, num_stages: see `BundleStageSpec`.
        name: of the class or the bundle, for people.
        source: name of the pipeline; see `PipelineSource.name`.
        digest: of the pipeline.
        position: in the list of the pipeline.
        device, max_batch_size: see `Stage`.
        bundle: the part of a bundle; None: the stage is a class.
        pad: see `Bundle`.
        session_tokens: of a decoder; see `Sessions`.
    """

    model: str
    version: str
    name: str
    source: str
    digest: str
    position: int
    device: str | None = None
    max_batch_size: int | None = None
    bundle: BundleStageSpec | None = None
    pad: dict[str, float] = msgspec.field(default_factory=dict)
    session_tokens: int = 0

    @property
    def input_rows(self) -> RowFormat:
        """How the input travels."""
        return OBJECT_ROWS

    @property
    def output_rows(self) -> RowFormat:
        """How the output travels."""
        return OBJECT_ROWS

    @property
    def blocks(self) -> tuple[str, ...]:
        """Its name, for people."""
        part = self.bundle
        return (self.name if part is None or part.num_stages == 1 else f"{self.name}.{part.index}",)

    @property
    def dimensions(self) -> dict[str, tuple[int, int]]:
        """The number of rows of a batch."""
        return {BATCH: (1, MAX_ROWS)}


StageSpec = BundleStageSpec | ObjectStageSpec


def stage_spec(text: str) -> StageSpec:
    """The description of a stage from JSON. Raises StageSpecError."""
    try:
        return msgspec.json.decode(text, type=StageSpec)
    except (msgspec.MsgspecError, BundleError, UnicodeError, RecursionError) as error:
        raise StageSpecError(
            f"stage description is invalid: {str(error)[:200]} (do leader and worker run the same release?)"
        ) from error


class ObjectStage:
    """Computes a stage whose rows are objects. Rows that an earlier stage has refused pass it unchanged.

    Attributes:
        concurrency: number of batches at the same time; above 1 they are not computed on the thread of the engine.
        takes_steps: whether it computes the steps of streams. Other stages compute the row that the first step has.
    """

    concurrency = 1
    takes_steps = False

    def compute(self, rows: Tensor, allocate: Allocate | None = None) -> Tensor:
        """Rows in, rows out. Raises what the stage raises."""
        objects = OBJECT_ROWS.decoded(rows)
        live = [index for index, each in enumerate(objects) if not isinstance(each, InvalidInput)]
        results: list[Any] = list(objects)
        passing = {
            each: objects[each] for each in live if isinstance(objects[each], StreamStep) and not self.takes_steps
        }
        if live:
            given = [passing[index].row if index in passing else objects[index] for index in live]
            for index, result in zip(live, self.results(given), strict=True):
                is_step = index in passing and not isinstance(result, InvalidInput)
                results[index] = replace(passing[index], row=result) if is_step else result
        return rows_of([each if isinstance(each, EncodedObject) else encode(each) for each in results], allocate)

    def results(self, objects: list[Any]) -> Sequence[Any]:
        """One result for each object. Raises anything."""
        raise NotImplementedError


class StageFailedError(Exception):
    """A stage raised an exception, or returned something else than one result for each row. The cause has the traceback."""


class PythonStage(ObjectStage):
    """Runs a class of a user.

    Args:
        kind: the class.
        is_first: whether its rows are requests.
        max_batch_size: rows of one call.
        device: what `setup` gets.
    Raises:
        StageFailedError: `setup` or the self-test failed.
    """

    def __init__(self, kind: type[Stage], device: str, max_batch_size: int, *, is_first: bool) -> None:
        self.name = kind.__name__
        self._max_batch_size = max_batch_size
        self._request = kind.request if is_first else None
        self._loop: asyncio.AbstractEventLoop | None = None
        if inspect.iscoroutinefunction(kind.__call__):
            self.concurrency = max(1, kind.max_concurrency)
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name=f"stage-{self.name}", daemon=True).start()
            self._finalizer = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        try:
            self.takes_steps = is_streaming(kind)
            self._stage: Any = Streams(kind()) if self.takes_steps else kind()
            self._stage.setup(device)
            example = list(self._stage.example())
        except Exception as error:
            raise StageFailedError(
                f"the stage {self.name} cannot be set up: {type(error).__name__}: {error}"
            ) from error
        if example:
            self.compute(rows_of([encode(each) for each in example]))

    def close(self) -> None:
        """End the thread of an asynchronous stage. It also ends with this object."""
        if self._loop is not None:
            self._finalizer()

    def results(self, objects: list[Any]) -> Sequence[Any]:
        """Call the stage with as many rows as it takes."""
        found: list[Any] = [self._checked(each) for each in objects]
        live = [index for index, each in enumerate(found) if not isinstance(each, InvalidInput)]
        for at in range(0, len(live), self._max_batch_size):
            part = live[at : at + self._max_batch_size]
            for index, result in zip(part, self._call([found[index] for index in part]), strict=True):
                found[index] = result
        return found

    def _checked(self, row: Any) -> Any:
        """The row; InvalidInput if it is a request with a body of another type than the stage names."""
        request = row.row if isinstance(row, StreamStep) else row
        if self._request is not None and isinstance(request, Request):
            request.type = self._request
            if not request.inputs:
                try:
                    request.json()
                except InvalidInput as error:
                    return error
        return row

    def _call(self, rows: list[Any]) -> Any:
        """One result for each row. If InvalidInput is raised for several rows, each is computed alone. Raises StageFailedError."""
        try:
            found = self._stage(rows)
            if inspect.isawaitable(found):
                assert self._loop is not None, "its `__call__` is a coroutine function"
                found = asyncio.run_coroutine_threadsafe(_awaited(found), self._loop).result()
        except InvalidInput as error:
            return [error] if len(rows) == 1 else [self._call([row])[0] for row in rows]
        except Exception as error:
            raise StageFailedError(f"the stage {self.name} raised {type(error).__name__}") from error
        is_list = isinstance(found, Sequence | Tensor) and not isinstance(found, str | bytes)
        if not is_list or len(found) != len(rows):
            count = f"{len(found)} results" if is_list else type(found).__name__
            raise StageFailedError(
                f"the stage {self.name} returned {count} for {len(rows)} rows; expected one for each"
            )
        return found


def _run(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.closing(loop):
        loop.run_forever()


async def _awaited(found: Any) -> Any:
    return await found


def load_python_stage(spec: ObjectStageSpec, source: PipelineSource, device: torch.device, rows: int) -> PythonStage:
    """Import the pipeline and set up a stage of it.

    Args:
        source: what the operator of this process has allowed.
        device: of this process.
        rows: most rows of a batch.
    Raises:
        StageSpecError, StageFailedError: it cannot be imported or set up, or needs another device.
    """
    if source.is_decoder:
        kind: Any = decoder_part(Path(source.attribute), spec.index, spec.num_stages, spec.session_tokens)
    else:
        kind = source.load().elements[spec.position]
    assert isinstance(kind, type), "the digest is the same, so the list is"
    wanted = torch.device(spec.device or device)
    if wanted.type not in ("cpu", device.type):
        raise StageSpecError(
            f"the stage {spec.name} needs {wanted}; this worker computes on {device}: start it with --device {wanted}"
        )
    chosen = device if wanted.index is None and wanted.type == device.type else wanted
    return PythonStage(kind, str(chosen), spec.max_batch_size or rows, is_first=spec.is_first)
