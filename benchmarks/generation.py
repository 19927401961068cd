"""Streams of generated text while workers and leaders are killed and frozen: none is lost, doubled or different.

    python -m benchmarks.generation --seconds 600 --kill-every-s 5 --freeze-every-s 20 --leader-kills 10
    python -m benchmarks.generation --soak 2000     # clients that disconnect: memory, sessions and descriptors
    python -m benchmarks.generation --speed 5       # tokens/s beside `generate`, and the price of a second stage, five times

Serves a small random decoder in two stages of two workers, with two leaders, and compares every stream with `generate` of transformers.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch

from multiworld_serving.testing.chaos.system.processes import resources
from multiworld_serving.testing.local_service import LocalService
from tests.decoders import KINDS, SMALL, WORDS, expected_tokens, write_decoder

_FREEZE_S = 3.0


class _Streams:
    """Clients that stream the texts of random prompts, one after another."""

    def __init__(self, url: str, model: Any, tokens: int, until_s: float) -> None:
        self.url, self.model, self.tokens, self.until_s = url, model, tokens, until_s
        self.ended, self.wrong, self.pauses_s, self.errors = 0, 0, [0.0], list[str]()
        self.known: dict[tuple[int, ...], list[int]] = {}

    async def run(self, clients: int) -> None:
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
            await asyncio.gather(*(self._client(http, random.Random(number)) for number in range(clients)))

    async def _client(self, http: httpx.AsyncClient, choice: random.Random) -> None:
        while time.monotonic() < self.until_s:
            prompt = tuple(choice.randrange(1, WORDS - 2) for _ in range(choice.choice((3, 8, 20, 40))))
            found, longest_s, last_s, event = list[int](), 0.0, time.monotonic(), dict[str, Any]()
            body = {"model": "chat", "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True}
            try:
                async with http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            event = json.loads(line[6:])
                            if "error" in event:
                                self.errors.append(str(event["error"]))
                                break
                            longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
                            found += [int(word[1:]) for word in event["choices"][0]["text"].split()]
                    if response.status_code != 200:
                        self.errors.append(f"status {response.status_code}")
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
                continue
            self.pauses_s.append(longest_s)
            self.ended += 1
            if "error" in event:
                continue
            if prompt not in self.known:
                self.known[prompt] = await asyncio.to_thread(expected_tokens, self.model, list(prompt), self.tokens)
            if found != self.known[prompt]:
                self.wrong += 1
                print(f"wrong: {prompt}: {found}; expected {self.known[prompt]}")


def _signal(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process, which may have just ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


async def _faults(service: LocalService, given: argparse.Namespace, until_s: float) -> dict[str, int]:
    """Kill and freeze random processes until this time."""
    counts, began_s = {"killed": 0, "frozen": 0, "leaders": 0}, time.monotonic()
    while (now_s := time.monotonic()) < until_s:
        passed_s = now_s - began_s
        victims = list(service.worker_pids().values())
        if passed_s / given.kill_every_s > counts["killed"] + 1:
            _signal(random.choice(victims), signal.SIGKILL)
            counts["killed"] += 1
        elif passed_s / given.freeze_every_s > counts["frozen"] + 1:
            pid = random.choice(victims)
            _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(_FREEZE_S)
            _signal(pid, signal.SIGCONT)
            counts["frozen"] += 1
        elif passed_s / (given.seconds / (given.leader_kills + 1)) > counts["leaders"] + 1:
            _signal(service.child_pids("leader")[counts["leaders"] % 2], signal.SIGKILL)
            counts["leaders"] += 1
        await asyncio.sleep(0.1)
    return counts


async def _main(given: argparse.Namespace, folder: Path) -> None:
    model = write_decoder(folder)
    settings: dict[str, Any] = {"model": f"chat=generate:{folder}", "stages": 2, "replicas": 2, "leaders": 2}
    settings |= {"timeout_s": 100, "recovery_grace_s": 60}

    with LocalService(**settings) as service:
        until_s = time.monotonic() + given.seconds
        streams = _Streams(service.url, model, given.tokens, until_s)
        _, counts = await asyncio.gather(streams.run(given.clients), _faults(service, given, until_s))
        replays = service.metric("multiworld_session_replays_total")
    pauses = streams.pauses_s
    print(
        f"{counts}: {streams.ended} streams ended, {streams.wrong} wrong, {len(streams.errors)} failed {streams.errors[:3]}; "
        f"{replays:.0f} replays; longest pause of a stream: median {statistics.median(pauses):.3f} s, "
        f"99 % {sorted(pauses)[int(0.99 * (len(pauses) - 1))]:.3f} s, most {max(pauses):.3f} s"
    )


async def _soak(given: argparse.Namespace, folder: Path) -> None:
    """Streams that disconnect at random or end. Each tenth of them has a line of output."""
    write_decoder(folder)
    settings: dict[str, Any] = {
        "model": f"chat=generate:{folder}",
        "stages": 2,
        "replicas": 2,
        "leaders": 2,
        "frontends": 1,
    }
    choice, statuses = random.Random(0), Counter[int]()

    async def client(http: httpx.AsyncClient, count: int) -> None:
        for _ in range(count):
            prompt, last = [choice.randrange(1, WORDS - 2) for _ in range(choice.randint(1, 40))], choice.randint(0, 80)
            body = {"model": "chat", "prompt": prompt, "max_tokens": given.tokens, "temperature": 1, "stream": True}
            async with http.stream("POST", f"{service.url}/v1/completions", json=body) as response:
                statuses[response.status_code] += 1
                async for _ in response.aiter_lines():
                    if (last := last - 1) < 0:
                        break

    # Room for twice the clients: sessions that are not freed lead to responses with 429.
    with LocalService(**settings, session_tokens=2 * given.clients * (given.tokens + 40)) as service:
        for turn in range(11):
            await asyncio.sleep(2)
            kinds = {kind: service.child_pids(kind).values() for kind in ("frontend", "leader")} | {
                "worker": service.worker_pids().values()
            }
            used = {kind: [resources(pid) for pid in pids] for kind, pids in kinds.items()}
            sizes = ", ".join(
                f"{kind} {[round(each.resident_mib) for each in of]} MiB {[each.descriptors for each in of]} fds"
                for kind, of in used.items()
            )
            opened, kept = (service.metric(f"multiworld_generate_{name}") for name in ("open", "reserved_tokens"))
            print(f"{sum(statuses.values())} streams: {sizes}, {opened:.0f} open, {kept:.0f} tokens", flush=True)
            if turn < 10:
                async with httpx.AsyncClient(timeout=300) as http:
                    await asyncio.gather(
                        *(client(http, given.soak // 10 // given.clients) for _ in range(given.clients))
                    )
        print(f"statuses: {dict(statuses)}, replays: {service.metric('multiworld_session_replays_total'):.0f}")


async def _speed(given: argparse.Namespace, folder: Path) -> None:
    """Tokens/s of eight sequences beside `generate` with the same number of threads, and the time between tokens of one or two stages."""
    KINDS["llama"] = SMALL | {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    torch.set_num_threads(1)
    model, choice = write_decoder(folder), random.Random(0)
    prompts = [[choice.randrange(1, WORDS - 2) for _ in range(20)] for _ in range(given.clients)]
    settings: dict[str, Any] = {
        "model": f"chat=generate:{folder}",
        "replicas": 1,
        "leaders": 1,
        "frontends": 1,
        "threads": 1,
    }

    async def times_s(http: httpx.AsyncClient, service: LocalService, prompt: list[int]) -> list[float]:
        body = {"model": "chat", "prompt": prompt, "max_tokens": given.tokens, "temperature": 0, "stream": True}
        async with http.stream("POST", f"{service.url}/v1/completions", json=body) as response:
            return [time.monotonic() async for line in response.aiter_lines() if line.startswith("data: {")]

    with LocalService(**settings, stages=1) as one, LocalService(**settings, stages=2) as two:
        async with httpx.AsyncClient(timeout=300) as http:
            for _ in range(given.speed + 1):  # the first one warms up
                began_s = time.monotonic()
                found = model.generate(
                    torch.tensor(prompts), max_new_tokens=given.tokens, do_sample=False, pad_token_id=0
                )
                own = (found[:, 20:] != 0).sum().item() / (time.monotonic() - began_s)
                began_s = time.monotonic()
                all_s = await asyncio.gather(*(times_s(http, one, prompt) for prompt in prompts))
                served = sum(len(each) - 1 for each in all_s) / (time.monotonic() - began_s)
                alone = [await times_s(http, service, prompts[0]) for service in (one, two)]
                gaps = [statistics.median(after - before for before, after in pairwise(each)) for each in alone]
                print(
                    f"{served:.0f} tokens/s, `generate` {own:.0f}, ratio {served / own:.2f}; between tokens {gaps[0] * 1e3:.2f} ms, with "
                    f"two stages {gaps[1] * 1e3:.2f} ms, {(gaps[1] - gaps[0]) * 1e3:+.2f}; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--kill-every-s", type=float, default=5)
    parser.add_argument("--freeze-every-s", type=float, default=20)
    parser.add_argument("--leader-kills", type=int, default=1)
    parser.add_argument("--soak", type=int, metavar="STREAMS")
    parser.add_argument("--speed", type=int, metavar="TURNS")
    given = parser.parse_args()
    mode = _soak if given.soak else _speed if given.speed else _main
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(mode(given, Path(folder)))


if __name__ == "__main__":
    main()
