"""The files of the status page: their paths, what they may load, and consistent references."""

import re
from importlib.resources import files

from tests.unit.server.frontend_app import RunningFrontend

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
PAGE = files("multiworld_serving.server.frontend.api") / "status_page"


async def test_browsers_get_a_page_that_loads_only_its_own_files_and_programs_get_a_list(
    frontend: RunningFrontend,
) -> None:
    page = await frontend.client.get("/", headers={"Accept": BROWSER})
    listing = await frontend.client.get("/", headers={"Accept": "*/*"})
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert listing.json()["service"] == "multiworld-serving"
    assert listing.json()["endpoints"]["POST /predict"].startswith("Classify"), "try.js reads it"
    assert page.headers["Vary"] == listing.headers["Vary"] == "Accept"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    loads = re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="([^":]+)"', page.text)
    assert len(loads) == 3
    assert (await frontend.client.get("/status-page/other.js")).status_code == 404
    assert (await frontend.client.head("/events")).status_code == 200, "and ends"
    scripts = [f"/status-page/{file.name}" for file in PAGE.iterdir() if file.name.endswith((".js", ".jpg"))]
    for source in {*loads, *scripts}:
        answer = await frontend.client.get(source)
        assert answer.status_code == 200, source
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
