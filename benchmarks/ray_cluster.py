"""A service on a local Ray cluster of three nodes: time to start, node kills under load, and throughput beside the local launcher.

    python -m benchmarks.ray_cluster --kills 10
    python -m benchmarks.ray_cluster --kills 0 --rounds 5      # throughput only

Two stages of two replicas, two leaders and two frontends of a ResNet-18 for images of 32 x 32 pixels. After each kill a new node joins the
cluster, and the next kill waits until every stage has its replicas on two nodes. Needs the extra ray.
"""

import argparse
import contextlib
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.throughput import machine
from multiworld_client import Client
from multiworld_serving.testing.load.clients import record_reference_answers, run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.ray.cluster import RayCluster

_READY_S = 120.0
_POLL_S = 0.05
SETTINGS: dict[str, Any] = {
    **{"model": "resnet18", "weights": "random:0", "image_size": 32},
    **{"stages": 2, "replicas": 2, "leaders": 2, "frontends": 2},
}
PHOTO = photo(width=64, height=64)


@dataclass
class Calls:
    """Requests of clients that know all URLs."""

    answered: int = 0
    failures: list[str] = field(default_factory=list)


@contextlib.contextmanager
def calls(urls: Sequence[str], clients: int) -> Iterator[Calls]:
    found, stop = Calls(), threading.Event()

    def call(first: int) -> None:
        with Client([*urls[first:], *urls[:first]], timeout_s=60) as client:
            while not stop.wait(0.1):  # leaves CPU time for starting processes
                try:
                    client.predict(PHOTO)
                    found.answered += 1
                except Exception as error:  # noqa: BLE001 - counted
                    found.failures.append(repr(error))

    threads = [threading.Thread(target=call, args=(index % len(urls),)) for index in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def status(urls: Sequence[str]) -> dict[str, Any]:
    for url in urls:
        with contextlib.suppress(httpx.TransportError):
            found: dict[str, Any] = httpx.get(f"{url}/status", timeout=5).json()
            return found
    return {}


def nodes_of(found: dict[str, Any]) -> list[set[str]]:
    """For each stage the nodes with a ready replica."""
    return [{each["host"] for each in stage["replicas"] if each["state"] == "ready"} for stage in found["stages"]]


def wait_until_redundant(urls: Sequence[str], without: str = "") -> None:
    """Wait until both leaders are ready, and each stage has ready replicas on two nodes, none on the node `without`."""
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        found = status(urls)
        if found and [leader["state"] for leader in found["leaders"]] == ["ready", "ready"]:
            nodes = nodes_of(found)
            if all(len(each) == SETTINGS["replicas"] and without not in each for each in nodes):
                return
        time.sleep(_POLL_S)
    raise SystemExit(f"the service is not redundant within {_READY_S:.0f} s")


@contextlib.contextmanager
def served(cluster: RayCluster) -> Iterator[list[str]]:
    """Run the service on the cluster. Yields its URLs, and prints how long the start took."""
    options = [text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    ports = ["--http-port", "0", "--join-port", "0", "--metrics-port", "0"]
    began_s = time.monotonic()
    started = cluster.run("serve", "--launcher", "ray", *options, *ports)
    if started.returncode:
        raise SystemExit(started.stderr)
    urls = re.findall(r"listening http=(\S+)", started.stderr)[-1].split(",")
    try:
        wait_until_redundant(urls)
        print(f"start: {time.monotonic() - began_s:.1f} s until every stage has replicas on two nodes", flush=True)
        yield urls
    finally:
        cluster.run("down")


def measure_kills(cluster: RayCluster, urls: Sequence[str], count: int, clients: int) -> None:
    took_s = []
    with calls(urls, clients) as load:
        for number in range(count):
            victim = next(each for each in sorted(set.union(*nodes_of(status(urls)))) if each != "head")
            began_s = time.monotonic()
            cluster.tell("kill", victim)
            wait_until_redundant(urls, without=victim)
            took_s.append(time.monotonic() - began_s)
            cluster.tell("add", f"spare-{number}", "4")
            print(f"kill of {victim}: redundant again after {took_s[-1]:.1f} s", flush=True)
    median_s = statistics.median(took_s)
    print(f"{count} node kills: {load.answered} requests answered, {len(load.failures)} failed {load.failures[:2]}")
    print(f"time to full redundancy: median {median_s:.1f} s, most {max(took_s):.1f} s", flush=True)


def per_second(url: str, clients: int, seconds: float) -> float:
    requests = record_reference_answers(url, [(PHOTO, "image/jpeg")])
    with run_load(url, requests, clients=clients) as load:
        time.sleep(seconds)
    if failed := [sample for sample in load.samples if sample.failed]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return len(load.samples) / seconds


def measure_throughput(cluster: RayCluster, rounds: int, clients: int) -> None:
    with served(cluster) as urls, LocalService(**SETTINGS) as local:
        pairs = []
        for number in range(rounds + 1):
            turns = dict.fromkeys((urls[0], local.url), 0.0)
            for url in turns if number % 2 else reversed(turns):  # a drift of the machine's speed affects both
                turns[url] = per_second(url, clients, 5.0)
            pairs.append((turns[urls[0]], turns[local.url]))
        pairs = pairs[1:]
    ray, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    spread = " ".join(f"{one / other:.2f}" for one, other in pairs)
    print(f"requests/s: Ray {ray:.0f}, local launcher {ours:.0f}, ratio {ratio:.3f} ({spread})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="of throughput; 0 = none")
    options = parser.parse_args()
    print(machine(), flush=True)
    cluster = RayCluster("head=4", "node-1=4", "node-2=4")
    try:
        if options.kills:
            with served(cluster) as urls:
                measure_kills(cluster, urls, options.kills, options.clients)
        if options.rounds:
            measure_throughput(cluster, options.rounds, 16)
    finally:
        cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
