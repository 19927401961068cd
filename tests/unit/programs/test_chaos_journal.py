"""The journal from which an interrupted chaos campaign continues."""

from pathlib import Path

import pytest

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.testing.chaos.injection import Injection
from multiworld_serving.testing.chaos.journal import Journal
from multiworld_serving.testing.load.clients import Sample

KILL = Injection("kill", ("s0.r0",), 10.0, 12.0, ("exit",), 0.1, 1.5, unexpected=("odd",))
SAMPLES = [Sample(9.0, 0.5, 200), Sample(10.5, 0.7, 0, "reset")]


def test_entries_are_read_back_and_a_line_that_is_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for count in (1, 2):
        Journal(path, 7).append(30.0 * count, KILL, SAMPLES)
    path.write_bytes(path.read_bytes() + b'{"seed":7,"elap')
    Journal(path, 7).append(90.0, KILL, [])
    found = Journal(path, 7)
    assert [(entry.elapsed_s, entry.injection, list(entry.samples)) for entry in found.entries] == [
        (30.0, KILL, SAMPLES),
        (60.0, KILL, SAMPLES),
        (90.0, KILL, []),
    ]
    assert found.elapsed_s == 90.0
    found.remove()
    assert Journal(path, 7).entries == []


def test_journal_of_another_campaign_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, 7).append(1.0, KILL, SAMPLES)
    with pytest.raises(UserError, match="another --seed"):
        Journal(path, 8)
    path.write_bytes(b"no journal\n")
    with pytest.raises(UserError, match="is not the journal"):
        Journal(path, 7)
