"""The status page in Chromium, for a service that loses a worker."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from multiworld_serving.common.config.keys import hash_key
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests import services
from tests.chaos.clients import run_load

if TYPE_CHECKING:
    from playwright import sync_api as playwright
else:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

expect = playwright.expect
WAIT_MS = 90_000
KEY = "an-operator-may-use-this-key-0123456789"


@pytest.fixture(scope="module")
def small_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    keys = tmp_path_factory.mktemp("keys") / "admin.keys"
    keys.write_text(f"ops:{hash_key(KEY)}\n")
    keys.chmod(0o600)
    with services.small_service(stages=2, replicas=2, admin_keys_file=keys, heartbeat_timeout_s=3) as service:
        yield service


@pytest.fixture(scope="module")
def chromium() -> Iterator[playwright.Browser]:
    """Debian's Chromium, or the one that `playwright install chromium` downloads."""
    path = shutil.which("chromium")
    with playwright.sync_playwright() as started:
        if path is None and not Path(started.chromium.executable_path).exists():
            pytest.skip("there is no Chromium: apt-get install chromium, or playwright install chromium")
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextlib.contextmanager
def visit(browser: playwright.Browser, url: str, *, logged: str = "", **context: Any) -> Iterator[playwright.Page]:
    """The page while the block runs. It must contact no other host, and log no error but those with the text `logged`, if any."""
    page = browser.new_page(**context)
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    complaints: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.goto(url)
    page.wait_for_selector(".replica[data-state=ready]")
    yield page
    assert not [each for each in complaints if not logged or logged not in each]
    assert hosts <= {urlsplit(url).netloc, ""}, "the page contacted another host"
    page.close()


def test_page_shows_a_frozen_worker_as_broken_and_its_replacement_as_ready(
    small_service: LocalService, chromium: playwright.Browser
) -> None:
    with visit(chromium, small_service.url, viewport={"width": 1200, "height": 1000}) as page:
        expect(page.locator("#graph [data-node]"), "a frontend, a leader and four replicas").to_have_count(6)
        expect(page.locator(".replica")).to_have_count(4)
        expect(page.locator("#state")).to_have_text(re.compile("^ready"))
        worker = small_service.worker_at(0, 0)
        assert worker is not None
        with run_load(small_service):
            expect(page.locator("#rate")).to_have_text(re.compile("[1-9]"))
            pid = small_service.worker_pids()[worker]
            os.kill(pid, signal.SIGSTOP)
            page.wait_for_selector('[data-world="s0.r0"][data-state=broken]')
            page.wait_for_selector("#feed li[data-what=broken]")
            page.wait_for_selector('#graph [data-node="s0.r0"][data-state=broken]')
            page.wait_for_selector("#state[data-state=degraded]")
            assert "stage 0 has 1 of 2 replicas" in page.locator("#state").inner_text()
            os.kill(pid, signal.SIGKILL)
            page.wait_for_selector("#feed li[data-what=rejoined]")
            page.wait_for_selector('[data-world="s0.r0"][data-state=ready]')
            rate = page.locator('[data-world="s0.r0"] .batches-s')
            expect(rate).to_have_text(re.compile(r"[1-9]"))
        feed = page.locator("#feed li[data-what=broken]").first.inner_text()
        assert "s0.r0" in feed
        assert "hang" in feed
        assert "hang" in page.locator('[data-world="s0.r0"]').inner_text(), "the row shows the last failure"
        assert page.locator("#throughput path.ok").get_attribute("d")
        page.hover("#throughput svg")
        expect(page.locator("#throughput .tip")).to_contain_text("answered:")
        page.click("#by-host")
        expect(page.locator("tr.group"), "all on this host").to_have_count(1)


def test_image_is_classified_by_keyboard_alone(small_service: LocalService, chromium: playwright.Browser) -> None:
    with visit(chromium, small_service.url, logged="422") as page:  # the browser logs the rejection
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.set_input_files("#image", {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": photo()})
        page.focus("#image")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#answer li")).to_have_count(5)
        assert re.search(r"frontend → leader → s0\.r\d → s1\.r\d", page.locator(".route").inner_text())
        page.wait_for_selector("#preview[src^='data:image/jpeg']")
        assert page.locator("#curl").inner_text().endswith(f"image=@photo.jpg {small_service.url}/predict")
        page.click("#sample")
        expect(page.locator("#drop-text")).to_have_text(re.compile(r"sample\.jpg"))
        page.focus("#try-image .main")
        page.keyboard.press("Enter")
        page.wait_for_selector("#answer li")
        page.set_input_files("#image", {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": b"no image"})
        page.keyboard.press("Enter")
        expect(page.locator("#answer .wrong")).to_contain_text("image")
        page.set_input_files("#image", {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"no image"})
        page.wait_for_selector("#answer .wrong:has-text('notes.md is not a JPEG, PNG or WebP image')")


def test_operator_loads_a_version_on_the_admin_port(small_service: LocalService, chromium: playwright.Browser) -> None:
    admin_url = small_service.metrics_url.removesuffix("/metrics")
    with visit(chromium, admin_url, logged="401") as page:  # the browser logs the rejection
        page.wait_for_selector("#operate")
        for key, told in (("wrong", "failed: no valid admin key"), (KEY, "version 2 (random:1) serves")):
            page.fill("#key", key)
            page.fill("#weights", "random:1")
            page.click("#load")
            expect(page.locator("#outcome-of-action")).to_contain_text(told)
        expect(page.locator("#model")).to_have_text("resnet18 random:1")


def told_texts(page: playwright.Page, element: str) -> None:
    """Collect all texts that the element shows from now on in `window.told`, and in `window.busy` whether both buttons were disabled."""
    page.evaluate(
        """(id) => {
            window.told = [];
            window.busy = [];
            const disabled = (button) => document.getElementById(button).getAttribute("aria-disabled");
            new MutationObserver((changes) => {
                for (const change of changes) for (const node of change.addedNodes) window.told.push(node.textContent);
                window.busy.push(disabled("load") === "true" && disabled("restart") === "true");
            }).observe(document.getElementById(id), { childList: true });
        }""",
        element,
    )


def test_operator_restarts_the_workers_and_sees_each_step(
    small_service: LocalService, chromium: playwright.Browser
) -> None:
    admin_url = small_service.metrics_url.removesuffix("/metrics")
    before = set(small_service.worker_pids().values())
    with visit(chromium, admin_url) as page:
        page.wait_for_selector("#operate")
        told_texts(page, "outcome-of-action")
        page.fill("#key", KEY)
        page.click("#restart")
        expect(page.locator("#outcome-of-action")).to_have_text("done: 4 workers restarted")
        assert page.evaluate("window.busy[0]"), "one action at a time"
        assert not page.locator("#progress").is_visible()
        told = "\n".join(page.evaluate("window.told"))
        for number in range(1, 5):
            assert re.search(rf"^{number} of 4: local-\d in s\d\.r\d is restarting …$", told, re.MULTILINE), told
            assert re.search(rf"^{number} of 4: local-\d in s\d\.r\d is back after [\d.]+ s$", told, re.MULTILINE), told
        assert not before & set(small_service.worker_pids().values())


VERSIONS = """
[serve]
replicas = 1

[[models]]
name = "echo"
source = "{folder}/echo.py:pipeline"

[[models]]
name = "echo@2"
source = "{folder}/fails.py:pipeline"
share = 50
"""
ECHO = """
from multiworld_serving import Request, Stage

class Echo(Stage):
    def example(self):
        return [Request(b"example")]

    def __call__(self, requests):
        return [{result} for each in requests]

pipeline = [Echo]
"""


def test_page_draws_both_versions_of_a_model_with_their_errors_and_latencies(
    chromium: playwright.Browser, tmp_path: Path
) -> None:
    (tmp_path / "service.toml").write_text(VERSIONS.format(folder=tmp_path))
    (tmp_path / "echo.py").write_text(ECHO.format(result="len(each.body)"))
    (tmp_path / "fails.py").write_text(ECHO.format(result="1 if each.body == b'example' else each.missing"))
    with (
        LocalService(config=tmp_path / "service.toml") as service,
        run_load(service, clients=1),
        visit(chromium, f"{service.url}/?model=echo@2") as page,
    ):
        expect(page.locator("#share")).to_have_text("(50 % of the requests)")
        expect(page.locator("#versions h2")).to_have_text("echo: 50 % of the requests")
        for chart, text in (
            ("#throughput", r"answered 0\.0 .*failed (?!0\.0)"),
            ("#versions figure:nth-of-type(1)", r"answered (?!0\.0).*failed 0\.0"),
            ("#versions figure:nth-of-type(2)", r"median [\d.]+ ms"),
        ):
            expect(page.locator(f"{chart} svg")).to_have_attribute("aria-label", re.compile(text))
        page.click("#models a:has-text('echo: ready')")
        expect(page.locator("#versions h2")).to_have_text("echo@2: 50 % of the requests")
