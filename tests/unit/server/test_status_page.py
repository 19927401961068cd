"""The files of the status page: their paths, what they may load, and consistent references."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

from tests.unit.server.frontend_app import running_frontend

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
PAGE = files("multiworld_serving.server.api") / "status_page"


class Page(HTMLParser):
    """The parts of the HTML that the tests need."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.refers_to: set[str] = set()
        self.loads: list[str] = []
        self.inline = False
        self.feed((PAGE / "index.html").read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        self.refers_to |= {given[name] for name in ("for", "aria-labelledby") if name in given}
        self.inline |= (tag == "script" and "src" not in given) or tag == "style" or "style" in given
        self.inline |= any(name.startswith("on") for name in given)
        self.loads += [given[name] for name in ("src", "href") if name in given and tag != "a"]


async def test_browsers_get_the_page_and_programs_the_list() -> None:
    async with running_frontend() as frontend:
        page = await frontend.client.get("/", headers={"Accept": BROWSER})
        listing = await frontend.client.get("/", headers={"Accept": "*/*"})
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert listing.json()["service"] == "multiworld-serving"
    assert listing.json()["endpoints"]["POST /predict"].startswith("Classify"), "try.js reads it"
    assert page.headers["Vary"] == listing.headers["Vary"] == "Accept"


async def test_page_may_load_only_its_own_existing_files() -> None:
    async with running_frontend() as frontend:
        page = await frontend.client.get("/", headers={"Accept": BROWSER})
        policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        loads = [source for source in Page().loads if not source.startswith("data:")]
        assert len(loads) == 3
        assert (await frontend.client.get("/status-page/other.js")).status_code == 404
        assert (await frontend.client.head("/events")).status_code == 200, "and ends"
        scripts = [f"/status-page/{file.name}" for file in PAGE.iterdir() if file.name.endswith((".js", ".jpg"))]
        for source in {*loads, *scripts}:
            answer = await frontend.client.get(source)
            assert answer.status_code == 200, source
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_page_has_nothing_inline_and_every_reference_has_its_target() -> None:
    page = Page()
    assert not page.inline
    assert page.refers_to <= page.ids
    for file in PAGE.iterdir():
        if not file.name.endswith((".js", ".css")):
            continue
        text = file.read_text()
        assert len(text.splitlines()) <= 400, file.name
        assert set(re.findall(r'\$\("([\w-]+)"\)', text)) <= page.ids, file.name
        assert not re.findall("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval", text), file.name
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), file.name
        for imported in re.findall(r'from "\./([\w.]+)"', text):
            assert (PAGE / imported).is_file(), (file.name, imported)
