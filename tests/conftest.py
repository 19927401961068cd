"""Fixtures shared by several layers of tests: whole services, and members of worlds."""

import fcntl
import functools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import hypothesis
import pytest
import safetensors.torch
import torch
from torchvision.models import resnet18

from multiworld import WorldManager
from multiworld_serving.models.export.torchvision_models import export_loaded, load_model
from multiworld_serving.testing.local_service import LocalService
from tests.chaos.injections import HEARTBEAT_TIMEOUT_S
from tests.integration.members import Spawn, members
from tests.nursery import start_program
from tests.services import TOKEN, is_whole
from tests.waiting import wait_until

if "PYTEST_XDIST_WORKER" in os.environ:  # its workers inherit the size of a terminal that they do not have
    for name in ("COLUMNS", "TCP"):
        os.environ.pop(name, None)
    # There are as many processes as cores, and threads of several processes wait for each other.
    torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background jobs and their children
    signal.signal(signal.SIGINT, signal.default_int_handler)

# By default, an example fails if it takes longer than 200 ms, and each run has other examples.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

LocalService.start_program = staticmethod(start_program)
# Each client of httpx reads all certificates of public authorities, which takes 50 ms of CPU time. Tests create thousands of clients.
setattr(httpx._transports.default, "create_ssl_context", functools.cache(httpx.create_ssl_context))  # noqa: B010

LAYERS = ("unit", "simulation", "ray", "slurm", "machines", "chaos", "e2e", "integration")
"""The order of the folders: fast tests first, then those with the longest files, so that no process is left with a long file at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {folder: position for position, folder in enumerate(LAYERS)}
    items.sort(key=lambda item: order.get(item.nodeid.removeprefix("tests/").partition("/")[0], len(order)))


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ResNet-18 of ten classes with random weights, and images of digits.

    It contains `digits.safetensors`, `labels.txt`, `digits.bundle` and `images.safetensors`.
    """
    # Shared by all processes of this run: the first one makes it.
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "digits"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "labels.txt").exists():
            _make_digits(folder)
    return folder


def _make_digits(folder: Path) -> None:
    # Imported here, because scikit-learn takes seconds and most processes make no digits.
    from examples.digits.train import IMAGE_SIZE, LABELS, digit_images  # noqa: PLC0415

    images, _ = digit_images()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # the best class of every image is 0.7 % more probable than the next one
        state = resnet18(num_classes=len(LABELS)).state_dict()
    safetensors.torch.save_file(state, folder / "digits.safetensors")
    safetensors.torch.save_file({"images": images[:96].clone()}, folder / "images.safetensors")
    model = load_model("resnet18", str(folder / "digits.safetensors"), image_size=IMAGE_SIZE)
    export_loaded(replace(model, labels=tuple(LABELS)), folder / "digits.bundle", num_stages=2)
    (folder / "labels.txt").write_text("\n".join(LABELS))


@pytest.fixture(scope="session")
def running_service(digits: Path) -> Iterator[LocalService]:
    """See `service`. One for each process of pytest-xdist."""
    with LocalService(
        model=digits / "digits.bundle",
        stages=2,
        replicas=2,
        leaders=2,
        frontends=2,
        grpc_port=0,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        recovery_grace_s=60,
        timeout_s=100,
        edge_min_bytes=0,
    ) as running:
        wait_until(lambda: is_whole(running))
        yield running
        assert running.stop() == 0, "SIGTERM ends the service with status 0"


@pytest.fixture
def service(running_service: LocalService) -> Iterator[LocalService]:
    """Digits served by two frontends and two leaders, in two stages with two replicas. It must be whole again after each test."""
    yield running_service
    wait_until(lambda: is_whole(running_service))


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the token of services that other processes join."""
    path = tmp_path_factory.mktemp("access") / "token"
    path.write_text(TOKEN)
    return path


@pytest.fixture
async def spawn(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Spawn]:
    """Creates members. The constant MEMBER_SETTINGS of a test module, if any, is passed to their WorldManagers."""
    async with members(tmp_path, **getattr(request.module, "MEMBER_SETTINGS", {})) as make:
        yield make


@pytest.fixture
async def manager(request: pytest.FixtureRequest) -> AsyncIterator[WorldManager]:
    """A manager in the test's process, with MEMBER_SETTINGS. The parameter, if any, is `shared_memory_bytes`."""
    settings = {
        "shared_memory_bytes": getattr(request, "param", None),
        **getattr(request.module, "MEMBER_SETTINGS", {}),
    }
    async with WorldManager(**settings) as made:
        yield made
