"""The leaders of a worker or frontend: a list of addresses, or a file of addresses that may change while the process runs."""

import logging
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import PrivateAttr, model_validator

from multiworld_serving.common.config.addresses import Address, parse_addresses
from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.common.config.settings import Settings, checked_by, setting

logger = logging.getLogger(__name__)


class LeadersSettings(Settings):
    """Which leaders a process joins."""

    exclusive: ClassVar[tuple[tuple[str, str], ...]] = (*Settings.exclusive, ("leader", "leaders_file"))

    leader: Annotated[str | None, checked_by(parse_addresses)] = setting(
        None, "Network", allowed="HOST:PORT, such as node1:8001,node2:8001, each once"
    )
    """HOST:PORT of a leader's join port; repeat the option, or separate with commas, for several leaders. Required without
    --leaders-file."""
    leaders_file: Path | None = setting(None, "Network")
    """Instead of --leader: file with one HOST:PORT per line. It is read again before each attempt to join, so that a leader may move to
    another address; the number of lines must not change."""

    _known: tuple[Address, ...] = PrivateAttr(())
    """What the file last said."""
    _problem: str = PrivateAttr("")
    """Why the file cannot be used now; empty if it can."""

    @property
    def leaders(self) -> tuple[Address, ...]:
        """Join addresses of the leaders. While the file is missing or invalid, as it last said; the log says when that begins and ends.

        Raises SettingsError if the file has never been valid.
        """
        try:
            found, problem = self._read(), ""
        except SettingsError as error:
            if not self._known:
                raise
            found, problem = self._known, f"{error}; the leaders stay as they were"
        if problem != self._problem:
            logger.warning("%s", problem or f"{self.leaders_file} is valid again")
        self._known, self._problem = found, problem
        return found

    def _read(self) -> tuple[Address, ...]:
        """The leaders as the settings and the file say now. Raises SettingsError."""
        file = self.leaders_file
        if file is None:
            assert self.leader is not None, "checked by the constructor"
            return parse_addresses(self.leader)
        try:
            found = parse_addresses(",".join(file.read_text(encoding="utf-8").split()))
        except OSError as error:
            raise SettingsError(f"cannot read the leaders file {file}: {error.strerror}") from error
        except ValueError as error:
            raise SettingsError(f"{file}: each line must be HOST:PORT of another leader") from error
        if self._known and len(found) != len(self._known):
            raise SettingsError(f"{file} has {len(found)} leaders; expected {len(self._known)}, as at the start")
        return found

    @model_validator(mode="after")
    def _leaders_are_given(self) -> Self:
        if self.leader is None and self.leaders_file is None:
            raise ValueError("--leader is missing: give HOST:PORT of a leader's join port, or --leaders-file")
        return self
