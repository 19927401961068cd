"""The service on the device: speed beside other servers, killed and frozen workers, and a worker that loses its device."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import uvloop

from benchmarks.connections import Connections, Outcome, request_bytes
from benchmarks.gpu.computing import MODEL, bundle_path
from benchmarks.gpu.hardware import memory_used_mib
from benchmarks.gpu.setup import NeedsGpuError, Setup
from benchmarks.servers import Running, ours, peer
from multiworld_serving.server.supervisor.programs import PROGRAM
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.measurement import quantile
from multiworld_serving.testing.load.requests import served_requests
from multiworld_serving.testing.local_service import LocalService
from multiworld_serving.workers.exit_timer import EXIT_DEVICE_FAILED

_TOKEN = "of-this-check"
_GROWTH_MIB = 64.0
"""Most device memory that may stay in use after the kills."""
_PEERS = {
    "mosec": ("mosec_server", ("--address", "127.0.0.1", "--timeout", "60000"), False),
    "litserve": ("litserve_server", (), True),
}


def service_settings(setup: Setup) -> dict[str, Any]:
    """Settings of `multiworld serve` for all steps. TF32 is what peers use, because it is torch's default for convolutions."""
    found: dict[str, Any] = {"model": bundle_path(setup), "device": setup.device, "stages": 1}
    found["start_timeout_s"] = setup.start_s
    if setup.small:
        return found | {"threads": 1, "optimize": "eager", "max_batch_size": 4}
    return found | {"precision": "tf32", "max_batch_size": 32, "frontends": max(1, min(4, setup.cores // 4))}


def service(setup: Setup) -> None:
    """Images per second, latency and device memory with 1, 2 and 4 workers, and of mosec and LitServe with as many."""
    bodies, before_mib = [photo()], memory_used_mib(setup.device)
    for workers in (1,) if setup.small else (1, 2, 4):
        with ours(bodies, **service_settings(setup), replicas=workers) as running:
            setup.add(f"this, {workers} workers", _speed(setup, running, workers, before_mib))
    if not setup.small:
        for name, (module, arguments, as_json) in _PEERS.items():
            if subprocess.run(
                [setup.peers_python, "-c", f"import {name}"], capture_output=True, check=False
            ).returncode:
                setup.add(name, "not installed")
                continue
            for workers in (1, 2):
                shares = "--model", MODEL, "--device", setup.device, "--workers", str(workers), "--threads", "0"
                with peer(
                    setup.peers_python, module, bodies, *shares, *arguments, as_json=as_json, workers=workers
                ) as running:
                    setup.add(f"{name}, {workers} workers", _speed(setup, running, workers, before_mib))
    if not setup.on_gpu:
        raise NeedsGpuError("workers computed on the CPU")


def _speed(setup: Setup, running: Running, workers: int, before_mib: float) -> dict[str, Any]:
    requests = [request_bytes("/predict", each.content_type, each.body) for each in running.questions]

    async def ask(clients: int, seconds: float) -> Outcome:
        connections = Connections(running.url)
        try:
            return await connections.closed_loop(requests, clients, seconds)
        finally:
            connections.close()

    found: dict[str, Any] = {"memory in MiB": round(memory_used_mib(setup.device) - before_mib)}
    for clients in (1, 4) if setup.small else (1, 64 * workers):
        uvloop.run(ask(clients, 0.2 if setup.small else 1.0))  # warm-up
        outcome = uvloop.run(ask(clients, 0.3 if setup.small else 4.0))
        times_s = outcome.times_s.get(200, [])
        times_ms = {name: round(1e3 * quantile(times_s, share), 2) for name, share in (("p50", 0.5), ("p99", 0.99))}
        found[f"{clients} clients"] = {"images/s": round(outcome.goodput, 1), "failed": outcome.failed, "ms": times_ms}
    return found


def faults(setup: Setup) -> None:
    """SIGKILL and SIGSTOP of a worker under load: no request fails, the service is whole again, and the device memory returns."""
    with LocalService(**service_settings(setup), replicas=2, heartbeat_timeout_s=4 if setup.small else 2) as running:
        requests = served_requests(running.url)
        whole_mib = memory_used_mib(setup.device)
        for fault in (signal.SIGKILL, signal.SIGSTOP):
            with run_load(running.url, requests, clients=4) as load:
                _wait_for_answers(setup, load.samples)
                pid, began_s = next(iter(running.worker_pids().values())), time.monotonic()
                seen = len(running.lines)
                os.kill(pid, fault)
                running.wait_for(lambda line: "->broken" in line.message, setup.start_s, after=seen)
                detected_s = time.monotonic() - began_s
                if fault is signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)
                running.wait_until_complete(setup.start_s)
                whole_s = time.monotonic() - began_s
                _wait_for_answers(setup, load.samples)
            took_s = [sample.took_s for sample in load.samples]
            result = {"detected after s": round(detected_s, 3), "whole after s": round(whole_s, 2)}
            result |= {"requests": len(load.samples), "failed": len(load.failed), "longest s": round(max(took_s), 2)}
            setup.add(fault.name, result | {"memory that stays in MiB": memory_used_mib(setup.device) - whole_mib})
    lost = [
        name for name, each in setup.found.items() if each["failed"] or each["memory that stays in MiB"] > _GROWTH_MIB
    ]
    if lost:
        raise RuntimeError(f"requests failed, or memory stayed in use, after {', '.join(lost)}")
    if not setup.on_gpu:
        raise NeedsGpuError("workers computed on the CPU")


def _wait_for_answers(setup: Setup, samples: list[Any], count: int = 20) -> None:
    wanted, deadline_s = len(samples) + count, time.monotonic() + setup.start_s
    while len(samples) < wanted:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(samples)} answers")
        time.sleep(0.02)


def lost_device(setup: Setup) -> None:
    """An assertion fails on the device in one of two workers: it ends with status 71, no request fails, and the other one computes on."""
    token = setup.folder / "token"
    token.write_text(_TOKEN, encoding="utf-8")
    settings = service_settings(setup) | {"external_workers": True, "token_file": token, "wait_until_ready": False}
    settings.pop("device")
    with ExitStack() as stack:
        running = stack.enter_context(LocalService(**settings, replicas=2))
        stack.enter_context(_worker(setup, running, "sound", [*PROGRAM]))
        failing = stack.enter_context(
            _worker(setup, running, "failing", [sys.executable, "-m", "benchmarks.gpu.failing_worker"])
        )
        running.wait_until_complete(setup.start_s)
        requests = served_requests(running.url)
        with run_load(running.url, requests, clients=4) as load:
            _wait_for_answers(setup, load.samples)
            seen, began_s = len(running.lines), time.monotonic()
            failing.send_signal(signal.SIGUSR1)
            running.wait_for(
                lambda line: line["worker"] == "failing" and "->broken" in line.message, setup.start_s, after=seen
            )
            setup.add("rejected after s", round(time.monotonic() - began_s, 3))
            _wait_for_answers(setup, load.samples)
        setup.add("requests", len(load.samples))
        setup.add("failed", len(load.failed))
        setup.add("exit status", failing.wait(setup.start_s))
    if setup.on_gpu:
        setup.add("sum on the device afterwards", float(torch.ones(4, device=setup.device).sum()))
    if load.failed:
        raise RuntimeError(f"{len(load.failed)} requests failed")
    if setup.found["exit status"] != EXIT_DEVICE_FAILED:
        raise RuntimeError(f"the worker ended with {setup.found['exit status']}; expected {EXIT_DEVICE_FAILED}")
    if not setup.on_gpu:
        raise NeedsGpuError("the worker computed on the CPU and pretended to lose it")


@contextmanager
def _worker(setup: Setup, running: LocalService, name: str, program: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker of this service on the device during the block."""
    arguments = "worker", "--leader", running.join_address, "--name", name, "--device", setup.device, "--threads", "1"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MULTIWORLD_")}
    process = subprocess.Popen([*program, *arguments], env=environment | {"MULTIWORLD_TOKEN": _TOKEN})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(setup.start_s)
        finally:
            process.kill()
