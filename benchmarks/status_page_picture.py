"""Write docs/img/status-page.png: a screenshot of the status page after a worker under load was killed and replaced.

    python -m benchmarks.status_page_picture

Needs Chromium and the `dev` extra. Prints how many requests were sent and how many failed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

from playwright import sync_api as playwright

from multiworld_serving.testing.load.clients import ReferenceRequest, run_load
from multiworld_serving.testing.load.images import image_file
from multiworld_serving.testing.local_service import LocalService

ROOT = Path(__file__).parents[1]
IMAGE = ROOT / "examples" / "images" / "clock.jpg"
PICTURE = ROOT / "docs" / "img" / "status-page.png"
WAIT_MS = 90_000
SETTLE_MS = 20_000
"""Milliseconds of load that the charts show before and after the kill."""


def take_picture(service: LocalService, page: playwright.Page) -> None:
    """Kill the worker of stage 0, replica 0, wait until its replacement serves, and write the screenshot."""
    worker = service.worker_at(0, 0)
    assert worker is not None, "the service is ready, so each slot has a worker"
    page.goto(service.url)
    page.wait_for_selector(".replica[data-state=ready]")
    page.wait_for_timeout(SETTLE_MS)
    os.kill(service.worker_pids()[worker], signal.SIGKILL)
    page.wait_for_selector("#feed li[data-what=rejoined]", timeout=WAIT_MS)
    page.wait_for_timeout(SETTLE_MS / 2)
    playwright.expect(page.locator('[data-world="s0.r0"]')).to_have_text(re.compile("[1-9]"), timeout=WAIT_MS)
    page.screenshot(path=PICTURE, full_page=True)


def main() -> None:
    with (
        LocalService(model="resnet18", weights="random:0", stages=2, replicas=2, image_size=64) as service,
        playwright.sync_playwright() as started,
    ):
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        with run_load(service.url, [ReferenceRequest(image_file(IMAGE)[0])], clients=4) as load:
            take_picture(service, page)
        browser.close()
    print(f"{len(load.samples)} requests, {len(load.failed)} failed; wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
