"""Decides which messages a worker may send now, before memory is allocated for their payload."""

from typing import NamedTuple

import torch

from multiworld_serving.common.wire import Header, Message, MessageKind, WireError
from multiworld_serving.server.versions.stage_plan import StagePlan


class _Output(NamedTuple):
    """Dtype and row shape of a stage's output."""

    dtype: torch.dtype
    sample_shape: tuple[int, ...]


class ReplyValidator:
    """Knows the batches in flight on one link, and the outputs of the stages that its worker has loaded."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, int], _Output] = {}
        """By version and stage."""
        self._in_flight: dict[int, tuple[int, _Output | None]] = {}
        """Rows and output by batch. None: the worker has not loaded that stage and cannot return an output."""

    def stage_loaded(self, plan: StagePlan) -> None:
        """The worker has loaded this stage."""
        output = plan.self_test_output
        self._outputs[plan.number, plan.spec.index] = _Output(output.dtype, tuple(output.shape[1:]))

    def version_unloaded(self, version: int) -> None:
        """The worker is told to free this version."""
        self._outputs = {key: output for key, output in self._outputs.items() if key[0] != version}

    def batch_sent(self, batch: int, rows: int, version: int, stage: int) -> None:
        """A batch is sent to the worker."""
        self._in_flight[batch] = (rows, self._outputs.get((version, stage)))

    def received(self, message: Message) -> None:
        """A message that has passed `check` was received."""
        if message.kind in (MessageKind.RESULT, MessageKind.FAILED):
            self._in_flight.pop(message.batch, None)

    def check(self, header: Header) -> None:
        """Validate a header; see `Channel`. Raises WireError for anything unexpected."""
        match header.kind:
            case MessageKind.RESULT:
                rows, output = self._in_flight.get(header.batch, (0, None))
                if output is None:
                    raise WireError(f"RESULT of batch {header.batch}, which is not in flight here")
                header.require_batch(*output, rows, rows)
            case MessageKind.FAILED if header.batch and header.batch not in self._in_flight:
                raise WireError(f"FAILED of batch {header.batch}, which is not in flight here")
            case MessageKind.READY | MessageKind.FAILED:
                header.require_text()
            case MessageKind.FETCH | MessageKind.BUSY | MessageKind.LEAVING:
                header.require_no_payload()
            case _:
                raise WireError(f"unexpected {header.kind.name} from a worker: only a leader may send it")
