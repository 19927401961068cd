"""The batch scripts for Slurm, run by bash with replacements of `srun` and `scontrol`: what they start, and how they end."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from multiworld_serving.cli.options import PROGRAMS
from multiworld_serving.common.config import load
from multiworld_serving.common.config.settings import Settings
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.settings import FrontendSettings
from multiworld_serving.workers.settings import WorkerSettings
from tests.waiting import wait_until

FILES = Path(__file__).parents[2] / "deploy" / "slurm"
SRUN = "#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\ntrap 'kill -TERM $pid' TERM\n\"$@\" & pid=$!\nwait $pid\nwait $pid\n"
SCONTROL = "#!/bin/bash\necho node-a\necho node-b\n"
MULTIWORLD = f"""#!{sys.executable}
import json, os, pathlib, signal, sys
verb, *arguments = sys.argv[1:]
if verb == "token":
    pathlib.Path(arguments[0]).write_text("of-this-test")
    sys.exit()
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls, flush=True)
if verb == "worker":
    marker = pathlib.Path(os.environ["CALLS"] + ".stuck")
    if not marker.exists():
        marker.touch()
        sys.exit(70)
    sys.exit()
signal.sigwait([signal.SIGTERM])
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which the scripts find these programs, and a shared folder."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("multiworld", MULTIWORLD)):
        program = tmp_path / name
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_CPUS_PER_TASK": "4",
    }


def calls(environment: dict[str, str]) -> list[list[str]]:
    path = Path(environment["CALLS"])
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def settings(call: Sequence[str]) -> Settings:
    """The settings that a program has with this command line."""
    verb, *arguments = call
    cls = next(program for program in PROGRAMS if program.section == verb)
    names = (option.removeprefix("--").replace("-", "_") for option in arguments[::2])
    return load(cls, dict(zip(names, arguments[1::2], strict=True)))


def test_service_job_runs_a_leader_and_a_frontend_on_each_node_and_ends_with_sigterm(
    environment: dict[str, str],
) -> None:
    job = subprocess.Popen(["bash", str(FILES / "service.sbatch"), "--stages", "3"], env=environment)
    try:
        wait_until(lambda: len(calls(environment)) == 4)
    finally:
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 0
    folder = Path(environment["HOME"]) / ".multiworld"
    assert (folder / "leaders").read_text() == "node-a:8001\nnode-b:8001\n"
    leaders = [each for call in calls(environment) if isinstance(each := settings(call), LeaderSettings)]
    frontends = [each for call in calls(environment) if isinstance(each := settings(call), FrontendSettings)]
    assert {each.name: each.stages for each in leaders} == {"leader-node-a": 3, "leader-node-b": 3}
    assert {each.name for each in frontends} == {"frontend-node-a", "frontend-node-b"}
    assert {each.leaders for each in frontends} == {(("node-a", 8001), ("node-b", 8001))}


def test_worker_is_started_again_when_it_is_stuck(environment: dict[str, str]) -> None:
    folder = Path(environment["HOME"]) / ".multiworld"
    folder.mkdir()
    (folder / "leaders").write_text("node-a:8001\n")
    subprocess.run(["bash", str(FILES / "worker.sbatch"), "--device", "cpu"], env=environment, check=True, timeout=60)
    first, second = calls(environment)
    assert first == second
    worker = settings(first)
    assert isinstance(worker, WorkerSettings)
    assert (worker.name, worker.threads, worker.leaders) == ("worker-3", 4, (("node-a", 8001),))
