"""Messages between processes: rejection of inexact ones."""

import json

import msgspec
import pytest

from multiworld_serving.common.wire.join import JoinOffer
from multiworld_serving.common.wire.protocol import WireError
from multiworld_serving.common.wire.work import WORKER_PROTOCOL, StageAssignment


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"world": "a"}', '{"world": 1, "generation": 2}', '{"world": "a", "generation": true}']
)
def test_inexact_join_messages_are_refused(text: str) -> None:
    with pytest.raises(WireError):
        JoinOffer.from_json(text)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("weights_bytes", (-1, 1 << 50)),
        ("max_batch_size", (0, 10**30)),
        ("window", (0, 10**9)),
        ("version", (-1, 1 << 32)),
    ],
)
def test_assignment_is_refused_when_a_number_is_out_of_bounds(field: str, values: tuple[int, int]) -> None:
    good = msgspec.to_builtins(StageAssignment("{}", 10, "0" * 64, 8, 2, 1))
    for value in values:
        with pytest.raises(msgspec.MsgspecError, match=field):
            WORKER_PROTOCOL.bodies.decode(json.dumps({**good, field: value}))
