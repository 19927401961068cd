"""Frames are decoded from any segmentation of the stream; invalid frames are refused before they cost memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.control.frames import Frame, FrameError, FrameReader, Kind

FRAMES = st.builds(Frame, st.sampled_from(Kind), st.lists(st.binary(max_size=300), max_size=5).map(tuple))


def length(number: int) -> bytes:
    return number.to_bytes(4, "big")


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
        (length(101), "a frame of 101 bytes; at most 100 are allowed"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes"),
        (length(0), "unknown frame kind"),
        (length(1) + b"\xff", "unknown frame kind"),
        (length(4) + bytes([Kind.STORE_SET]) + b"\0\0\0", "the length of a field is incomplete"),
        (length(6) + bytes([Kind.STORE_SET]) + length(2) + b"x", "a field is longer than its frame"),
    ],
    ids=["long", "http", "empty", "kind", "cut_off", "field"],
)
def test_invalid_frame_is_refused(stream: bytes, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        list(FrameReader(limit_bytes=100).feed(stream))
