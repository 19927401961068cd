"""Objects that travel between stages: every value arrives as it was sent, and no bytes end a process."""

import ast
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

import multiworld_serving
from multiworld_serving.common.wire.inputs import joined_rows
from multiworld_serving.models.stages.api import InvalidInput, Request, Response
from multiworld_serving.models.stages.objects import (
    CANCELLED,
    MAX_ROW_BYTES,
    OBJECT_ROWS,
    ObjectError,
    decode,
    encode,
    rows_of,
)


def sent(value: object, beside: object = None) -> Any:
    """The value as the next stage gets it, from a batch with another row."""
    found, _ = OBJECT_ROWS.decoded(rows_of([encode(value), encode(beside)]))
    return found


@pytest.mark.parametrize(
    "value", [None, True, -(2**63), 2**64 - 1, 1.5, "ü", b"\x00", [1, [2, None]], {"a": {"b": [1]}, "c": b"x"}, [], {}]
)
def test_plain_objects_arrive_as_they_were_sent(value: object) -> None:
    assert sent(value) == value
    assert sent(value, beside=b"x" * 1000) == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).t(),
        torch.ones(2, 0, 3),
        torch.tensor(5, dtype=torch.int8),
        torch.randn(3, 4, dtype=torch.bfloat16)[:, ::2],
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.zeros(1, 3).expand(4, 3),
        torch.tensor([True, False]),
    ],
)
def test_tensors_of_all_layouts_arrive_and_can_be_written(tensor: Tensor) -> None:
    found = sent({"x": [tensor]}, beside="longer" * 100)["x"][0]
    assert torch.equal(found, tensor)
    assert found.dtype == tensor.dtype
    found.zero_()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10)[::-3],
        np.array([1.5], np.float16),
        np.zeros((0, 3)),
        np.frombuffer(b"abcd", dtype=np.uint8),
        np.arange(4).reshape(2, 2).T,
    ],
)
def test_arrays_of_all_layouts_arrive_as_arrays(array: Any) -> None:
    found = sent([array])[0]
    assert isinstance(found, np.ndarray)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_requests_responses_and_refusals_keep_their_parts() -> None:
    request = sent(Request(b"body", "text/plain", {"q": "1"}, {"x-a": "b"}, {"t": np.array([1], np.float32)}))
    assert (request.body, request.content_type, request.query, request.headers) == (
        *(b"body", "text/plain"),
        *({"q": "1"}, {"x-a": "b"}),
    )
    assert request.inputs["t"].tolist() == [1.0]
    response = sent(Response("text", "text/html", 201, {"x": "y"}))
    assert (response.body, response.content_type, response.status, response.headers) == (
        *(b"text", "text/html"),
        *(201, {"x": "y"}),
    )
    assert str(sent(InvalidInput("no ü"))) == "no ü"


@pytest.mark.parametrize(
    "value",
    [object(), {1: lambda: 0}, np.array(["text"]), np.array([object()]), torch.ones(2).to_sparse(), 2**70, "\ud800"],
)
def test_an_object_that_cannot_be_sent_is_named(value: object) -> None:
    with pytest.raises(ObjectError, match="cannot be sent"):
        encode(value)


def test_deep_and_long_objects_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(ObjectError):
        encode(deep)
    with pytest.raises(ObjectError, match=f"at most {MAX_ROW_BYTES}"):
        encode(np.zeros(MAX_ROW_BYTES, dtype=np.uint8))


def test_rows_of_several_lengths_are_joined_and_a_row_of_zeros_is_cancelled() -> None:
    parts = [rows_of([encode("a")]), rows_of([encode(["b" * 500]), encode(3)]), torch.zeros(1, 64, dtype=torch.uint8)]
    found = OBJECT_ROWS.decoded(joined_rows(parts))
    assert found[:3] == ["a", ["b" * 500], 3]
    assert found[3] is CANCELLED


def test_bytes_that_are_no_object_are_refused_and_end_nothing() -> None:
    """Lengths that lie, unknown types, wrong shapes, and random changes of valid rows."""
    choice = random.Random(7)
    values: list[object] = [{"x": np.arange(8.0), "y": [torch.ones(2, 2), "text"]}, Request(b"abc"), Response(b"x")]
    ext = msgspec.msgpack.Ext
    lies = [ext(1, msgspec.msgpack.encode(content)) for content in (("float32", (1 << 40,), 0), ("float32", (-1,), 0))]
    lies += [ext(1, msgspec.msgpack.encode(content)) for content in (("object", (1,), 0), ("uint8", (4,), 64), 5)]
    lies += [ext(99, b""), ext(3, b"\xff"), ext(4, b"\x01"), ext(4, msgspec.msgpack.encode([b"", 1, 2, 3, 4]))]
    lies += [ext(5, msgspec.msgpack.encode([b"", "text/html", "200", {}])), ext(5, b"\xc1")]
    rows = [bytearray(rows_of([encode(each)])[0].numpy().tobytes()) for each in (*values, *lies)]
    for row in rows[len(values) :]:
        with pytest.raises(ObjectError):
            decode(memoryview(row))
    nested = b"\x91" * 1000 + b"\xc0"
    rows.append(bytearray((16 + len(nested)).to_bytes(8, "little") + len(nested).to_bytes(8, "little") + nested))
    refused = 0
    for number in range(2000):
        row = bytearray(choice.choice(rows))
        for _ in range(choice.randint(1, 4)):
            row[choice.randrange(len(row))] = choice.randrange(256)
        if number % 3 == 0:
            row[choice.randrange(16) :] = b""
        try:
            decode(memoryview(row))
        except ObjectError:
            refused += 1
    assert refused > 500


def test_a_batch_announces_no_more_bytes_than_it_has() -> None:
    rows = rows_of([encode("text")])
    rows[0, 0] = 255
    with pytest.raises(ObjectError, match="announces"):
        OBJECT_ROWS.unpack(rows)


def test_rows_of_very_different_lengths_do_not_share_a_batch() -> None:
    small, large, huge = (torch.empty(1, size, dtype=torch.uint8) for size in (100, 1 << 20, 1 << 25))
    assert OBJECT_ROWS.key(small) == OBJECT_ROWS.key(large) != OBJECT_ROWS.key(huge)


def test_nothing_on_the_path_of_a_request_is_pickled() -> None:
    """The modules of workers, leaders and frontends import no pickle, and call no function that reads or writes one."""
    found = []
    root = Path(multiworld_serving.__file__).parent
    for package in ("workers", "common", "server", "models/stages", "models/bundle"):
        for file in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                attribute = node.attr if isinstance(node, ast.Attribute) else ""
                if any("pickle" in name or name in ("marshal", "shelve", "dill") for name in names):
                    found.append(f"{file}: {names}")
                if attribute in ("send_bytes", "recv_bytes", "allow_pickle"):
                    found.append(f"{file}: {attribute}")
    assert not found
