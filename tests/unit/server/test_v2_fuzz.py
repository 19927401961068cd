"""Inference requests of arbitrary bytes give a request or a rejection, with bounded memory."""

import json
import struct
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from multiworld_serving.common.service.errors import InvalidRequestError
from multiworld_serving.server.frontend.api.inference import InferRequest
from multiworld_serving.server.frontend.api.oip.compression import pack, unpack
from multiworld_serving.server.frontend.api.oip.infer_request import parse_infer_request
from tests.unit.server.frontend_app import MODEL
from tests.unit.server.v2_requests import PACK, SIGNATURE

UNPACKED_BYTES = 10_000
fuzzing = settings(max_examples=300, suppress_health_check=list(HealthCheck))


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


@fuzzing
@given(body=st.binary(max_size=2_000), json_bytes=st.none() | st.integers(0, 2_100))
@example(body=bytes(SIGNATURE.model.input_rows.max_row_bytes), json_bytes=0)
def test_random_bytes_are_read_or_refused(body: bytes, json_bytes: int | None) -> None:
    read(body, json_bytes)


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
