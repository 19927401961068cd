"""A service without local workers, and one external worker with a metrics port, as in a container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from multiworld_serving.testing.local_service import LocalService


@dataclass(frozen=True)
class MeteredWorker:
    """Attributes:
    metrics_url: its metrics address; empty if it could not listen.
    complaint: the error that it logged before it continued; empty if there was none.
    """

    metrics_url: str
    complaint: str


@contextmanager
def metered_service(folder: Path, metrics_port: int = 0) -> Iterator[tuple[LocalService, MeteredWorker]]:
    """A ready service with one stage on one such worker, while the block lasts."""
    token = folder / "token"
    token.write_text("a-secret-of-these-tests")
    with (
        LocalService(
            model="resnet18",
            weights="random:0",
            image_size=32,
            stages=1,
            replicas=1,
            external_workers=True,
            token_file=token,
            wait_until_ready=False,
        ) as service,
        _worker(service.join_address, token, metrics_port) as worker,
    ):
        service.wait_until_complete(60.0)
        yield service, worker


@contextmanager
def _worker(leader: str, token: Path, metrics_port: int) -> Iterator[MeteredWorker]:
    options = {"leader": leader, "token-file": token, "metrics-port": metrics_port, "threads": 1, "log-format": "json"}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "multiworld_serving.cli.main", "worker", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MULTIWORLD_")},
    )
    assert process.stderr is not None
    url = complaint = ""
    drain = threading.Thread(target=process.stderr.read)
    try:
        for text in process.stderr:
            line = json.loads(text)
            if line["level"] == "error":
                complaint = line["message"]
            url = line.get("metrics", "") if line["message"].startswith("listening ") else ""
            if url or complaint:
                break
        drain.start()
        yield MeteredWorker(url, complaint)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            if drain.ident is not None:
                drain.join()
            process.stderr.close()
