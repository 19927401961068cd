"""Streams: responses that the last stage yields in chunks.

A frontend opens a stream with a `StreamStep` that has the row of its request. It passes the stages as other rows do, so it is computed
elsewhere if a worker is lost before the first chunk has returned. Each further step asks the worker that keeps the generator for the chunk
at one position, so no chunk is lost or doubled when a step is computed twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multiworld_serving.models.generate.decoder import LOST
from multiworld_serving.models.stages.api import InvalidInput, Stage
from multiworld_serving.models.stages.objects import EncodedObject, ObjectError, StreamStep, encode

logger = logging.getLogger(__name__)

WAITING, END = "waiting", "end"
"""Results of a step beside `LOST`, a dict with `chunk`, and a dict with `error`. WAITING: repeat the step."""
MAX_CHUNK_BYTES = 1 << 20
"""Longest chunk. A batch of the most rows can be sent then: a batch that fails would lose all of its streams."""
_TURN_S = 0.1
"""Time after which the other steps of a batch get WAITING, so that slow streams do not look like a worker that hangs."""


@dataclass(eq=False)
class _Stream:
    """A generator of the stage.

    Attributes:
        position: number of chunks before the next one.
        expires_s: when it is dropped unless there is a step before.
        last: the result with its last chunk; None: the first one has not returned.
    """

    chunks: Iterator[Any]
    position: int
    expires_s: float = 0.0
    last: EncodedObject | None = None


class Streams:
    """Calls a stage that yields: for the next chunk of each stream, and for all chunks of other rows."""

    def __init__(self, stage: Stage) -> None:
        self._stage: Any = stage
        self._name = type(stage).__name__
        self.setup, self.example = stage.setup, stage.example
        self._open: dict[str, _Stream] = {}
        """By id. That which returned a chunk last is the last one."""

    def __call__(self, rows: Sequence[Any]) -> list[Any]:
        """The result of each row. Raises what a generator raises before its first chunk."""
        now_s = time.monotonic()
        for name in [name for name, stream in self._open.items() if stream.expires_s < now_s]:
            self._close(name)
        turns, found = {name: turn for turn, name in enumerate(self._open)}, [None] * len(rows)
        ordered = sorted(enumerate(rows), key=lambda each: turns.get(getattr(each[1], "stream", ""), -1))
        for index, row in ordered:
            is_late = row is not ordered[0][1] and time.monotonic() > now_s + _TURN_S
            found[index] = self._result(row, is_late=is_late) if isinstance(row, StreamStep) else self._whole(row)
        return found

    def _whole(self, row: Any) -> Any:
        """The response in one piece, for protocols without streams. Texts and bytes are joined; other chunks are a list."""
        chunks = list(self._stage.stream(row))
        return chunks[0][:0].join(chunks) if {*map(type, chunks)} in ({str}, {bytes}) else chunks

    def _result(self, step: StreamStep, *, is_late: bool) -> Any:
        if step.action != "next":
            self._close(step.stream)
        if step.action == "close":
            return END
        if step.action == "open":
            chunks = self._stage.resume(step.row, step.sent) if step.sent else self._stage.stream(step.row)
            self._open[step.stream] = _Stream(iter(chunks), step.position)
        stream = self._open.get(step.stream)
        if stream is None or step.position not in (stream.position, stream.position - 1):
            return LOST
        stream.expires_s = time.monotonic() + step.idle_s
        if step.position < stream.position:
            return stream.last
        return WAITING if is_late and step.action == "next" else self._following(step.stream, stream)

    def _following(self, name: str, stream: _Stream) -> Any:
        """The result with the next chunk."""
        del self._open[name]
        try:
            found = encode({"chunk": next(stream.chunks)})
            if found.size > MAX_CHUNK_BYTES:
                raise ObjectError(f"a chunk has {found.size} bytes; at most {MAX_CHUNK_BYTES} can be sent")
        except StopIteration:
            return END
        except InvalidInput as error:
            return error
        except Exception as error:
            if stream.last is None:
                raise
            logger.exception("stream=%s the stage %s raised", name, self._name)
            return {"error": f"the stage {self._name} raised {type(error).__name__}"}
        stream.position, stream.last = stream.position + 1, found
        self._open[name] = stream
        return found

    def _close(self, name: str) -> None:
        """Drop a stream, whose generator ends."""
        stream = self._open.pop(name, None)
        if stream is not None and isinstance(stream.chunks, Generator):
            try:
                stream.chunks.close()
            except Exception:
                logger.exception("stream=%s the stage %s raised when it was closed", name, self._name)
