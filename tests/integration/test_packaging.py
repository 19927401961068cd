"""The wheels contain exactly the documented packages, and the command works beside packages of other projects."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def wheel_of(project: Path, folder: Path) -> Path:
    """Build a wheel without network: setuptools is installed with torch."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(project)], check=True, capture_output=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    return wheel


def project_of(folder: Path) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in tracked.splitlines():  # a copy, because setuptools writes `build` and an egg-info
        if (path := ROOT / name).is_symlink():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path.readlink())
        elif path.exists() and not name.startswith(("tests/", "docs/img/")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return wheel_of(source, tmp_path_factory.mktemp("serving"))


def test_serving_wheel_has_three_top_level_packages_and_their_data(serving: Path) -> None:
    names = zipfile.ZipFile(serving).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"multiworld", "multiworld_client", "multiworld_serving"}
    folders = {name.split("/")[1] for name in names if name.startswith("multiworld_serving/") and name.count("/") > 1}
    assert folders == {path.name for path in (ROOT / "multiworld_serving").iterdir() if path.is_symlink()}
    page = {path.name for path in (ROOT / "server" / "api" / "status_page").iterdir()}
    assert {f"multiworld_serving/server/api/status_page/{name}" for name in page} <= set(names)
    assert {f"{package}/py.typed" for package in top} <= set(names)
    assert "multiworld_serving/server/api/oip_grpc/open_inference.proto" in names


def test_client_wheel_has_one_package_and_needs_only_httpx(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        (source / name).write_bytes((ROOT / "packaging" / "client" / name).read_bytes())
    (source / "multiworld_client").symlink_to(ROOT / "multiworld_client")
    folder = tmp_path / "wheel"
    folder.mkdir()
    names = zipfile.ZipFile(wheel_of(source, folder)).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"multiworld_client"}
    assert "multiworld_client/py.typed" in names
    client, serving = project_of(ROOT / "packaging" / "client"), project_of(ROOT)
    assert client["version"] == serving["version"]
    assert client["dependencies"] == ["httpx>=0.27,<1"]
    assert set(client["dependencies"]) <= set(serving["dependencies"])  # type: ignore[call-overload]
