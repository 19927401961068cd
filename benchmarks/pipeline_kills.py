"""Pipelines in Python under load while workers of random stages are killed: no request fails, and every response is that of one process.

python -m benchmarks.pipeline_kills examples/iris/pipeline.py:pipeline BODY --seconds 120 --kill-every-s 3
"""

import argparse
import os
import random
import signal
import time
from pathlib import Path

import httpx

from multiworld_serving.models.stages.api import Request
from multiworld_serving.models.stages.local import LocalPipeline
from multiworld_serving.models.stages.pipeline import PipelineSource
from multiworld_serving.models.stages.responses import response_of
from multiworld_serving.testing.load.clients import run_load
from multiworld_serving.testing.load.requests import ReferenceRequest, answer_values, body_file
from multiworld_serving.testing.local_service import LocalService


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("body", type=Path)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--kill-every-s", type=float, default=3)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    source = PipelineSource.parse(given.source)
    assert source is not None, "expected FILE.py:LIST"
    body, content_type = body_file(given.body)
    response = response_of(LocalPipeline(source.load()).result(Request(body, content_type)))
    answer = httpx.Response(200, headers={"content-type": response.content_type}, content=response.body)
    request = ReferenceRequest(body, content_type, answer_values(answer))
    kills, random_ = 0, random.Random(0)
    with LocalService(model=source.absolute, recovery_grace_s=60) as service:
        began_s = time.monotonic()
        with run_load(service.url, [request], clients=given.clients) as load:
            while time.monotonic() < began_s + given.seconds:
                time.sleep(given.kill_every_s)
                os.kill(random_.choice(list(service.worker_pids().values())), signal.SIGKILL)
                kills += 1
    slowest_s = max(each.took_s for each in load.samples)
    print(
        f"{source.name}: {len(load.samples)} requests, {kills} kills, {len(load.failed)} failed or different "
        f"{[each.error for each in load.failed[:3]]}; slowest {slowest_s:.2f} s"
    )


if __name__ == "__main__":
    main()
