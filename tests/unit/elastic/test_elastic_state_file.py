"""The state file of a rendezvous server."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from multiworld.elastic.protocol.messages import MemberInfo, View
from multiworld.elastic.state_file import StateFile


def view(number: int) -> View:
    return View(number, (MemberInfo("a", "host", 1),), 0, number)


async def written(path: Path, **views: View) -> StateFile:
    state = StateFile(path, 10.0)
    for name, each in views.items():
        state.store(name, each)
    await state.flush()
    return state


def loaded(path: Path) -> dict[str, View]:
    return StateFile(path, 10.0).load()


async def test_state_file_holds_the_last_view_of_each_known_world(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = await written(path, one=view(1), two=view(1), three=view(1))
    state.store("two", view(2))
    state.remove("three")
    await state.flush()
    assert loaded(path) == {"one": view(1), "two": view(2)}
    assert loaded(tmp_path / "nothing here") == {}


async def test_decision_appends_only_its_own_world_when_there_are_many(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = await written(path, **{f"w{number}": view(1) for number in range(500)})
    before = path.read_bytes()
    state.store("w7", view(2))
    await state.flush()
    after = path.read_bytes()
    assert after.startswith(before)
    assert 0 < len(after) - len(before) < 300


async def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "state"
    await written(path, one=view(1))
    whole = path.read_bytes()
    for torn in (b"{", b'{"one": "{', b"\0\0\0"):
        path.write_bytes(whole + torn)
        again = StateFile(path, 10.0)
        assert again.load() == {"one": view(1)}
        again.store("two", view(3))
        await again.flush()
        assert loaded(path) == {"one": view(1), "two": view(3)}


@pytest.mark.parametrize("data", [b"no json", b"[]\n", b'{"w": 1}\n', b'{"w": "{}"}\n', b'{}\nnonsense\n{"w": null}\n'])
def test_file_of_another_format_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="does not hold the state of a rendezvous"):
        loaded(path)


async def test_file_stays_small_when_the_same_worlds_change_repeatedly(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = await written(path, w=view(1))
    longest = 0
    for number in range(2, 1200):
        state.store("w", view(number))
        await state.flush()
        longest = max(longest, path.stat().st_size)
    assert longest < 1100 * 300
    assert path.stat().st_size < longest / 2
    assert loaded(path) == {"w": view(1199)}


async def test_file_is_rewritten_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    state = await written(path, one=view(1))
    write = os.write

    def write_half(fd: int, data: bytes) -> int:
        write(fd, data[:5])
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "write", write_half)
    state.store("one", view(2))
    with pytest.raises(OSError, match="no space left"):
        await state.flush()
    monkeypatch.undo()
    assert loaded(path) == {"one": view(1)}
    state.store("two", view(1))
    await state.flush()
    assert loaded(path) == {"one": view(2), "two": view(1)}


async def test_directory_entry_is_synced_with_a_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    await written(tmp_path / "state", one=view(1))
    assert synced[-1] == str(tmp_path)


async def test_flush_times_out_when_the_disk_does_not_respond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait(60))
    path = tmp_path / "state"
    state = StateFile(path, 0.1)
    state.store("one", view(1))
    for _ in range(2):
        with pytest.raises(TimeoutError, match="the disk did not respond"):
            await state.flush()
    answers.set()
    async with asyncio.timeout(60):
        await state.close()
        while not loaded(path):  # noqa: ASYNC110 - the time that `close` waits may be over first
            await asyncio.sleep(0.01)
    await state.flush()
    assert loaded(path) == {"one": view(1)}
