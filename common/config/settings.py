"""Base class of the programs' settings: one frozen object, each field declared once."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic.fields import FieldInfo

from multiworld_serving.common.config.addresses import parse_address
from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.common.config.tokens import read_token, read_tokens

ENV_PREFIX = "MULTIWORLD_"
DEVICE_PATTERN = r"^(cpu|cuda(:\d+)?)$"
INTERNAL = "internal"
"""Panel of the settings that only the supervisor gives to the processes that it starts."""
LOOP_STALL_TIMEOUT_S = 10.0
_MAX_HEARTBEAT_INTERVAL_S = 0.2
"""The interval does not grow with a long timeout: the peer may have a shorter one."""
_HEARTBEATS_PER_TIMEOUT = 5


def setting(
    default: Any = ...,
    panel: str = "Options",
    *,
    allowed: str = "",
    names: tuple[str, ...] = (),
    metavar: str = "",
    positional: bool = False,
    has_variable: bool = False,
    default_factory: Callable[[], Any] | Callable[[dict[str, Any]], Any] | None = None,
    **bounds: Any,
) -> Any:
    """Declare one setting, or one option of a verb. The docstring below the field is its description in `--help` and in the documentation.

    Args:
        default: `...` = it is required; ignored if there is a `default_factory`.
        panel: heading under which `--help` lists it, or INTERNAL.
        allowed: description of allowed values; derived from the type and the bounds by default.
        names: as on the command line; by default derived from the name of the field.
        metavar: placeholder of the value in `--help`; by default derived from the name of the field.
        positional: it is an argument and has no name on the command line.
        has_variable: an option that may also be set in the environment, as every setting may.
        default_factory: returns the default; its argument, if it has one, is the settings that are declared before this one.
        bounds: ge, gt, le and pattern, as for pydantic's Field.
    """
    facts: Any = {"panel": panel, "allowed": allowed, "names": names, "metavar": metavar, "positional": positional}
    given: dict[str, Any] = {"default_factory": default_factory} if default_factory else {"default": default}
    return Field(json_schema_extra=facts | {"has_variable": has_variable}, **given, **bounds)


def checked_by(parse: Callable[[str], object]) -> AfterValidator:
    """For an optional text, which `parse` must accept. It raises ValueError."""

    def checked(text: str | None) -> str | None:
        if text is not None:
            parse(text)
        return text

    return AfterValidator(checked)


AdvertisedAddress = Annotated[str | None, checked_by(partial(parse_address, default_port=1))]
"""HOST, or HOST:PORT."""


class Options(BaseModel):
    """The options of a verb, or the settings of a program."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Settings(Options):
    """Settings of all programs. `config.load` reads them from the command line, the environment and a file."""

    model_config = ConfigDict(validate_default=True)

    section: ClassVar[str] = ""
    """Name of the program and of its table in a TOML file."""
    exclusive: ClassVar[tuple[tuple[str, str], ...]] = (("token", "token_file"),)
    """Pairs of settings of which at most one may be given."""

    heartbeat_timeout_s: float = setting(1.0, "Failure", gt=0, le=600)
    """Time without heartbeats after which the peer counts as failed; five heartbeats are sent in this time."""
    join_timeout_s: float = setting(60.0, "Failure", gt=0, le=3600)
    """Longest time for joining, from the request to the join self-test."""
    token: SecretStr | None = setting(None, "Access", allowed="at least one character")
    """Secret that workers need to join."""
    token_file: Path | None = setting(None, "Access")
    """File with the join token on its first line; a leader accepts the token of any line and rereads the file at SIGHUP."""
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Logging")
    """Minimum level to log."""
    log_format: Literal["text", "json"] = setting("text", "Logging")
    """Text, or one JSON object per line."""

    @field_validator("token")
    @classmethod
    def _token_is_not_blank(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not (token := SecretStr(token.get_secret_value().strip())):
            raise ValueError("must be at least one character")
        return token

    @model_validator(mode="after")
    def _at_most_one_is_given(self) -> Self:
        for names in self.exclusive:
            if all(getattr(self, name) is not None for name in names):
                raise ValueError(f"{' and '.join(names)} are mutually exclusive: give one of them")
        return self

    @property
    def loop_stall_timeout_s(self) -> float:
        """Time for which the event loop of a peer may be blocked while its heartbeats continue; not below the heartbeat timeout."""
        return max(LOOP_STALL_TIMEOUT_S, self.heartbeat_timeout_s)

    @property
    def heartbeats(self) -> dict[str, Any]:
        """Arguments of `WorldManager`: the interval and the timeout of heartbeats, and how long an event loop may be blocked."""
        return {
            "heartbeat_interval_s": min(_MAX_HEARTBEAT_INTERVAL_S, self.heartbeat_timeout_s / _HEARTBEATS_PER_TIMEOUT),
            "heartbeat_timeout_s": self.heartbeat_timeout_s,
            "loop_stall_timeout_s": self.loop_stall_timeout_s,
        }

    @property
    def secret(self) -> bytes:
        """The token as bytes; empty if there is none."""
        return self.token.get_secret_value().encode() if self.token else b""

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """Configured tokens: `token`, or all tokens that `token_file` contains now. Raises SettingsError."""
        if self.token_file is None:
            return () if self.token is None else (self.token.get_secret_value().encode(),)
        return tuple(token.get_secret_value().encode() for token in read_tokens(self.token_file))

    def with_token(self) -> Self:
        """A copy whose `token` is set, read from `token_file` if needed. Raises SettingsError if there is no token."""
        if self.token is not None:
            return self
        if self.token_file is not None:
            return self.model_copy(update={"token": read_token(self.token_file)})
        return self._without_token()

    def _without_token(self) -> Self:
        raise SettingsError("no join token: set MULTIWORLD_TOKEN or --token-file FILE to the leader's join token")


def to_json(values: dict[str, Any]) -> str:
    """Settings as JSON with their secrets, for a process that this one starts, which validates them."""
    return json.dumps(
        values, default=lambda each: each.get_secret_value() if isinstance(each, SecretStr) else str(each)
    )


def public_fields(cls: type[Settings]) -> dict[str, FieldInfo]:
    """The settings that an operator may set: those of the program first, then the shared ones."""
    found = {name: field for name, field in cls.model_fields.items() if panel(field) != INTERNAL}
    return dict(sorted(found.items(), key=lambda item: item[0] in Settings.model_fields))


def extra(field: FieldInfo) -> dict[str, Any]:
    """What `setting` declares beside pydantic's own facts."""
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def panel(field: FieldInfo) -> str:
    """The heading of a setting in `--help`."""
    return str(extra(field)["panel"])


def value_type(field: FieldInfo) -> Any:
    """The type of a field's values, without None."""
    if get_origin(field.annotation) in (Union, UnionType):
        return next(part for part in get_args(field.annotation) if part is not type(None))
    return field.annotation


def allowed(field: FieldInfo) -> str:
    """Description of the allowed values: "a whole number from 1 to 64"."""
    if in_words := extra(field)["allowed"]:
        return str(in_words)
    kind = value_type(field)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    noun = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(kind, "text")
    return " ".join([noun, *bounds(field)])


def bounds(field: FieldInfo) -> Iterator[str]:
    """Description of a number's bounds: "from 1", "to 64"."""
    limits = {
        name: getattr(item, name) for item in field.metadata for name in ("ge", "gt", "le") if hasattr(item, name)
    }
    words = {"gt": "above", "ge": "from", "le": "to" if "ge" in limits else "up to"}
    yield from (f"{words[name]} {limits[name]:,}" for name in words if name in limits)
