"""Decides which messages a worker may send now, before memory is allocated for their payload."""

from typing import NamedTuple

import torch

from multiworld_serving.common.wire.message import Header, Message, MessageKind, RowShape, WireError
from multiworld_serving.server.versions.stage_plan import StagePlan


class _Output(NamedTuple):
    """Dtype and row shape of a stage's output."""

    dtype: torch.dtype
    row_shape: RowShape


class _Sent(NamedTuple):
    """A batch in flight.

    Attributes:
        output: None: the worker has not loaded that stage and cannot return an output.
        fetched: whether the worker fetches the input.
        keeps: whether the worker may keep the output.
    """

    rows: int
    output: _Output | None
    fetched: bool
    keeps: bool


class ReplyValidator:
    """Knows the batches in flight on one link, and the outputs of the stages that its worker has loaded."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, int], _Output] = {}
        """By version and stage."""
        self._in_flight: dict[int, _Sent] = {}
        """By batch."""

    def stage_loaded(self, plan: StagePlan) -> None:
        """The worker has loaded this stage."""
        self._outputs[plan.number, plan.spec.index] = _Output(plan.output_dtype, plan.output_shape)

    def kept(self, message: Message) -> tuple[int, RowShape]:
        """The id of a kept output, and the shape of one of its rows. Raises WireError if it cannot have this shape."""
        assert message.payload is not None, "`check` requires a payload"
        number, *dims = message.payload.tolist()
        expected = self._outputs.get((message.version, message.stage))
        if expected is None or not expected.row_shape.accepts(tuple(dims)):
            raise WireError(f"KEPT with rows of {tuple(dims)}; expected {expected and expected.row_shape}")
        return number, RowShape(tuple(dims), expected.row_shape.varies)

    def version_unloaded(self, version: int) -> None:
        """The worker is told to free this version."""
        self._outputs = {key: output for key, output in self._outputs.items() if key[0] != version}

    def batch_sent(
        self, batch: int, rows: int, version: int, stage: int, *, fetched: bool = False, keeps: bool = False
    ) -> None:
        """A batch is sent to the worker, which fetches the input if `fetched`, and may keep the output if `keeps`."""
        self._in_flight[batch] = _Sent(rows, self._outputs.get((version, stage)), fetched, keeps)

    def received(self, message: Message) -> None:
        """A message that has passed `check` was received."""
        if message.kind in (MessageKind.RESULT, MessageKind.KEPT, MessageKind.FAILED, MessageKind.INPUT_LOST):
            self._in_flight.pop(message.batch, None)

    def check(self, header: Header) -> None:
        """Validate a header; see `Channel`. Raises WireError for anything unexpected."""
        match header.kind:
            case MessageKind.RESULT:
                sent = self._in_flight.get(header.batch)
                if sent is None or sent.output is None:
                    raise WireError(f"RESULT of batch {header.batch}, which is not in flight here")
                header.require_batch(*sent.output, sent.rows, sent.rows)
            case MessageKind.KEPT:
                sent = self._in_flight.get(header.batch)
                if sent is None or sent.output is None or not sent.keeps:
                    raise WireError(f"KEPT of batch {header.batch}, whose output is not to be kept here")
                count = 1 + len(sent.output.row_shape.dims)
                header.require_batch(torch.int64, (), count, count)
            case MessageKind.INPUT_LOST:
                sent = self._in_flight.get(header.batch)
                if sent is None or not sent.fetched:
                    raise WireError(f"INPUT_LOST of batch {header.batch}, whose input is not fetched here")
                header.require_text()
            case MessageKind.FAILED if header.batch and header.batch not in self._in_flight:
                raise WireError(f"FAILED of batch {header.batch}, which is not in flight here")
            case MessageKind.READY | MessageKind.FAILED | MessageKind.REFUSED | MessageKind.OBEYS:
                header.require_text()
            case MessageKind.FETCH_WEIGHTS | MessageKind.BUSY | MessageKind.LEAVING:
                header.require_no_payload()
            case _:
                raise WireError(f"unexpected {header.kind.name} from a worker: only a leader may send it")
