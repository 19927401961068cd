"""Everything that the first ten minutes on a GPU must answer: speed, deviations, failures of the device, NCCL. Not run on a GPU yet.

    make gpu                                                        # JSON in build/gpu
    python -m benchmarks.gpu_check --out $OUT --limit-s 540         # on a machine that is lent for ten minutes
    python -m benchmarks.gpu_check --device cpu                     # a rehearsal in about a minute, the default without a GPU

Steps are independent, and the most valuable come first. Each runs in a process of its own with a time limit, and writes its file when it
learns something. A step that fails, dies or hangs does not stop the next one. Without a GPU, the steps run as far as they can on the CPU.
Needs nothing but Python itself: a package that a step misses is the result of the step. The exit status is 1 if a step failed.
"""

import argparse
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.setup import RUNNING, NeedsGpuError, Setup

DONE, NEEDS_GPU, FAILED, NO_TIME = "done", "needs a GPU", "failed", "no time left"
_NEEDS_GPU_STATUS = 75
_MIN_S = 5.0
"""A step with less time than this is not started."""
_START_S = 60.0
_STOP_S = 5.0
"""Between SIGTERM and SIGKILL of a step whose time is over."""
_PAUSE_S = 0.02
_OUTPUT_CHARS = 6000
_PR_SET_CHILD_SUBREAPER = 36
_GPU_TESTS = ("tests/integration/test_gpu_stages.py", "tests/integration/test_nccl.py")


@dataclass(frozen=True)
class Step:
    """A question, and how long its answer may take.

    Attributes:
        call: "module:function", which takes a Setup.
    """

    name: str
    call: str
    limit_s: float


STEPS = (
    Step("driver", "benchmarks.gpu.hardware:driver", 40),
    Step("copies", "benchmarks.gpu.hardware:copies", 40),
    Step("precisions", "benchmarks.gpu.computing:precisions", 120),
    Step("compiled-sizes", "benchmarks.gpu.computing:compiled_sizes", 90),
    Step("service", "benchmarks.gpu.serving:service", 120),
    Step("faults", "benchmarks.gpu.serving:faults", 60),
    Step("lost-device", "benchmarks.gpu.serving:lost_device", 60),
    Step("nccl-one", "benchmarks.gpu.collectives:nccl_one", 40),
    Step("nccl-two", "benchmarks.gpu.collectives:nccl_two", 90),
    Step("device-memory", "benchmarks.gpu.device_memory:step", 40),
    Step("tests", "benchmarks.gpu_check:run_tests", 180),
)


def run_in_this_process(call: str, setup: Setup) -> int:
    """Run a step ("module:function") to its end. Returns the exit status."""
    setup.write(RUNNING)
    try:
        module, _, function = call.partition(":")
        getattr(importlib.import_module(module), function)(setup)
    except NeedsGpuError as missing:
        setup.write(NEEDS_GPU, str(missing))
        return _NEEDS_GPU_STATUS
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - of anything, also SIGTERM
        setup.write(FAILED, f"{type(error).__name__}: {str(error)[-2000:]}")
        traceback.print_exc()
        return 1
    setup.write(DONE)
    return 0


def run_tests(setup: Setup) -> None:
    setup.require_gpu("all tests of GPUs are skipped")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-rs", *_GPU_TESTS], check=False)
    setup.add("exit status of pytest", done.returncode)
    if done.returncode:
        raise RuntimeError("tests failed, see the output")


def run_in_own_process(step: Step, number: int, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a step in a process with a time limit, and everything that it starts. Returns the content of its file."""
    file: Path = options.out / f"{number:02d}-{step.name}.json"
    log = options.out / f"{number:02d}-{step.name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--call", step.call, "--file", str(file)]
    command += ["--device", options.device, "--out", str(options.out), "--peers-python", options.peers_python]
    command += ["--patience", str(options.patience)]
    started_s, reason = time.monotonic(), ""
    file.unlink(missing_ok=True)  # of an earlier run
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            reason = f"not done within {limit_s:.0f} s"
        finally:
            _end(process)
    found: dict[str, Any] = {"found": {}, "device": options.device}
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
    if process.returncode not in (0, _NEEDS_GPU_STATUS) or found.get("status") not in (DONE, NEEDS_GPU):
        found |= {"status": FAILED, "reason": reason or found.get("reason") or _how_it_ended(process.returncode)}
    found |= {"step": step.name, "seconds": round(time.monotonic() - started_s, 1)}
    found["output"] = log.read_text(errors="replace")[-_OUTPUT_CHARS:]
    file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    log.unlink()
    return found


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "it cannot be killed"
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a step and all processes that it has started and left, which are children of this process then."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    deadline_s = time.monotonic() + _STOP_S
    while (left := _descendants(os.getpid())) and time.monotonic() < deadline_s:  # a process may hang in the driver
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            # The step itself first: otherwise its status would be lost.
            while process.poll() is not None and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_PAUSE_S)


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += parents.get(pid, [])
    return found[1:]


def write_summary(results: list[dict[str, Any]], folder: Path) -> None:
    """One line for each step."""
    lines = ["# GPU check", "", "| step | result | s | reason |", "|---|---|---|---|"]
    for each in results:
        reason = str(each.get("reason", "")).replace("\n", " ").replace("|", "/")[:200]
        lines.append(f"| {each['step']} | {each['status']} | {each.get('seconds', 0):g} | {reason} |")
    (folder / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _default_device() -> str:
    """The first GPU if the driver is there and torch can use it, else the CPU. In a process of its own: torch may be missing or crash."""
    ask = "import torch; print('cuda:0' if torch.cuda.is_available() else 'cpu')"
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() or "cpu"
    return "cpu"


def check(options: argparse.Namespace, until_s: float) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    options.device = options.device or _default_device()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that no process of a step is left
    results: list[dict[str, Any]] = []
    for number, step in enumerate(STEPS, start=1):
        if options.only and step.name not in options.only:
            continue
        limit_s = min(step.limit_s * options.patience, until_s - time.monotonic())
        if limit_s < _MIN_S:
            results.append({"step": step.name, "status": NO_TIME})
        else:
            results.append(run_in_own_process(step, number, options, limit_s))
        write_summary(results, options.out)
        print(f"{step.name}: {results[-1]['status']} {results[-1].get('reason', '')[:200]}", flush=True)
    return int(any(each["status"] == FAILED for each in results))


def main() -> int:
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="", help="cuda:N or cpu; by default the first GPU, or the CPU without one")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for all steps")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="these steps")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor of the time limits of steps, on a busy machine"
    )
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has mosec and LitServe")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.call is None:
        return check(options, started_s + options.limit_s)
    setup = Setup(
        options.device,
        options.peers_python,
        options.file,
        options.out / "files",
        _START_S * options.patience,
    )
    setup.folder.mkdir(exist_ok=True)
    return run_in_this_process(options.call, setup)


if __name__ == "__main__":
    sys.exit(main())
