"""Pictures of the status page around a `kill -9`: docs/img/kill-worker.gif and docs/img/status-page.png.

    .venv/bin/python docs/pictures.py docs/img

Starts a service with two stages of two replicas, sends requests, kills the worker of s0.r0, and takes screenshots until it is replaced.
Needs playwright and Debian's Chromium. The caption of the animation counts the requests of this run.
"""

import argparse
import io
import os
import shutil
import signal
import time
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from playwright import sync_api as playwright

from multiworld_serving.testing.load.clients import Load, run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import LocalService

_WIDTH, _HEIGHT, _CAPTION = 1000, 420, 29
_EVERY_S = 0.4
_BEFORE_S, _AFTER_S = 2.0, 3.0
_LAST_FRAME_MS = 3000
_LIMIT_S = 60.0


def frame(page: playwright.Page, load: Load, what: str) -> Image.Image:
    """A screenshot with a line that says what has happened and how many requests were answered and failed."""
    shot = Image.open(io.BytesIO(page.screenshot(clip={"x": 0, "y": 0, "width": _WIDTH, "height": _HEIGHT})))
    made = Image.new("RGB", (_WIDTH, _HEIGHT + _CAPTION), "#10161f")
    made.paste(shot, (0, _CAPTION))
    text = f"{what}   ·   {len(load.samples)} requests, {len(load.failed)} failed"
    ImageDraw.Draw(made).text((12, 6), text, fill="#ffffff", font=ImageFont.load_default(15))
    return made


def record(page: playwright.Page, service: LocalService, load: Load) -> list[Image.Image]:
    """Frames from before the kill until the new worker has served for a few seconds."""
    frames: list[Image.Image] = []

    def film(seconds: float, what: str) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            frames.append(frame(page, load, what))
            page.wait_for_timeout(_EVERY_S * 1e3)

    film(_BEFORE_S, "4 clients send requests")
    worker = service.worker_at(0, 0)
    assert worker is not None
    pid = service.worker_pids()[worker]
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    page.wait_for_selector('[data-world="s0.r0"]:not([data-state=ready])')
    while page.locator('[data-world="s0.r0"]').get_attribute("data-state") != "ready":
        assert time.monotonic() < killed_s + _LIMIT_S, "the worker is not replaced"
        film(_EVERY_S, f"kill -9 {pid}, {time.monotonic() - killed_s:.1f} s ago")
    film(_AFTER_S, f"a new worker serves, {time.monotonic() - killed_s:.1f} s after the kill")
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    with (
        LocalService(model="resnet18", weights="random:0", stages=2, replicas=2, image_size=32) as service,
        playwright.sync_playwright() as started,
        run_load(service.url, [ReferenceRequest(photo())], clients=4) as load,
    ):
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        page.goto(service.url)
        page.wait_for_selector(".replica[data-state=ready]")
        page.wait_for_timeout(_BEFORE_S * 1e3)
        first, *more = record(page, service, load)
        page.screenshot(path=folder / "status-page.png", full_page=True)
        browser.close()
    times_ms = [round(_EVERY_S * 1e3)] * len(more) + [_LAST_FRAME_MS]
    first.save(folder / "kill-worker.gif", save_all=True, append_images=more, duration=times_ms, loop=0)
    print(f"{len(load.samples)} requests, {len(load.failed)} failed")


if __name__ == "__main__":
    main()
