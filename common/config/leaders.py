"""The leaders of a worker or frontend: a list of addresses, or a file of addresses that may change while the process runs."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import field_validator, model_validator

from multiworld_serving.common.config.addresses import Address, parse_addresses
from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.common.config.settings import Settings, setting


class LeadersSettings(Settings):
    """Which leaders a process joins."""

    exclusive: ClassVar[tuple[tuple[str, str], ...]] = (*Settings.exclusive, ("leader", "leaders_file"))

    leader: str | None = setting(None, "Network", allowed="HOST:PORT, such as node1:8001,node2:8001, each once")
    """HOST:PORT of a leader's join port; repeat the option, or separate with commas, for several leaders. Required without
    --leaders-file."""
    leaders_file: Path | None = setting(None, "Network")
    """Instead of --leader: file with one HOST:PORT per line. It is read again before each attempt to join, so that a leader may move to
    another address; the number of lines must not change."""

    @property
    def leaders(self) -> tuple[Address, ...]:
        """Join addresses of the leaders, as the file says now if there is one. Raises SettingsError if it cannot be read."""
        if self.leaders_file is None:
            assert self.leader is not None, "checked by the constructor"
            return parse_addresses(self.leader)
        try:
            return parse_addresses(",".join(self.leaders_file.read_text(encoding="utf-8").split()))
        except OSError as error:
            raise SettingsError(f"cannot read the leaders file {self.leaders_file}: {error.strerror}") from error
        except ValueError as error:
            raise SettingsError(f"{self.leaders_file}: each line must be HOST:PORT of another leader") from error

    def leader_at(self, index: int, last: Address) -> Address:
        """Where leader `index` listens now. Without a file, or while it cannot be read, this is `last`."""
        if self.leaders_file is None:
            return last
        try:
            return self.leaders[index]
        except (SettingsError, IndexError):
            return last

    @field_validator("leader")
    @classmethod
    def _leaders_have_host_and_port(cls, leader: str | None) -> str | None:
        if leader is not None:
            parse_addresses(leader)
        return leader

    @model_validator(mode="after")
    def _leaders_are_given(self) -> Self:
        if self.leader is None and self.leaders_file is None:
            raise ValueError("--leader is missing: give HOST:PORT of a leader's join port, or --leaders-file")
        return self
