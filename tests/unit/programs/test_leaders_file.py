"""Leaders whose addresses are in a file, which changes while the process runs."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.workers.settings import WorkerSettings

OLD, NEW = Address("10.0.0.1", 8001), Address("10.0.0.2", 8001)


def settings(file: Path) -> WorkerSettings:
    return WorkerSettings(leaders_file=file, token=SecretStr("of-this-test"))


def test_leader_is_looked_up_again_when_the_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "leaders"
    file.write_text(f"{OLD}\n10.0.0.9:8001\n")
    worker = settings(file)
    assert worker.leaders == (OLD, ("10.0.0.9", 8001))
    file.write_text(f"{NEW}\n10.0.0.9:8001\n")
    assert worker.leader_at(0, OLD) == NEW


@pytest.mark.parametrize("content", ["", "10.0.0.2", "\n", "10.0.0.2:8001\n10.0.0.2:8001", None])
def test_leader_stays_where_it_was_when_the_file_is_unusable(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "leaders"
    if content is not None:
        file.write_text(content)
    assert settings(file).leader_at(0, OLD) == OLD
    with pytest.raises(SettingsError, match=r"leaders"):
        settings(file).leaders  # noqa: B018
