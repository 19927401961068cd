"""Inference requests of arbitrary bytes give a request or a rejection, with bounded memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from multiworld_serving.server.api.inference import InferRequest
from multiworld_serving.server.api.oip.compression import pack, unpack
from multiworld_serving.server.api.oip.infer_request import parse_infer_request
from multiworld_serving.server.errors import InvalidRequestError
from tests.unit.server.frontend_app import MODEL
from tests.unit.server.v2_requests import PACK, SIGNATURE

UNPACKED_BYTES = 10_000
fuzzing = settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))


def read(body: bytes, json_bytes: int | None) -> InferRequest | None:
    """The request; None if it is refused. Any other exception is a bug."""
    try:
        request = parse_infer_request(body, json_bytes, SIGNATURE)
    except InvalidRequestError as rejection:
        assert_clear(rejection)
        return None
    assert_sound(request, len(body))
    return request


def assert_clear(rejection: InvalidRequestError) -> None:
    """One sentence of bounded length that can be sent to the client."""
    assert 10 < len(rejection.detail.encode()) < 1000


def assert_sound(request: InferRequest, body_bytes: int) -> None:
    """The pipeline's input is valid and no larger than the body allows."""
    assert 1 <= len(request.rows) <= SIGNATURE.max_rows
    if isinstance(request.rows, Tensor):
        assert (request.rows.dtype, request.rows.shape[1:]) == (torch.uint8, MODEL.inputs[0].shape[1:])
        assert request.rows.is_contiguous()
    else:
        assert sum(map(len, request.rows)) <= body_bytes
    assert all(0 <= each.classes <= len(MODEL.labels) for each in request.outputs)
    assert request.timeout_s is None or request.timeout_s > 0


numbers = st.integers() | st.sampled_from([0, 1, 2, 3, 8, 9, 16, 768, 2**31, 2**63, 2**64, -1]) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3)
)
shapes = st.sampled_from([[1, 3, 16, 16], [2, 3, 16, 16], [8, 3, 16, 16], [1], [3], [2, 1]]) | st.lists(
    numbers, max_size=5
)
datas = st.sampled_from([[0] * 768, [0.5] * 1536, [[[[7] * 16] * 16] * 3], ["AAAA"], [["QUJD"], [""]]]) | anything
binary_sizes = st.fixed_dictionaries(
    {}, optional={"binary_data_size": numbers | anything, "shared_memory_region": anything}
)


def maybe(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly usual values, sometimes arbitrary ones."""
    return st.one_of(usual, usual, usual, anything)


tensors = st.fixed_dictionaries(
    {},
    optional={
        "name": maybe(st.just("input")),
        "datatype": maybe(st.sampled_from(["UINT8", "FP32", "BYTES", "INT64", "BOOL"])),
        "shape": maybe(shapes),
        "parameters": maybe(binary_sizes),
        "data": maybe(datas),
    },
)
outputs = st.fixed_dictionaries(
    {},
    optional={
        "name": maybe(st.just("probabilities")),
        "parameters": maybe(
            st.fixed_dictionaries({}, optional={"classification": maybe(numbers), "binary_data": maybe(st.booleans())})
        ),
    },
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "id": maybe(st.text()),
        "inputs": maybe(st.lists(maybe(tensors), max_size=2)),
        "outputs": maybe(st.lists(maybe(outputs), max_size=2)),
        "parameters": maybe(
            st.dictionaries(st.sampled_from(["timeout", "binary_data_output", "sequence_id"]), scalars)
        ),
    },
)


@fuzzing
@given(body=st.binary(max_size=2_000), json_bytes=st.none() | st.integers(0, 2_100))
@example(body=bytes(SIGNATURE.model.input_rows.max_row_bytes), json_bytes=0)
def test_random_bytes_are_read_or_refused(body: bytes, json_bytes: int | None) -> None:
    read(body, json_bytes)


@fuzzing
@given(request=requests, data=st.binary(max_size=3_100), with_length=st.booleans())
def test_random_json_is_read_or_refused(request: dict[str, Any], data: bytes, with_length: bool) -> None:
    text = json.dumps(request).encode()
    read(text + data if with_length else text, len(text) if with_length else None)


@fuzzing
@given(body=st.binary(max_size=300), encoding=st.sampled_from(["gzip", "deflate"]), cut=st.integers(0, 50))
@example(body=bytes(UNPACKED_BYTES), encoding="gzip", cut=0)
def test_random_compressed_body_is_unpacked_or_refused(body: bytes, encoding: str, cut: int) -> None:
    assert unpack(pack(body, encoding), encoding, UNPACKED_BYTES) == body
    for wrong in (body, pack(body, encoding)[:-cut]):
        try:
            assert len(unpack(wrong, encoding, UNPACKED_BYTES)) <= UNPACKED_BYTES
        except InvalidRequestError as rejection:
            assert_clear(rejection)


def claiming(shape: list[int], datatype: str = "UINT8", data: bytes = b"") -> tuple[bytes, int]:
    tensor = {"name": "input", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [tensor]}).encode()
    return text + data, len(text)


HOSTILE: dict[str, tuple[bytes, int | None]] = {
    "enormous shape": claiming([8, 3, 2**31, 2**31]),
    "enormous batch": claiming([2**40, 3, 16, 16]),
    "enormous element": claiming([1], "BYTES", struct.pack("<I", 2**32 - 1)),
    "enormous count": claiming([2**40], "BYTES", bytes(4)),
    "nested lists": (b"[" + b"[]," * 1_000_000 + b"[]]", None),
    "objects": (b"[" + b"{}," * 1_000_000 + b"{}]", None),
    "values": (b"[" + b"1.5," * 1_100_000 + b"0]", None),
    "fields": (b"{" + b",".join(b'"%d":1' % number for number in range(20_001)) + b"}", None),
    "deep": (b"[" * 3_000_000, None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_claimed_sizes_take_no_memory(name: str) -> None:
    body, json_bytes = HOSTILE[name]
    assert peak_bytes(lambda: read(body, json_bytes)) < 100_000


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compression_bomb_takes_no_more_than_the_limit(encoding: str) -> None:
    bomb = PACK[encoding](bytes(100_000_000))

    def refuse() -> None:
        with pytest.raises(InvalidRequestError, match="larger than the limit"):
            unpack(bomb, encoding, 1_000_000)

    assert peak_bytes(refuse) < 4_000_000


def peak_bytes(work: Any) -> int:
    """Peak memory of Python during this call."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
