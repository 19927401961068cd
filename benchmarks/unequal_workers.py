"""Images per second of a pipeline whose workers differ in speed, before and after the leader has cut the model for them.

    python -m benchmarks.unequal_workers --share 0.33

Two stages with one worker each, on a core each. The second worker is stopped for part of every 50 ms (SIGSTOP), so that it has `--share` of
the speed of the first, and says so (`--gflops`).
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.connections import Connections, request_bytes
from multiworld_serving.common.threads import thread_while
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService

_PERIOD_S = 0.05
_GFLOPS = 100.0
_TOKEN = "a-token-of-this-benchmark"


def slow_down(pid: int, share: float, ended: threading.Event) -> None:
    """Let a process run for `share` of the time."""
    while not ended.is_set():
        os.kill(pid, signal.SIGSTOP)
        ended.wait((1 - share) * _PERIOD_S)
        os.kill(pid, signal.SIGCONT)
        ended.wait(share * _PERIOD_S)


def wait_until_ready(service: LocalService, worker: str) -> None:
    """Raises ServiceFailedError."""
    service.wait_for(lambda line: line["worker"] == worker and "->ready" in line.message, 120.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--share", type=float, default=0.33, help="speed of the second worker, compared with the first")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round")
    options = parser.parse_args()
    request = request_bytes("/predict", "image/jpeg", photo())
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        token = Path(folder) / "token"
        token.write_text(_TOKEN)
        shared = {"model": options.model, "weights": "random:0", "stages": 2, "replicas": 1, "token_file": token}
        after_s = (options.rounds + 2) * options.seconds + 20.0
        service = stack.enter_context(
            LocalService(**shared, external_workers=True, wait_until_ready=False, rebalance_after_s=after_s)
        )
        for core, share in enumerate((1.0, options.share)):
            command = ["worker", "--leader", service.join_address, "--name", f"w{core}", "--threads", "1"]
            command += ["--gflops", str(_GFLOPS * share), "--advertise-host", f"127.0.0.{1 + core}"]
            worker = subprocess.Popen(
                ["taskset", "-c", str(core), sys.executable, "-m", "multiworld_serving.cli.main", *command],
                env={**os.environ, "MULTIWORLD_TOKEN": _TOKEN},
                stderr=subprocess.DEVNULL,
            )
            stack.callback(worker.wait)
            stack.callback(worker.terminate)
            wait_until_ready(service, f"w{core}")
        stack.enter_context(thread_while(partial(slow_down, worker.pid, options.share), "slow-down"))

        def rates(what: str) -> float:
            found = []
            for turn in range(options.rounds + 1):
                outcome = uvloop.run(Connections(service.url).closed_loop(request, options.clients, options.seconds))
                assert outcome.statuses.keys() == {200}, outcome.statuses
                if turn:
                    found.append(outcome.goodput)
            print(
                f"{what}: {statistics.median(found):.1f} images/s ({' '.join(f'{rate:.1f}' for rate in found)})",
                flush=True,
            )
            return statistics.median(found)

        before = rates("stages for equal workers")
        service.wait_for(lambda line: "has other stages" in line.message, 2 * after_s)
        time.sleep(1.0)
        after = rates("stages for these workers")
        print(f"{after / before:.2f} times as many")


if __name__ == "__main__":
    main()
