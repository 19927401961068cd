"""INPUTS messages round trip, and nothing that is inconsistent is accepted."""

import json
import struct
from typing import Any

import pytest
import torch

from multiworld_serving.common.wire.inputs import (
    ALL_ROWS,
    BatchInputs,
    LostInput,
    RowRef,
    Source,
    row_refs,
    row_refs_tensor,
)
from multiworld_serving.common.wire.message import MessageKind, WireError

FORM = (torch.uint8, (3, 2, 2), 8)
HOLDER = "10.0.0.1:4000/abc"


def parsed(inputs: BatchInputs, form: Any = FORM) -> BatchInputs:
    message = inputs.message(7, 1, 2)
    assert (message.kind, message.batch, message.stage, message.version) == (MessageKind.INPUTS, 7, 1, 2)
    assert message.payload is not None
    return BatchInputs.parse(message.payload, *form)


def test_inputs_round_trip() -> None:
    whole = BatchInputs(3, (Source(HOLDER, (RowRef(5, ALL_ROWS),), (0, 1, 2)),), keep=False, release=(4, 5))
    assert parsed(whole) == whole
    rows = torch.randint(0, 256, (2, 3, 2, 2), dtype=torch.uint8)
    mixed = BatchInputs(
        4, (Source(HOLDER, (RowRef(5, ALL_ROWS),), (2,)),), rows, (0, 3), keep=True, expires_s=1.5, release=()
    )
    found = parsed(mixed)
    assert found.relayed is not None
    assert torch.equal(found.relayed, rows)
    assert (found.rows, found.sources, found.relayed_at, found.expires_s) == (4, mixed.sources, (0, 3), 1.5)


def payload(fields: Any, body: bytes = b"") -> torch.Tensor:
    text = json.dumps(fields).encode()
    head = struct.pack("!I", len(text)) + text
    head += b" " * (-len(head) % 64)
    return torch.frombuffer(bytearray(head + body), dtype=torch.uint8)


SOURCE = [HOLDER, [[5, 0]], [0]]


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        [1],
        [0, []],
        [9, []],
        [1.5, [SOURCE]],
        [1, [SOURCE, SOURCE]],
        [1, [[HOLDER, [[5, 0]], [1]]]],
        [1, [[HOLDER, [[5, 0]], [-1]]]],
        [2, [[HOLDER, [[5, 0]], [0, 1]]]],
        [1, [[HOLDER, [], []]]],
        [1, [["", [[5, 0]], [0]]]],
        [1, [[HOLDER, [["5", 0]], [0]]]],
        [1, [SOURCE], None, [], True, -1],
        [1, [SOURCE], None, [], True, 1e9],
        [1, [SOURCE], None, [], True, 0, list(range(2000))],
        [1, [], None, [0]],
        [2, [SOURCE], None, [1]],
        [1, [SOURCE], None, [], True, 0, [], 7],
    ],
)
def test_inconsistent_inputs_are_rejected(fields: Any) -> None:
    assert BatchInputs.parse(payload([1, [SOURCE]]), *FORM).rows == 1
    with pytest.raises(WireError):
        BatchInputs.parse(payload(fields), *FORM)


def test_references_and_lost_inputs_round_trip() -> None:
    refs = [RowRef(1, ALL_ROWS), RowRef(2**40, 7)]
    assert row_refs(row_refs_tensor(refs)) == refs
    lost = LostInput((HOLDER, "b"), (HOLDER,), "why")
    assert LostInput.from_json(lost.to_json()) == lost
    with pytest.raises(WireError):
        LostInput.from_json("[1, 2]")
