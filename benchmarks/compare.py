"""Two services under the same load in turn: requests per second, and CPU milliseconds per request of each kind of process.

    python -m benchmarks.compare --options="--model resnet18 --image-size 32 --stages 1 --replicas 1" --b="--leaders 2" --clients 64
    python -m benchmarks.compare --options="--model resnet50 --stages 2 --replicas 1" --a-checkout ../before --clients 1

A and B have the same options of `multiworld serve`, and further ones (`--a`, `--b`). Either can be another checkout, also one from before
the package `multiworld_serving` existed. Both run at the same time; turns alternate, so that a drift in machine speed affects both. The
result is the median of the ratios of consecutive turns.
"""

import argparse
import contextlib
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import uvloop

from benchmarks.connections import Connections, request_bytes
from benchmarks.servers import cpu_s
from multiworld_serving.testing.load.images import photo

_READY_S = 120.0
_SETTLE_S = 3.0
_HERE = Path(__file__).resolve().parents[1]


class Service:
    """A running `multiworld serve` of a checkout.

    Args:
        log: receives what it logs.
    """

    def __init__(self, name: str, checkout: Path, options: list[str], log: Path) -> None:
        self.name = name
        self.rates: list[float] = []
        """Requests per second of each turn."""
        self.cpu_ms: list[dict[str, float]] = []
        """CPU milliseconds per request of each turn, by kind of process."""
        package = "multiworld_serving." if (checkout / "multiworld_serving").exists() else ""
        ports = {"--http-port": 9000, "--join-port": 9001, "--admin-port": 9002}
        offset = 10 * (ord(name) - ord("A"))
        given = [text for option, port in ports.items() for text in (option, str(port + offset))]
        self.url = f"http://127.0.0.1:{ports['--http-port'] + offset}"
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{package}cli.main", "serve", "--weights", "random:0", *given, *options],
                cwd=checkout,
                env={**os.environ, "PYTHONPATH": str(checkout)},
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    def wait_until_ready(self) -> None:
        """Raises TimeoutError with the end of the log."""
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/readyz").status_code == 200:
                    return
            time.sleep(0.5)
        raise TimeoutError(f"{self.name} is not ready: {self._log.read_text()[-1000:]}")

    def measure(self, request: bytes, clients: int, seconds: float) -> None:
        """One turn."""
        kinds = dict(self._kinds(self._process.pid))
        before_s = {pid: cpu_s(pid) for pid in kinds}
        outcome = uvloop.run(Connections(self.url).closed_loop([request], clients, seconds))
        assert outcome.statuses.keys() == {200}, outcome.statuses
        used: dict[str, float] = defaultdict(float)
        for pid, kind in kinds.items():
            used[kind] += 1e3 * (cpu_s(pid) - before_s[pid]) / outcome.statuses[200]
        self.rates.append(outcome.goodput)
        self.cpu_ms.append(used)

    def stop(self) -> None:
        """End it, and wait for it."""
        self._process.terminate()
        self._process.wait(60)

    def __str__(self) -> str:
        kinds = {kind for turn in self.cpu_ms for kind in turn}
        parts = {kind: statistics.median(turn[kind] for turn in self.cpu_ms) for kind in sorted(kinds)}
        total = statistics.median(sum(turn.values()) for turn in self.cpu_ms)
        shares = ", ".join(f"{kind} {ms:.2f}" for kind, ms in parts.items())
        turns = " ".join(f"{rate:.0f}" for rate in self.rates)
        return f"{self.name}: {statistics.median(self.rates):.1f} requests/s ({turns}); CPU ms per request {total:.2f}: {shares}"

    def _kinds(self, pid: int) -> Iterator[tuple[int, str]]:
        """The processes of this tree, with the word after `multiworld` in their titles."""
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
        yield pid, words[1] if words[1:2] and words[0] == "multiworld" else "others"
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from self._kinds(int(child))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", default="--model resnet18 --image-size 32 --stages 1 --replicas 1", help="of both")
    parser.add_argument("--a", default="", help="further options of A")
    parser.add_argument("--b", default="", help="further options of B")
    parser.add_argument("--a-checkout", type=Path, default=_HERE)
    parser.add_argument("--b-checkout", type=Path, default=_HERE)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--width", type=int, default=500, help="of the image in pixels; 48 for a small request")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    options = parser.parse_args()
    request = request_bytes("/predict", "image/jpeg", photo(width=options.width, height=3 * options.width // 4))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        services = []
        for name, checkout, more in (("A", options.a_checkout, options.a), ("B", options.b_checkout, options.b)):
            given = shlex.split(f"{options.options} {more}")
            services.append(Service(name, checkout.resolve(), given, Path(folder) / name))
            stack.callback(services[-1].stop)
        for each in services:
            each.wait_until_ready()
        time.sleep(_SETTLE_S)
        for turn in range(options.turns + 1):
            for each in services if turn % 2 else reversed(services):
                each.measure(request, options.clients, options.seconds)
            if not turn:  # warm-up
                for each in services:
                    each.rates.clear()
                    each.cpu_ms.clear()
    a, b = services
    print(a, b, sep="\n")
    print(f"B / A: {statistics.median(y / x for x, y in zip(a.rates, b.rates, strict=True)):.3f}")


if __name__ == "__main__":
    main()
