"""The state file of a rendezvous server."""

import os
import threading
from pathlib import Path

import pytest

from multiworld.elastic.protocol.messages import MemberInfo, View
from multiworld.elastic.state_file import StateFile
from tests.waiting import until


def view(number: int) -> View:
    return View(number, (MemberInfo("a", "host", 1),))


def loaded(path: Path) -> dict[str, View]:
    return StateFile(path, 10.0).load()


async def test_state_file_holds_the_views_that_were_saved_last(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = StateFile(path, 10.0)
    await state.save({"one": view(1), "two": view(1), "three": view(1)})
    await state.save({"one": view(1), "two": view(2)})
    assert loaded(path) == {"one": view(1), "two": view(2)}
    assert loaded(tmp_path / "nothing here") == {}


@pytest.mark.parametrize("data", [b"no json", b"[1]", b'{"w": 1}', b'{"w": "{}"}', b"{}\n{}", b""])
def test_file_of_another_format_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="does not hold the state of a rendezvous"):
        loaded(path)


async def test_decision_is_synced_and_survives_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced, sync = tmp_path / "state", list[str](), os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(synced) > 2:
            raise OSError(28, "no space left")
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    state = StateFile(path, 10.0)
    await state.save({"one": view(1)})
    assert synced == [str(tmp_path / "state.new"), str(tmp_path)]
    with pytest.raises(OSError, match="no space left"):
        await state.save({"one": view(2)})
    assert loaded(path) == {"one": view(1)}
    monkeypatch.undo()
    await state.save({"one": view(2)})
    assert loaded(path) == {"one": view(2)}


async def test_save_times_out_when_the_disk_does_not_respond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait(60))
    path = tmp_path / "state"
    state = StateFile(path, 0.1)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="the disk did not respond"):
            await state.save({"one": view(1)})
    answers.set()
    await until(path.exists)
    state.close()
    assert loaded(path) == {"one": view(1)}


def test_state_file_is_loaded_when_its_path_is_text(tmp_path: Path) -> None:
    assert StateFile(str(tmp_path / "missing.json"), 1.0).load() == {}
