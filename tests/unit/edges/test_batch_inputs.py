"""References of the rows of a batch round trip, and nothing that is inconsistent is accepted."""

from typing import Any

import msgspec
import pytest

from multiworld_serving.common.wire.inputs import ALL_ROWS, BatchInputs, RowRef, Source

HOLDER = "10.0.0.1:4000/abc"


def parsed(fields: Any) -> BatchInputs:
    found = msgspec.json.decode(msgspec.json.encode(fields), type=BatchInputs)
    found.check(8)
    return found


def test_inputs_round_trip() -> None:
    whole = BatchInputs(3, (Source(HOLDER, (RowRef(5, ALL_ROWS),), (0, 1, 2)),), keep=False)
    assert parsed(whole) == whole
    mixed = BatchInputs(4, (Source(HOLDER, (RowRef(5, ALL_ROWS),), (2,)),), None, (0, 3))
    assert parsed(mixed) == mixed


SOURCE = [HOLDER, [[5, 0]], [0]]


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [0, []],
        [1.5, [SOURCE]],
        [1, [SOURCE, SOURCE]],
        [1, [[HOLDER, [[5, 0]], [1]]]],
        [1, [[HOLDER, [[5, 0]], [-1]]]],
        [2, [[HOLDER, [[5, 0]], [0, 1]]]],
        [1, [[HOLDER, [], []]]],
        [1, [["", [[5, 0]], [0]]]],
    ],
)
def test_inconsistent_inputs_are_rejected(fields: Any) -> None:
    assert parsed([1, [SOURCE]]).rows == 1
    with pytest.raises(ValueError, match=r"\w"):
        parsed(fields)
