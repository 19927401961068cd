"""The wheels contain exactly the documented packages, and the command works beside packages of other projects."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import multiworld

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


def wheel_of_part(part: str, package: str, folder: Path) -> Path:
    """Build the wheel of a distribution in `packaging` that contains one package."""
    source, wheels = folder / "source", folder / "wheels"
    source.mkdir()
    wheels.mkdir()
    for name in ("pyproject.toml", "README.md"):
        (source / name).write_bytes((ROOT / "packaging" / part / name).read_bytes())
    (source / package).symlink_to(ROOT / package)
    wheel = wheel_of(source, wheels)
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {package}
    assert f"{package}/py.typed" in names
    own, serving = project_of(ROOT / "packaging" / part), project_of(ROOT)
    assert own["version"] == serving["version"]
    assert set(own["dependencies"]) <= set(serving["dependencies"])  # type: ignore[call-overload]
    return wheel


def test_client_wheel_has_one_package_and_needs_only_httpx(tmp_path: Path) -> None:
    wheel_of_part("client", "multiworld_client", tmp_path)
    assert project_of(ROOT / "packaging" / "client")["dependencies"] == ["httpx>=0.27,<1"]


def test_library_wheel_runs_an_example_of_pymultiworld_without_the_service(tmp_path: Path) -> None:
    wheel = wheel_of_part("library", "multiworld", tmp_path)
    assert multiworld.__version__ == project_of(ROOT)["version"]
    installed, folder = tmp_path / "installed", tmp_path / "folder"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=100)
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.modules['multiworld_serving'] = None  # importing it is an error\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "examples.launch", "send_recv", "--steps", "2"],
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{installed}", "PYTHONVERBOSE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "send_recv: done" in done.stdout
    assert f"{installed}/multiworld/manager.py" in done.stderr
    assert f"{ROOT}/multiworld/" not in done.stderr


def test_files_of_pymultiworld_in_the_same_folder_are_an_error(tmp_path: Path) -> None:
    for name in ("__init__", "watchdog"):  # pymultiworld was installed after this distribution
        (tmp_path / "multiworld").mkdir(exist_ok=True)
        (tmp_path / "multiworld" / f"{name}.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import multiworld_serving"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "has files of pymultiworld, which has the same import name; uninstall it" in done.stderr
