"""How the versions of a model divide its requests. Frontends read the shares from a file."""

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.service.model_versions import Share, model_and_version, versions_of
from multiworld_serving.server.supervisor.programs import write_file

logger = logging.getLogger(__name__)


class Shares:
    """The shares of all models.

    Args:
        file: the file of the frontends.
        given: the share of each version in its settings. Of a model, the first version without one gets the rest, and further ones get 0.
    Raises:
        UserError: see `divide`.

    Attributes:
        now: by the names of the groups.
    """

    def __init__(self, file: str, given: Mapping[str, Share | None]) -> None:
        self.file = file
        self.now: dict[str, Share] = {}
        self.set(initial_shares(given))

    def set(self, shares: Mapping[str, Share]) -> None:
        """Have the frontends use these shares."""
        if shares != self.now:
            logger.info("shares %s", " ".join(f"{name}={share}" for name, share in shares.items()))
        self.now = dict(shares)
        write_file(self.file, json.dumps(self.now))

    @contextlib.contextmanager
    def unless_failed(self, shares: Mapping[str, Share]) -> Iterator[None]:
        """Have the frontends use these shares. They return to the former ones if the block fails."""
        former = self.now
        self.set(shares)
        try:
            yield
        except BaseException:
            self.set(former)
            raise

    @staticmethod
    def key(name: str, names: Iterable[str]) -> str:
        """The one of `names` that NAME or NAME@VERSION is; unchanged if there is none. Raises UserError for NAME with several versions."""
        model, number = model_and_version(name)
        found = {model_and_version(each)[1]: each for each in versions_of(model, names)}
        if name == model and len(found) > 1:
            listed = ", ".join(f"{model}@{each}" for each in found)
            raise UserError(f"the model {name!r} has several versions; name one of {listed}")
        return found.get(number, name) if name != model else next(iter(found.values()), name)

    def divided(self, name: str, names: Iterable[str], given: Mapping[str, Share]) -> dict[str, Share]:
        """The shares of `names` if versions of the model of `name` have the given ones. Raises UserError: see `divide`."""
        own = {each: self.now.get(each, 0.0) for each in versions_of(model_and_version(name)[0], names)}
        return {each: self.now[each] for each in names if each not in own} | (divide(own, given) if own else {})

    def parsed(self, model: str, texts: Mapping[str, str]) -> dict[str, Share]:
        """The shares of a command, given by version. Raises UserError."""
        names = {str(model_and_version(name)[1]): name for name in versions_of(model, self.now)}
        for version, text in texts.items():
            if version not in names:
                listed = ", ".join(names) or "none"
                raise UserError(f"the model {model!r} has no version {version!r}; its versions are {listed}")
            if text != "shadow" and not (text.replace(".", "", 1).isdecimal() and float(text) <= 100):
                raise UserError(
                    f"the share of version {version} is {text!r}: expected a percentage from 0 to 100, or shadow"
                )
        return {names[version]: "shadow" if text == "shadow" else float(text) for version, text in texts.items()}


def divide(shares: Mapping[str, Share], given: Mapping[str, Share]) -> dict[str, Share]:
    """The shares of the versions of one model when some are given: the others divide the rest in proportion to what they have.

    Raises:
        UserError: the shares of the versions that answer are not 100 % together.
    """
    found = {**shares, **given}
    others = {name: share for name, share in found.items() if name not in given and not isinstance(share, str)}
    total, rest = sum(others.values()), 100 - sum(share for share in given.values() if not isinstance(share, str))
    rest = round(rest, 3)  # the shares may be thirds
    if rest < 0 or (rest > 0 and not others):
        listed = ", ".join(f"{name} {share}" for name, share in found.items())
        raise UserError(f"the shares of the versions that answer must be 100 % together, got {listed}")
    return {**found, **{name: rest * share / total if total else rest / len(others) for name, share in others.items()}}


def initial_shares(given: Mapping[str, Share | None]) -> dict[str, Share]:
    """See `Shares`."""
    found: dict[str, Share] = {}
    for model in dict.fromkeys(model_and_version(name)[0] for name in given):
        names = versions_of(model, given)
        without = [name for name in names if given[name] is None]
        start = {name: 100.0 if name == without[0] else 0.0 for name in without}
        found |= divide(start, {name: share for name in names if (share := given[name]) is not None})
    return {name: found[name] for name in given}
