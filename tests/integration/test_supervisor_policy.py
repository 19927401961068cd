"""The supervisor's decisions and the settings it passes to workers, without processes."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.service.model_change import ModelChange, ModelsUnchangedError, request_change
from multiworld_serving.server.supervisor import supervisor
from multiworld_serving.server.supervisor.models import Models
from multiworld_serving.server.supervisor.notify import unix_socket
from multiworld_serving.server.supervisor.programs import environment_of
from multiworld_serving.server.supervisor.supervisor import Backoff, Supervisor
from tests.waiting import until

NOTIFY = {"NOTIFY_SOCKET": "@of-the-service", "WATCHDOG_USEC": "2000000"}


def test_delay_doubles_up_to_its_limit_when_failures_continue() -> None:
    backoff = Backoff(initial_s=0.1, max_s=5)
    assert [backoff.delay_s(n, jitter=0) for n in range(2, 10)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    assert backoff.delay_s(1_000_000, jitter=0) == 5


def test_environment_has_no_settings_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIWORLD_TOKEN", "of-the-operator")
    monkeypatch.setenv("multiworld_name", "leader")
    monkeypatch.setenv("NOTIFY_SOCKET", "/of/systemd")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    monkeypatch.setenv("COLOUR", "blue")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("MULTIWORLD_RUNTIME_DIR", "/run/sockets")
    environment = environment_of(2, NOTIFY)
    assert environment.pop("MULTIWORLD_RUNTIME_DIR") == "/run/sockets", "the library reads it"
    assert not [name for name in environment if name.upper().startswith("MULTIWORLD_")]
    assert environment.items() >= {**NOTIFY, "COLOUR": "blue", "OMP_NUM_THREADS": "2"}.items()
    assert "WATCHDOG_PID" not in environment, "it would make the child believe that nobody watches it"
    assert int(environment["GOMP_SPINCOUNT"]) > 0, "threads release their core soon"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert environment_of(1, NOTIFY)["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize(
    ("steps_s", "silent_s"),
    [([1.0] * 20, 10.0), ([60.0, *[1.0] * 20], 70.0)],
    ids=["the process is frozen", "the whole machine was paused"],
)
async def test_silence_is_that_of_the_process_alone(
    steps_s: list[float], silent_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, steps = 100.0, iter(steps_s)

    async def sleep(_s: float) -> None:
        nonlocal now_s
        now_s += next(steps)

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(supervisor, "asyncio", SimpleNamespace(sleep=sleep))
    notify: Any = SimpleNamespace(silent_s=lambda pid: now_s - 100)
    watched: Any = SimpleNamespace(blocked_timeout_s=9.5, kind="worker", notify=notify)
    await Supervisor._blocked(watched, cast(Any, SimpleNamespace(index=0)), 7)
    assert now_s == 100 + silent_s


async def test_changes_of_models_wait_for_each_other_and_are_not_made_when_the_frontend_has_ended() -> None:
    made: list[str] = []
    readers: list[asyncio.StreamReader] = []

    async def command(change: ModelChange) -> None:
        made.append(change.name)
        raise UserError(f"{change.name} is unknown")

    models: Any = SimpleNamespace(turn=asyncio.Lock(), _command=command, _attempt=Models._attempt)
    listener, name = unix_socket(socket.SOCK_STREAM)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        readers.append(reader)
        await Models.answer(models, reader, writer)

    listener.listen()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.connect("\0" + name[1:])
        gone.sendall(msgspec.json.encode(ModelChange("remove", "gone")) + b"\n")
    server = await asyncio.start_unix_server(answer, sock=listener)
    await until(lambda: readers and readers[0].at_eof())

    def request(model: str) -> asyncio.Task[None]:
        return asyncio.create_task(request_change(name, ModelChange("remove", model), asyncio.Event(), 60))

    async with models.turn:
        first, ended, last = request("first"), request("ended"), request("last")
        await until(lambda: len(models.turn._waiters or ()) == 3)
        ended.cancel()
        await until(lambda: any(reader.at_eof() for reader in readers[1:]))
    for waiting, model in ((first, "first"), (last, "last")):
        with pytest.raises(ModelsUnchangedError, match=f"{model} is unknown"):
            await waiting
    assert made == ["first", "last"]
    server.close()
