"""Large images are decoded one at a time. Other requests do not wait for them, and their memory is given back."""

import asyncio
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from PIL import Image

from multiworld_serving.common.service.predictor import ImageSizes
from multiworld_serving.server.frontend.api import images
from multiworld_serving.server.frontend.api.images import LARGE_PIXELS, LargeImageError, image_tensor
from tests.unit.server.frontend_app import image_bytes, running_frontend
from tests.waiting import Gate

SIZE = (3000, 2000)
LARGE = image_bytes("blue", SIZE, compress_level=1)
BESIDE = 6
_rgb = images._rgb


class Decoding:
    """Counts the large images that are decoded at the same time. The first one waits until the gate is opened."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.most = self.now = self.total = 0
        self._lock = threading.Lock()

    def __call__(self, image: Image.Image) -> Image.Image:
        if image.width * image.height <= LARGE_PIXELS:
            return _rgb(image)
        with self._lock:
            self.now, self.total = self.now + 1, self.total + 1
            self.most = max(self.most, self.now)
        self.gate()
        try:
            return _rgb(image)
        finally:
            with self._lock:
                self.now -= 1


async def test_large_images_wait_for_each_other_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding()
    monkeypatch.setattr(images, "_rgb", decoding)
    async with running_frontend() as frontend:
        large = [asyncio.create_task(frontend.client.post("/predict", files={"image": LARGE})) for _ in range(BESIDE)]
        await decoding.gate.until_begun()
        late = await frontend.client.post("/predict", files={"image": LARGE}, headers={"X-Request-Timeout-S": "0.5"})
        assert (late.status_code, late.json()["reason"]) == (504, "deadline")
        await frontend.assert_serves()
        decoding.gate.open()
        answers = await asyncio.gather(*large)
        assert [answer.json()["predictions"][0]["label"] for answer in answers] == ["blue"] * BESIDE
        assert (decoding.most, decoding.total) == (1, BESIDE), "the late one is not decoded"


async def test_memory_of_a_large_image_is_given_back() -> None:
    image = image_bytes("blue", (7000, 7000), compress_level=1)
    async with running_frontend() as frontend:
        await frontend.assert_serves()
        before = _resident_bytes()
        assert (await frontend.client.post("/predict", files={"image": image})).status_code == 200
        assert _resident_bytes() - before < 7000 * 7000 * 2, "Pillow's copy alone has four bytes per pixel"


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_is_large_if_all_of_it_is_decoded(progressive: bool) -> None:
    sizes, file = ImageSizes(32, 32), image_bytes("blue", SIZE, "JPEG", progressive=progressive)
    assert torch.equal(image_tensor(file, sizes, 10**8)[2], torch.full((32, 32), 254, dtype=torch.uint8))
    with pytest.raises(LargeImageError) if progressive else nullcontext():
        image_tensor(file, sizes, 10**8, allow_large=False)


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024
