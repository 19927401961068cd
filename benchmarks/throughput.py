"""Images per second and latency of this service and of other servers, with the same model on the same cores.

    make throughput ARGS="--json throughput.json"
    python -m benchmarks.throughput --only this --clients 1 16 --rounds 2

Requests are JPEG images, answers have five classes. The load is a closed loop of clients. All servers run at the same time and are
measured in turn in each round, so that other load on the machine affects all of them; figures are medians over the rounds. The peers
(servers of other projects) are suspended with SIGSTOP outside their turn, because an idle LitServe uses a quarter of a core.
This service uses a hundredth when idle. It is not suspended, because it would detect its workers as hung. CPU ms is the
CPU time of all processes of a server per image; it is meaningful even when the machine has other load. The peers serve the model of
torchvision, frozen by TorchScript, with the transforms of torchvision. Every server may use all cores: one worker with torch's default
number of threads, or two workers with half of the cores each.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

from benchmarks.connections import Connections, Outcome, request_bytes
from benchmarks.peers.model import MAX_BATCH_SIZE
from benchmarks.ranks import table
from benchmarks.servers import Running, bodies_of, ours, peer, stop_on_sigterm
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.measurement import quantile
from multiworld_serving.testing.load.requests import body_file

THIS = "this"
"""Prefix of the names of this service's variants."""
_AWAKE_S = 1.0
"""Seconds that a server gets to recover after it was suspended."""


@dataclass(frozen=True)
class Case:
    """A server with one kind of request."""

    name: str
    running: Running
    requests: list[bytes]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Resume a suspended server during the block."""
        if not self.running.peer:
            yield
            return
        self.running.signal(signal.SIGCONT)
        time.sleep(_AWAKE_S)
        try:
            yield
        finally:
            self.running.signal(signal.SIGSTOP)


@dataclass
class Figure:
    """Measurements of one case with one number of clients; the lists have one value per round."""

    case: str
    clients: int
    images_per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """CPU time of the server per image; meaningful even when the machine has other load."""
    failed: int = 0

    @property
    def rate(self) -> float:
        return statistics.median(self.images_per_s)

    @property
    def p50(self) -> float:
        return statistics.median(self.p50_ms)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_ms)

    def add(self, outcome: Outcome, cpu_s: float) -> None:
        times_ms = [1e3 * time_s for time_s in outcome.times_s.get(200, [])] or [float("nan")]
        self.images_per_s.append(outcome.goodput)
        self.p50_ms.append(quantile(times_ms, 0.5))
        self.p99_ms.append(quantile(times_ms, 0.99))
        self.cpu_ms.append(1e3 * cpu_s / max(1, outcome.statuses[200]))
        self.failed += outcome.failed


def servers(
    bodies: Sequence[bytes], options: argparse.Namespace
) -> dict[str, Callable[[], AbstractContextManager[Running]]]:
    """Functions that start the servers to compare, by name."""

    def theirs(
        module: str, *arguments: str, as_json: bool = False, workers: int = 1
    ) -> AbstractContextManager[Running]:
        threads = 0 if workers == 1 else max(1, len(os.sched_getaffinity(0)) // workers)
        shares = ("--workers", str(workers), "--threads", str(threads))
        return peer(
            options.python,
            module,
            bodies,
            "--model",
            options.model,
            *shares,
            *("--precision", "float32" if options.precision == "float32" else "bfloat16"),
            *arguments,
            as_json=as_json,
            workers=workers,
        )

    def this(stages: int, replicas: int = 1) -> AbstractContextManager[Running]:
        return ours(
            bodies,
            model=options.model,
            weights="random:0",
            stages=stages,
            replicas=replicas,
            optimize=options.optimize,
            precision=options.precision,
        )

    def python(stages: int) -> AbstractContextManager[Running]:
        model = f"benchmarks.peers.stages:{options.model}_{stages}"
        return ours(bodies, model=model, replicas=2, max_batch_size=MAX_BATCH_SIZE)

    mosec = ("--address", "127.0.0.1", "--timeout", "60000")
    bundles = {
        f"{THIS}, 1 stage": lambda: this(1),
        f"{THIS}, 1 stage, 2 replicas": lambda: this(1, replicas=2),
        f"{THIS}, 2 stages": lambda: this(2),
    }
    pipelines = {
        f"{THIS}, in Python, 1 stage, 2 replicas": lambda: python(1),
        f"{THIS}, in Python, 2 stages, 2 replicas": lambda: python(2),
    }
    return {
        **(bundles if options.model != "text" else {}),
        **(pipelines if options.model in ("resnet18", "text") else {}),
        "FastAPI + torchvision": lambda: theirs("fastapi_server"),
        "LitServe": lambda: theirs("litserve_server", as_json=True),
        "LitServe, 2 workers": lambda: theirs("litserve_server", as_json=True, workers=2),
        "mosec": lambda: theirs("mosec_server", *mosec),
        "mosec, 2 workers": lambda: theirs("mosec_server", *mosec, workers=2),
        "Ray Serve, 2 replicas": lambda: theirs("ray_server", workers=2),
    }


def ask(case: Case, clients: int, seconds: float) -> Outcome:
    async def loop() -> Outcome:
        connections = Connections(case.running.url)
        try:
            return await connections.closed_loop(case.requests, clients, seconds)
        finally:
            connections.close()

    return uvloop.run(loop())


def measure(compared: list[Case], options: argparse.Namespace) -> dict[tuple[str, int], Figure]:
    """Measure all cases in turn in each round. Keys are name of the case and number of clients."""
    figures: dict[tuple[str, int], Figure] = {}
    for case in compared:
        with case.turn():
            ask(case, 4, 1.0)  # warm-up: connections, caches, kernels for the batch sizes
    for number in range(options.rounds):
        for clients in options.clients:
            for case in compared:
                with case.turn():
                    used_s = case.running.cpu_s()
                    outcome = ask(case, clients, options.seconds + clients / 24)
                    used_s = case.running.cpu_s() - used_s
                figures.setdefault((case.name, clients), Figure(case.name, clients)).add(outcome, used_s)
        print(f"round {number + 1} of {options.rounds} done", flush=True)
    return figures


def report(figures: dict[tuple[str, int], Figure], options: argparse.Namespace) -> None:
    names = list(dict.fromkeys(name for name, _ in figures))
    columns = ["server"]
    for clients in options.clients:
        columns += [f"{clients} clients" if clients > 1 else "1 client", "p50 ms", "CPU ms"]
    rows = []
    for name in names:
        row = [name]
        for clients in options.clients:
            figure = figures[name, clients]
            row += [f"{figure.rate:.1f}", f"{figure.p50:.0f}", f"{figure.cpu:.1f}"]
        rows.append(row)
    table(f"{options.model}, {options.precision}, images a second: {machine()}", columns, rows)
    failed = {f"{f.case}, {f.clients} clients": f.failed for f in figures.values() if f.failed}
    print(f"\nrequests not answered with 200: {failed or 'none'}")


def machine() -> str:
    """Number of cores, processor and date as text."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores, {model}, {time.strftime('%Y-%m-%d', time.gmtime())}"


def main() -> int:
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment that has the peers")
    parser.add_argument("--only", nargs="+", help="servers whose names begin so")
    parser.add_argument(
        "--model", default="resnet50", help="of torchvision, or text, which this service has in Python only"
    )
    parser.add_argument("--optimize", default="fused", help="of this service")
    parser.add_argument(
        "--precision", default="float32", help="of this service; peers use torch.autocast unless it is float32"
    )
    parser.add_argument("--image", type=Path, help="a picture to ask about; one is made up otherwise")
    parser.add_argument("--width", type=int, default=500, help="in pixels of the picture that is made up, 4:3")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement, and more with more clients")
    parser.add_argument("--json", type=Path, help="write every figure of every round")
    options = parser.parse_args()
    jpeg = body_file(options.image)[0] if options.image else photo(width=options.width, height=options.width * 3 // 4)
    with ExitStack() as stack:
        compared: list[Case] = []
        for name, start in servers(bodies_of(options.model, jpeg), options).items():
            if not options.only or name.startswith(tuple(options.only)):
                print(f"starting {name}", flush=True)
                running = stack.enter_context(start())
                asked = [request_bytes("/predict", each.content_type, each.body) for each in running.questions]
                compared.append(Case(name, running, asked))
        figures = measure(compared, options)
    report(figures, options)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "figures": [asdict(f) for f in figures.values()]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
