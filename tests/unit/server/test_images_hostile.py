"""Damaged and malicious files raise ImageError and nothing else."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld_serving.common.service.errors import ImageError, InvalidBodyError
from multiworld_serving.common.service.predictor import ImageSizes
from multiworld_serving.server.frontend.api.images import image_tensor, quick_jpeg
from multiworld_serving.server.frontend.api.predict_route import extract_image
from tests.unit.server.frontend_app import image_bytes

MEBIBYTE = 2**20
FILES = [
    image_bytes(size=(24, 20)),
    image_bytes(size=(24, 20), mode="P", colour=3),
    image_bytes(size=(24, 20), mode="I;16", colour=30_000),
    image_bytes(size=(24, 20), file_format="JPEG"),
    image_bytes(size=(24, 20), file_format="JPEG", progressive=True, exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00"),
    image_bytes(size=(24, 20), file_format="WEBP"),
    image_bytes(size=(24, 20), file_format="WEBP", lossless=True, mode="RGBA", colour=(1, 2, 3, 4)),
]


def test_only_small_baseline_jpegs_are_decoded_on_the_event_loop() -> None:
    assert [quick_jpeg(file) is not None for file in FILES] == [False] * 3 + [True] + [False] * 3
    small = image_bytes(size=(24, 20), file_format="JPEG")
    frame = small.index(b"\xff\xc0")
    assert not quick_jpeg(small[: frame + 5] + struct.pack(">HH", 5000, 5000) + small[frame + 9 :]), "many pixels"
    hidden = b"\xff\xe1" + struct.pack(">H", len(small) - frame + 2) + small[frame:]
    large = image_bytes(size=(600, 600), file_format="JPEG")
    assert not quick_jpeg(large[:2] + hidden + large[2:]), "the header of a thumbnail does not count"
    assert not quick_jpeg(small + bytes(10_000))


def decode_or_refuse(data: bytes) -> None:
    with suppress(ImageError):
        quick_jpeg(data)
        assert image_tensor(data, ImageSizes(16, 16), 10_000).shape == (3, 16, 16)


@settings(max_examples=200)
@given(
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x00\x01\x00\x00WEBPVP8 "]),
    st.binary(max_size=300),
)
def test_random_bytes_raise_only_image_errors(magic: bytes, rest: bytes) -> None:
    decode_or_refuse(magic + rest)


@settings(max_examples=400)
@given(
    st.sampled_from(FILES),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=8),
    st.floats(0, 1),
)
def test_damaged_files_raise_only_image_errors(data: bytes, flips: list[tuple[int, int]], keep: float) -> None:
    damaged = bytearray(data)
    for position, bits in flips:
        damaged[position % len(damaged)] ^= bits
    decode_or_refuse(bytes(damaged[: int(len(damaged) * keep)]))
    decode_or_refuse(bytes(damaged))


@settings(max_examples=200)
@given(st.binary(max_size=200), st.binary(max_size=30))
def test_random_forms_raise_only_refusals(body: bytes, header: bytes) -> None:
    head = b'--B\r\nContent-Disposition: form-data; name="image"\r\n' + header + b"\r\n\r\n"
    for form in (body, head + body + b"\r\n--B--\r\n"):
        with suppress(ImageError, InvalidBodyError):
            assert extract_image(form, "multipart/form-data; boundary=B")


def _jpeg_of_scans(count: int) -> bytes:
    plain = image_bytes(size=(24, 20), file_format="JPEG")
    return plain[:-2] + b"\xff\xda\x00\x08" * count + plain[-2:]


BUSYWORK = {
    "PNG of chunks": (b"\x89PNG\r\n\x1a\n" + bytes(12) * 100_000, "more than 20000 chunks"),
    "JPEG of scans": (_jpeg_of_scans(10_000), "more than 200 scans"),
    "JPEG of junk": (b"\xff\xd8\xff\xe0\x00\x02" + b"A" * MEBIBYTE, "no image data"),
    "JPEG of fill bytes": (b"\xff\xd8" + b"\xff" * MEBIBYTE, "no image data"),
    "JPEG of segments": (b"\xff\xd8" + b"\xff\xe5\x00\x02" * (MEBIBYTE // 4), "no image data"),
    "JPEG of restarts": (b"\xff\xd8\xff\xd0" * (MEBIBYTE // 4), "no image data"),
    "JPEG that ends in a marker": (b"\xff\xd8\xff", "no image data"),
}


@pytest.mark.parametrize("name", BUSYWORK)
def test_file_is_rejected_when_its_structure_would_block_the_decoder(name: str) -> None:
    data, says = BUSYWORK[name]
    with pytest.raises(ImageError, match=says):
        image_tensor(data, ImageSizes(16, 16), 10_000)


@pytest.mark.parametrize("size", [(24, 20), (400, 300)])
def test_jpeg_without_its_last_two_bytes_is_damaged_whether_small_or_large(size: tuple[int, int]) -> None:
    data = image_bytes(size=size, file_format="JPEG")
    assert image_tensor(data, ImageSizes(16, 16), 10**6).shape[0] == 3
    with pytest.raises(ImageError, match="the JPEG image is damaged"):
        image_tensor(data[:-2], ImageSizes(16, 16), 10**6)
