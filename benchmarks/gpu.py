"""Everything that a first hour on GPUs must answer, in one run of at most nine minutes: tests, copies, speed, failures. Never run on a GPU.

    make gpu
    python -m benchmarks.gpu --device cuda:1 --out build/gpu
    python -m benchmarks.gpu --device cpu --kill-s 5     # a rehearsal without a GPU

Writes `report.md`. Each step has a time limit, and a step that fails does not stop the others. The exit status is 1 if a
test failed or a request was lost, and 0 without a GPU.
"""

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multiworld_serving.workers.compute.transfers import GpuTransfers

_TOTAL_S = 540.0
_TESTS = ("tests/integration/test_gpu_stages.py", "tests/integration/test_nccl.py")
_TESTS_S, _SPEED_S = 180.0, 60.0
_CHAOS_S = 60.0
"""Longest start and end of a chaos campaign."""
_WAYS = (("float32", "fused"), ("bfloat16", "fused"), ("bfloat16", "compile"))
_COPY_MIB = (1, 4, 16, 64)
_COPIES = 20
_GROWTH_MIB = 64.0
"""Most device memory that may stay in use after the kills."""


@dataclass
class Step:
    """One step of the report.

    Attributes:
        passed: False if something is wrong; None if the step only measures.
        found: figures, by name.
        output: the end of what its program printed.
    """

    name: str
    command: str
    passed: bool | None = None
    took_s: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    output: str = ""


def run_program(name: str, arguments: list[str], limit_s: float, *, checks: bool) -> Step:
    """Run a module of Python; its output goes into the report."""
    step = Step(name, f"python -m {' '.join(arguments)}")
    started_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=limit_s, check=False
        )
        step.output = (done.stdout + done.stderr)[-6000:]
        step.passed = done.returncode == 0 if checks or done.returncode else None
    except subprocess.TimeoutExpired as error:
        step.passed, step.output = False, f"not done within {limit_s:g} s\n{_text(error.stdout)[-4000:]}"
    step.took_s = time.monotonic() - started_s
    return step


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def measure_copies(device: torch.device) -> Step:
    """GB/s to the device and back, as the workers copy: through pinned memory, on a stream of their own."""
    step = Step("copies", "Transfers.to_device, Transfers.to_host")
    started_s = time.monotonic()
    transfers = GpuTransfers(device)
    for mib in _COPY_MIB:
        batch = torch.ones(mib << 18)
        there = transfers.to_device(batch)()
        transfers.to_host(there)
        begin_s = time.perf_counter()
        for _ in range(_COPIES):
            there = transfers.to_device(batch)()
            _wait(device)
        to_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        for _ in range(_COPIES):
            transfers.to_host(there)
        back_s = time.perf_counter() - begin_s
        moved_gb = _COPIES * batch.nbytes / 1e9
        step.found[f"{mib} MiB"] = {
            "to device GB/s": round(moved_gb / to_s, 2),
            "to host GB/s": round(moved_gb / back_s, 2),
        }
    step.took_s = time.monotonic() - started_s
    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kill_workers(device: torch.device, duration_s: float) -> Step:
    """`kill -9` of random workers under load, and how much device memory is in use more afterwards."""
    before_mib = _memory_used_mib(device)
    chaos = ["multiworld_serving.cli.main", "chaos", "--faults", "kill", "--duration", f"{max(1, round(duration_s))}s"]
    settings = ["--settle", "0s", "--set", "image_size=64", "--set", f"device={device}"]
    step = run_program("kill -9 under load", [*chaos, *settings], duration_s + _CHAOS_S, checks=True)
    grown_mib = _memory_used_mib(device) - before_mib
    step.found = {"device MiB that stay in use": grown_mib}
    step.passed = bool(step.passed) and grown_mib < _GROWTH_MIB
    return step


def _memory_used_mib(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


def machine(device: torch.device) -> dict[str, str]:
    """The machine and the versions."""
    found = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "GPUs": str(torch.cuda.device_count())}
    return found


def markdown(facts: dict[str, str], steps: list[Step]) -> str:
    """The report for people."""
    lines = ["# GPU report", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    for step in steps:
        result = {True: "passed", False: "FAILED", None: "measured"}[step.passed]
        lines += [f"## {step.name}: {result} ({step.took_s:.0f} s)", "", f"`{step.command}`", ""]
        lines += [f"- {name}: {value}" for name, value in step.found.items()]
        if step.output:
            lines += ["", "```", step.output.rstrip(), "```"]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument(
        "--kill-s", type=float, default=_TOTAL_S, help="how long workers are killed; shorter if the time is up"
    )
    options = parser.parse_args()
    device: torch.device = options.device
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU is usable on this machine: nothing to do")
        return 0
    until_s = time.monotonic() + _TOTAL_S
    speed = [
        [
            "benchmarks.bare_loop",
            "--device",
            str(device),
            "--batch-size",
            str(size),
            "--precision",
            precision,
            "--optimize",
            way,
        ]
        for size in (1, 32)
        for precision, way in _WAYS
    ]
    work: list[Callable[[], Step]] = [
        lambda: run_program("tests", ["pytest", "-q", "-rs", *_TESTS], _TESTS_S, checks=True),
        lambda: measure_copies(device),
        *(partial(run_program, "images per second of the bare model", each, _SPEED_S, checks=False) for each in speed),
        lambda: kill_workers(device, min(options.kill_s, until_s - _CHAOS_S - time.monotonic())),
    ]
    steps: list[Step] = []
    for each in work:
        try:
            steps.append(each())
        except Exception as error:  # noqa: BLE001 - the other steps have answers of their own
            steps.append(Step("a step ended early", "", passed=False, output=f"{type(error).__name__}: {error}"))
        print(f"{steps[-1].name}: {steps[-1].passed} after {steps[-1].took_s:.0f} s", flush=True)
    facts = machine(device)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.md").write_text(markdown(facts, steps))
    print(f"wrote {options.out / 'report.md'}")
    return int(any(step.passed is False for step in steps))


if __name__ == "__main__":
    sys.exit(main())
