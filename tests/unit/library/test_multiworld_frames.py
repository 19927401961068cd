"""Frames are decoded from any segmentation of the stream; invalid frames are refused before they cost memory."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.control.frames import (
    Address,
    Challenge,
    Frame,
    FrameError,
    FrameReader,
    Heartbeat,
    MemberFailed,
    Refuse,
    SignedHello,
    Start,
    StoreSet,
)
from multiworld.errors import Cause

FRAMES = st.one_of(
    st.builds(Challenge, st.integers(0, 255), st.binary(max_size=64)),
    st.builds(SignedHello, st.binary(max_size=300), st.binary(), st.binary()),
    st.builds(Refuse, st.text(max_size=100), st.booleans()),
    st.builds(Heartbeat, st.none() | st.integers(0, 1 << 40)),
    st.builds(MemberFailed, st.integers(-1, 1000), st.sampled_from(Cause), st.text(max_size=100)),
    st.just(Start(1, "name", (Address("", 0, "/run/a"), Address("::1", 65535, "")))),
)


def framed(*fields: object) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return len(body).to_bytes(4, "big") + body


@given(st.lists(FRAMES, max_size=8), st.data())
def test_frames_are_decoded_when_the_stream_is_split_anywhere(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(frame.encode() for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = FrameReader()
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


@given(st.binary(max_size=2000), st.integers(1, 64))
def test_random_bytes_give_frames_or_an_error_with_bounded_memory(garbage: bytes, step: int) -> None:
    reader = FrameReader(limit_bytes=100)
    try:
        for at in range(0, len(garbage), step):
            for _ in reader.feed(garbage[at : at + step]):
                pass
            assert len(reader._buffer) <= 4 + 100 + step
    except FrameError:
        pass


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        ((101).to_bytes(4, "big"), "a frame of 101 bytes; at most 100 are allowed"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes"),
        (bytes(4), "not a frame"),
        (framed("Unknown", 1), "not a frame: Invalid value 'Unknown'"),
        (framed("MemberFailed", 1, "nonsense", ""), "not a frame: Invalid enum value 'nonsense'"),
        (framed("Start", 1, "f", [["host.example", 1, ""]]), "not a frame: 'host.example'"),
        (framed("Start", 1, "f", [["127.0.0.1", 65536, ""]]), "not a frame"),
        (b"\0\0\0\x0c\x93\xa8StoreSet\xa1\xff", "not a frame"),
    ],
)
def test_invalid_frame_is_refused(stream: bytes, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        list(FrameReader(limit_bytes=100).feed(stream))


def test_fields_of_a_later_release_are_ignored() -> None:
    assert list(FrameReader().feed(framed("Heartbeat", 7, "more"))) == [Heartbeat(7)]
    assert list(FrameReader().feed(StoreSet("k", b"v").encode())) == [StoreSet("k", b"v")]
