"""Available memory, as reported by the machine and by the container."""

from pathlib import Path

import pytest

from multiworld_serving.common.config import process
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import check_memory
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.server.leader.main import _prepare
from tests.bundles import PREVIEW


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 100 kB available, without a container."""
    (tmp_path / "meminfo").write_text("MemTotal: 200 kB\nMemAvailable:     100 kB\n")
    monkeypatch.setattr(process, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(process, "_CGROUP", tmp_path)
    return tmp_path


def contain(machine: Path, limit: str, used: int, cached: int) -> None:
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text(f"{used}\n")
    (machine / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")


def test_machine_memory_is_the_limit() -> None:
    check_memory(100 * 1024)
    with pytest.raises(MemoryError, match="are available"):
        check_memory(100 * 1024 + 1)


def test_container_memory_is_the_limit_when_it_is_lower(machine: Path) -> None:
    contain(machine, "50000", used=40000, cached=5000)
    check_memory(15000)
    with pytest.raises(MemoryError):
        check_memory(15001)


def test_leader_refuses_a_model_that_does_not_fit_beside_the_others(machine: Path) -> None:
    (machine / "meminfo").write_text("MemAvailable: 1 kB\n")
    settings = LeaderSettings(model=str(PREVIEW), stages=1, replicas=3, spares=1, local_memory=True)
    with pytest.raises(UserError, match=r"does not fit into the memory: 1 stages x 3 replicas \+ 1 spares needs .* MB"):
        _prepare(settings)
    _prepare(settings.model_copy(update={"local_memory": False}))
