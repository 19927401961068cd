"""Code blocks of the documentation run with a smaller model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.documents import ROOT, PageRunner, blocks, documents, is_runnable

SIDE = 32
SMALL = {"resnet50": "resnet18", "224": str(SIDE), "--weights auto": f"--weights random:0 --image-size {SIDE}"}

PAGES = ("docs/http.md", "docs/clients.md", "docs/versions.md", "docs/coming-from.md")


@pytest.fixture(scope="module")
def running() -> Iterator[LocalService]:
    with LocalService(
        model="resnet18", weights="random:0", image_size=SIDE, heartbeat_timeout_s=10, grpc_port=0
    ) as service:
        yield service


@pytest.mark.parametrize("name", PAGES)
def test_code_blocks_of_page_run(name: str, tmp_path: Path, running: LocalService) -> None:
    for file in (tmp_path / "photo.jpg", tmp_path / "examples/images/clock.jpg"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(photo())
    found = blocks(ROOT / name)
    assert found
    runner = PageRunner(tmp_path, SMALL, running)
    for block in filter(is_runnable, found):
        runner.run(block)
    if left_out := {block.language for block in found if not is_runnable(block)}:
        pytest.skip(f"all but what this machine cannot run: {', '.join(left_out)}")


def test_every_page_with_blocks_is_tested() -> None:
    assert {str(page.relative_to(ROOT)) for page in documents() if blocks(page)} == set(PAGES)
