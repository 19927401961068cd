"""Parts of a world: its store, its events, its settings."""

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue

import pytest
from torch.distributed import DistStoreError

from multiworld import JoinError, WorldEvent, WorldManager
from multiworld.collectives.nccl import uses_nccl
from multiworld.config import HeartbeatConfig
from multiworld.elastic import ElasticManager, ElasticRendezvous
from multiworld.events import EventStream
from multiworld.execution.store import ControlStore
from multiworld.execution.threads import WorkerThread

PATIENCE_S = 30.0
LONG = timedelta(seconds=PATIENCE_S)


# -- store -------------------------------------------------------------------------------------------------------------------


def test_key_is_published_and_read_back() -> None:
    published: list[tuple[str, bytes]] = []
    store = ControlStore(lambda key, value: published.append((key, value)))
    store.set("a", "text")
    store.set("b", b"bytes")
    assert published == [("a", b"text"), ("b", b"bytes")]
    assert store.get("a") == b"text"
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.delete_key("a")
    assert not store.delete_key("a")


def test_reader_waits_until_another_member_sets_the_key_or_the_store_is_aborted() -> None:
    store, aborted = (ControlStore(lambda _key, _value: None) for _ in range(2))
    with ThreadPoolExecutor() as threads:
        reading, waiting = threads.submit(store.get, "late"), threads.submit(aborted.wait, ["never"], 2 * LONG)
        store.receive("other", b"")
        store.receive("late", b"value")
        assert reading.result(PATIENCE_S) == b"value"
        aborted.abort(JoinError("w", "over"))
        with pytest.raises(DistStoreError, match="over"):
            waiting.result(PATIENCE_S)


# -- threads -----------------------------------------------------------------------------------------------------------------


def test_jobs_of_a_world_share_one_thread_and_run_in_order_until_it_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """The copies of tensors of a device are such jobs."""
    ran: SimpleQueue[tuple[int, int]] = SimpleQueue()
    begun, goes = threading.Event(), threading.Event()
    thread = WorkerThread("w")
    thread.run(lambda: 1 / 0)
    for number in range(20):
        thread.run(lambda number=number: ran.put((number, threading.get_ident())))  # type: ignore[misc]
    done = [ran.get(timeout=PATIENCE_S) for _ in range(20)]
    assert [number for number, _ in done] == list(range(20))
    assert {ident for _, ident in done}.isdisjoint({threading.get_ident()})
    assert len({ident for _, ident in done}) == 1
    assert "ZeroDivisionError" in caplog.text

    def wait() -> None:
        begun.set()
        goes.wait(PATIENCE_S)

    thread.run(wait)
    thread.run(lambda: ran.put((20, 0)))
    assert begun.wait(PATIENCE_S)
    assert not thread.close(0.01), "its job still runs"
    goes.set()
    assert thread.close(PATIENCE_S)
    assert ran.empty()
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(goes.set)


# -- events ------------------------------------------------------------------------------------------------------------------


async def test_subscriber_gets_every_event_after_its_subscription() -> None:
    stream = EventStream()
    first = stream.subscribe()
    stream.publish(WorldEvent("joined", "w", 1))
    second = stream.subscribe()

    def publish() -> None:
        for number in range(100):
            stream.publish(WorldEvent("closed", "w", number))

    threading.Thread(target=publish).start()
    assert (await anext(first)).kind == "joined"
    for reader in (first, second):
        assert [(await anext(reader)).generation for _ in range(100)] == list(range(100))
    stream.publish(None)
    assert [event async for event in first] == []


# -- settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval_s", "timeout_s"), [(0, 1), (-1, 1), (1, 1), (2, 1)])
def test_inconsistent_heartbeat_settings_are_refused(interval_s: float, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="heartbeat_interval_s must be over 0 and under heartbeat_timeout_s"):
        WorldManager(heartbeat_interval_s=interval_s, heartbeat_timeout_s=timeout_s)


def test_stall_timeout_shorter_than_a_few_heartbeats_is_refused() -> None:
    assert HeartbeatConfig(0.2, 1.0, 0.8).loop_stall_timeout_s == 0.8
    with pytest.raises(ValueError, match=r"at least 4 times heartbeat_interval_s \(0\.2\), got 0\.7"):
        HeartbeatConfig(0.2, 1.0, 0.7)


def test_backend_is_refused_with_the_known_ones_when_it_is_unknown() -> None:
    for known in ("gloo", " GLOO ", "tcp", "cpu:gloo", "cuda:gloo", "cpu:gloo, cuda:gloo", "multiworld"):
        assert not uses_nccl(known)
    for unknown in ("", "mpi", "cpu:nccl", "gloo,", "cuda"):
        with pytest.raises(ValueError, match="expected 'multiworld', 'nccl'"):
            uses_nccl(unknown)


@pytest.mark.parametrize("member", [WorldManager, ElasticManager, ElasticRendezvous])
def test_member_that_holds_the_gil_for_three_seconds_is_not_lost_by_default(member: Callable[..., object]) -> None:
    settings = inspect.signature(member).parameters
    timeout_s = settings["heartbeat_timeout_s"].default
    assert timeout_s > 3.0 + 2 * settings["heartbeat_interval_s"].default
