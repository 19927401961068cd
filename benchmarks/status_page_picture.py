"""Write the pictures of the status page in docs/img, and the animation of a killed worker.

    python -m benchmarks.status_page_picture

A real service under load loses a worker and later a leader. The picture of 64 workers is the real page with a generated feed. Needs
Chromium and the `dev` extra. Prints how many requests were sent and how many failed.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import signal
import time
from pathlib import Path

from PIL import Image
from playwright import sync_api as playwright

from benchmarks.status_page_feed import fed_page
from multiworld_serving.testing.load.clients import ReferenceRequest, run_load
from multiworld_serving.testing.load.images import image_file
from multiworld_serving.testing.local_service import LocalService

ROOT = Path(__file__).parents[1]
IMAGE = ROOT / "examples" / "images" / "clock.jpg"
FOLDER = ROOT / "docs" / "img"
WAIT_MS = 90_000
SETTLE_S = 20.0
"""Seconds of load that the charts show before the kill and after the recovery."""
WIDE = {"width": 1000, "height": 1000}
PHONE = {"width": 390, "height": 844}
VICTIM = ".replica[data-world='s0.r0']"
COLORS = 200
FRAME_MS = 100
MARGIN = 8
"""Pixels below the graph, above the line of text that follows."""
LAST_FRAME_MS = 3000


class Recording:
    """Frames of the top of the page, from the header to the graph."""

    def __init__(self, page: playwright.Page) -> None:
        self._page = page
        self._frames: list[Image.Image] = []
        self._times_ms: list[float] = []
        self._bottom = 0
        """Pixels: the lowest end of the graph in any frame, because the lines above it change."""

    def run(self, until: str, *, at_least_s: float = 0.0) -> None:
        """Take frames until the page has an element `until`, and for `at_least_s`."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < at_least_s or not self._page.locator(until).count():
            if time.monotonic() - began_s > WAIT_MS / 1000:
                raise TimeoutError(f"the page has no element {until} after {WAIT_MS / 1000:g} s")
            self.take()
            self._page.wait_for_timeout(FRAME_MS)

    def take(self) -> Image.Image:
        """Take one frame."""
        self._times_ms.append(1000 * time.monotonic())
        shown = _screenshot(self._page)
        box = self._page.locator("#graph").bounding_box()
        assert box is not None, "the graph is visible"
        self._bottom = max(self._bottom, math.ceil(box["y"] + box["height"]))
        self._frames.append(shown)
        return shown

    def save(self, path: Path, colorful: Image.Image) -> None:
        """Write the frames as a GIF that is played at the speed of recording: the top of the page, with the colors of one of them."""
        top = (0, 0, WIDE["width"], self._bottom + MARGIN)
        palette = _with_few_colors(colorful)
        frames = [frame.crop(top).quantize(palette=palette, dither=Image.Dither.NONE) for frame in self._frames]
        pauses = [round(later - at) for at, later in zip(self._times_ms, self._times_ms[1:], strict=False)]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=[*pauses, LAST_FRAME_MS], loop=0)
        _report(path)


def shoot(page: playwright.Page, name: str, *, full: bool = True) -> None:
    """Write a picture of the page."""
    _write(_screenshot(page, full=full), name)


def _screenshot(page: playwright.Page, *, full: bool = False) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot(full_page=full))).convert("RGB")


def _with_few_colors(picture: Image.Image) -> Image.Image:
    """So that the file is small. The median cut would drop the rare colors of failures."""
    return picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


def _write(picture: Image.Image, name: str) -> None:
    path = FOLDER / f"{name}.png"
    _with_few_colors(picture).save(path, optimize=True)
    _report(path)


def _report(path: Path) -> None:
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")


def kill_worker(service: LocalService, page: playwright.Page) -> None:
    """Kill the worker of stage 0, replica 0, and record until its replacement serves."""
    worker = service.worker_at(0, 0)
    assert worker is not None, "the service is ready, so each slot has a worker"
    recording = Recording(page)
    recording.run(VICTIM, at_least_s=3.0)
    os.kill(service.worker_pids()[worker], signal.SIGKILL)
    page.wait_for_selector(f"{VICTIM}:not([data-state=ready])", timeout=WAIT_MS)
    broken = recording.take()
    recording.run("#hero[data-state=survived]")
    recording.run(f"{VICTIM}[data-state=ready]", at_least_s=4.0)
    _write(broken, "status-page-worker-killed")
    recording.save(FOLDER / "kill-worker.gif", broken)


def kill_leader(service: LocalService, page: playwright.Page) -> None:
    """Kill the first leader, and write a picture while it is away."""
    page.evaluate("scrollTo(0, 0)")
    os.kill(service.child_pids("leader")[0], signal.SIGKILL)
    page.wait_for_selector("#graph [data-node^=leader]:not([data-state=ready])", timeout=WAIT_MS)
    shoot(page, "status-page-leader-killed", full=False)
    page.wait_for_selector("#state[data-state=ready]", timeout=WAIT_MS)


def picture_service(browser: playwright.Browser, service: LocalService) -> None:
    """The pictures of a service under load."""
    page = browser.new_page(viewport=WIDE)  # type: ignore[arg-type]
    page.goto(service.url)
    page.wait_for_selector("#state[data-state=ready]", timeout=WAIT_MS)
    page.wait_for_timeout(1000 * SETTLE_S)
    kill_worker(service, page)
    page.click("#sample")
    page.wait_for_selector("#preview[src]")
    page.click("#try-image .main")
    page.wait_for_selector("#answer li", timeout=WAIT_MS)
    page.wait_for_timeout(1000 * SETTLE_S)
    shoot(page, "status-page")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(1000)
    shoot(page, "status-page-dark")
    kill_leader(service, page)
    page.close()
    phone = browser.new_page(viewport=PHONE, color_scheme="dark", is_mobile=True)  # type: ignore[arg-type]
    phone.goto(service.url)
    phone.wait_for_timeout(1000 * SETTLE_S)
    shoot(phone, "status-page-phone")
    phone.close()


def main() -> None:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        with fed_page(browser, viewport=WIDE) as page:
            shoot(page, "status-page-64-workers")
        with (
            LocalService(
                model="resnet18", weights="random:0", stages=2, replicas=2, leaders=2, image_size=32
            ) as service,
            run_load(service.url, [ReferenceRequest(image_file(IMAGE)[0])], clients=4) as load,
        ):
            picture_service(browser, service)
        browser.close()
    print(f"{len(load.samples)} requests, {len(load.failed)} failed")


if __name__ == "__main__":
    main()
