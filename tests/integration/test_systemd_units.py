"""The systemd units are valid and match the programs' options."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from multiworld_serving.common.config.settings import LOOP_STALL_TIMEOUT_S, Settings
from multiworld_serving.common.config.sources import option
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings, ServeSettings
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.workers.leader_connection import DRAIN_S

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
PROGRAM = "/opt/multiworld/bin/multiworld"
PROGRAMS: dict[str, tuple[str, type[Settings]]] = {
    "multiworld-leader.service": ("leader", LeaderSettings),
    "multiworld-frontend.service": ("frontend", FrontendSettings),
    "multiworld-serve.service": ("serve", ServeSettings),
    "multiworld-worker@.service": ("worker", WorkerSettings),
}
NAMES = tuple(PROGRAMS)


def value(name: str, key: str) -> str:
    found = re.search(rf"^{key}=(.*)$", (UNITS / name).read_text(), re.MULTILINE)
    assert found, f"{name} has no {key}"
    return found[1]


@pytest.mark.parametrize("name", NAMES)
def test_unit_passes_systemd_analyze_verify(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / name.replace("@.", "@0.")
    unit.write_text((UNITS / name).read_text().replace(PROGRAM, "/bin/true"))  # checks the unit, not this machine
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False, timeout=60
    )
    ours = [line for line in done.stderr.splitlines() if "multiworld" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_unit_uses_options_and_variables_of_the_program(name: str) -> None:
    verb, settings = PROGRAMS[name]
    program, given, *arguments = value(name, "ExecStart").split()
    assert (program, given) == (PROGRAM, verb)
    known = {option(field) for field in settings.model_fields}
    assert {argument for argument in arguments if argument.startswith("--")} <= known
    variables = set(re.findall(r"^Environment=MULTIWORLD_(\w+)=", (UNITS / name).read_text(), re.MULTILINE))
    assert {variable.lower() for variable in variables} - {"config"} <= settings.model_fields.keys()


def test_leader_writes_its_caches_to_the_folder_that_systemd_creates() -> None:
    name = "multiworld-leader.service"
    folder = f"/var/cache/{value(name, 'CacheDirectory')}"
    caches = re.findall(r"^Environment=(TORCH_HOME|XDG_CACHE_HOME)=(.*)$", (UNITS / name).read_text(), re.MULTILINE)
    assert dict(caches) == {"TORCH_HOME": folder, "XDG_CACHE_HOME": folder}


def test_watchdog_timeouts_exceed_the_stall_detection_of_peers() -> None:
    for name in NAMES:
        assert value(name, "Type") == "notify"
        assert int(value(name, "WatchdogSec")) >= 2 * LOOP_STALL_TIMEOUT_S


def test_stop_timeouts_cover_draining() -> None:
    drain_s = LeaderSettings.model_fields["drain_timeout_s"].default
    for name, at_least_s in zip(NAMES, (drain_s, drain_s, drain_s, DRAIN_S), strict=True):
        assert int(value(name, "TimeoutStopSec")) >= at_least_s + 10
    assert {value(name, "Restart") for name in NAMES} == {"always"}, (
        "a worker that is told to restart exits with status 0"
    )
