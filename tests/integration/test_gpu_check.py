"""`benchmarks.gpu_check`: all steps run to their end on a CPU, and no step can stop the next one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.setup import Setup
from benchmarks.gpu_check import DONE, FAILED, NEEDS_GPU, STEPS, Step, run_in_this_process
from multiworld_serving.models.optimize import compiled

ROOT = Path(__file__).parents[2]
STEPS_OF_TEST = """
import os, signal, subprocess, sys, time

def dies(setup):
    setup.add("before", 1)
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(setup):
    program = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child.stdout.readline()
    setup.add("child", child.pid)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

def raises(setup):
    import a_package_that_is_missing

def works(setup):
    setup.add("answer", 42)

def needs(setup):
    setup.add("before", 2)
    setup.require_gpu("no device")
"""
PROGRAM = """
import sys
from benchmarks import gpu_check
names = ("dies", "hangs", "raises", "works", "needs")
gpu_check.STEPS = tuple(gpu_check.Step(each, f"steps_of_test:{each}", 10) for each in names)
sys.exit(gpu_check.main())
"""


def results(folder: Path) -> dict[str, dict[str, object]]:
    found = (json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json")))
    return {str(each["step"]): each for each in found}


def test_steps_that_die_hang_or_raise_do_not_stop_the_others_and_what_they_found_is_kept(tmp_path: Path) -> None:
    (tmp_path / "steps_of_test.py").write_text(STEPS_OF_TEST, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-c", PROGRAM, "--device", "cpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = results(tmp_path / "out")
    expected = {"dies": FAILED, "hangs": FAILED, "raises": FAILED, "works": DONE, "needs": NEEDS_GPU}
    assert {name: each["status"] for name, each in found.items()} == expected
    assert found["dies"]["reason"] == "killed by SIGKILL"
    assert found["dies"]["found"] == {"before": 1}
    assert found["hangs"]["reason"] == "not done within 10 s"
    assert not Path(f"/proc/{found['hangs']['found']['child']}").exists()  # type: ignore[index]
    assert "a_package_that_is_missing" in str(found["raises"]["reason"])
    assert found["works"]["found"] == {"answer": 42}
    assert (found["needs"]["found"], found["needs"]["reason"]) == ({"before": 2}, "no device")
    summary = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert [f"| {name} | {status} |" in summary for name, status in expected.items()] == [True] * len(expected)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_step_runs_to_its_end_with_a_cpu_in_place_of_the_gpu(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", torch.compile)  # steps change these in their own process
    monkeypatch.setattr(compiled, "_CALLS", compiled._CALLS)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "")
    file = tmp_path / "step.json"
    setup = Setup("cpu", sys.executable, file, tmp_path, start_s=300.0)
    run_in_this_process(step.call, setup)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["status"] in (DONE, NEEDS_GPU), found
    assert found["found"] or step.name == "tests"
