"""The wheels contain exactly the documented packages, and the command works beside packages of other projects."""

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import multiworld

ROOT = Path(__file__).parents[2]


def wheel_of(project: Path, folder: Path) -> Path:
    """Build a wheel without network: setuptools is installed with torch."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(project)], check=True, capture_output=True, timeout=200)
    (wheel,) = folder.glob("*.whl")
    return wheel


def project_of(folder: Path) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    # A copy of what git has staged, because setuptools writes `build` and an egg-info.
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={source}/"], cwd=ROOT, check=True)
    return wheel_of(source, tmp_path_factory.mktemp("serving"))


def test_serving_wheel_has_three_top_level_packages_and_their_data(serving: Path) -> None:
    names = zipfile.ZipFile(serving).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"multiworld", "multiworld_client", "multiworld_serving"}
    folders = {name.split("/")[1] for name in names if name.startswith("multiworld_serving/") and name.count("/") > 1}
    assert folders == {path.name for path in (ROOT / "multiworld_serving").iterdir() if path.is_symlink()}
    page = {path.name for path in (ROOT / "server" / "frontend" / "api" / "status_page").iterdir()}
    assert {f"multiworld_serving/server/frontend/api/status_page/{name}" for name in page} <= set(names)
    assert {f"{package}/py.typed" for package in top} <= set(names)
    assert "multiworld_serving/server/frontend/api/oip_grpc/open_inference.proto" in names


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


EXAMPLES_OF_PYMULTIWORLD = ("send_recv", "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter")


def environment_with(wheel: Path, folder: Path) -> Path:
    """Make a virtual environment with this wheel and what it declares, and nothing else. Returns its interpreter.

    The dependencies are links to the installed ones, because torch is large.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(packages)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=200)
    needed = [Requirement(each) for each in next(iter(metadata.distributions(path=[str(packages)]))).requires or ()]
    linked: set[str] = set()
    while needed:
        requirement = needed.pop()
        name = requirement.name.lower()
        if name in linked or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        linked.add(name)
        installed = metadata.distribution(name)
        needed += map(Requirement, installed.requires or ())
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(installed.locate_file(top)))
    return folder / "bin" / "python"


def test_library_wheel_runs_the_examples_of_pymultiworld_in_an_environment_of_its_own(tmp_path: Path) -> None:
    assert multiworld.__version__ == project_of(ROOT)["version"]
    python = environment_with(wheel_of_part("library", "multiworld", tmp_path), tmp_path / "environment")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    examples = (*EXAMPLES_OF_PYMULTIWORLD, "all_reduce_with_retry")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-m", "examples.launch", *examples, "--steps", "2"],
        check=False,
        cwd=folder,
        env={**environment, "PYTHONVERBOSE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [f"{example}: done" in done.stdout for example in examples] == [True] * len(examples)
    assert f"{tmp_path}/environment/" in done.stderr
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
        timeout=200,
    )
    assert done.returncode == 1
    assert "has files of pymultiworld, which has the same import name; uninstall it" in done.stderr
