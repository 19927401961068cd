"""Base class of the programs' settings: one frozen object, each field declared once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from multiworld_serving.common.config.errors import SettingsError
from multiworld_serving.common.config.tokens import read_token, read_tokens

ENV_PREFIX = "MULTIWORLD_"
DEVICE_PATTERN = r"^(cpu|cuda(:\d+)?)$"


def setting(
    default: Any,
    panel: str,
    description: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    pattern: str | None = None,
    allowed: str | None = None,
    default_factory: Callable[[], Any] | Callable[[dict[str, Any]], Any] | None = None,
    in_argv: bool = True,
    hidden: bool = False,
    repeatable: bool = False,
) -> Any:
    """Declare one setting.

    Args:
        default: `...` if the setting is required; ignored if there is a `default_factory`.
        panel: heading under which `--help` lists it.
        default_factory: returns the default; its argument, if it has one, is the settings that are declared before this one.
        description: one sentence for `--help` and the documentation.
        allowed: description of allowed values; derived from the type and the bounds by default.
        in_argv: False for a secret, which must not appear in a process list: there is no command line option.
        hidden: True for an option that `--help` omits, because only the project's own programs use it.
        repeatable: True for an option that may be repeated; the value is all of them, joined with commas.
    """
    extra: JsonDict = {
        "panel": panel,
        "allowed": allowed,
        "in_argv": in_argv,
        "hidden": hidden,
        "repeatable": repeatable,
    }
    bounds = {"ge": ge, "gt": gt, "le": le, "pattern": pattern}
    given: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    given |= {"default_factory": default_factory} if default_factory else {"default": default}
    return Field(description=description, json_schema_extra=extra, **given)


class Settings(BaseSettings):
    """Settings that leader and workers share. The constructor reads only its arguments; `config.load` reads the sources."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, allow_inf_nan=False
    )

    section: ClassVar[str] = ""
    """Name of the program and of its table in a TOML file."""
    mutually_exclusive: ClassVar[tuple[frozenset[str], ...]] = (frozenset({"token", "token_file"}),)
    """Groups of settings of which at most one may be given; the source with the highest precedence wins."""

    heartbeat_interval_s: float = setting(
        0.2, "Failure", "Pause between heartbeats on an otherwise idle link.", gt=0, le=60
    )
    heartbeat_timeout_s: float = setting(
        1.0, "Failure", "Time without heartbeats after which the peer counts as failed.", gt=0, le=600
    )
    loop_stall_timeout_s: float = setting(
        10.0,
        "Failure",
        "Time for which the peer's event loop may be blocked while its heartbeats continue; 0 disables the check.",
        ge=0,
        le=3600,
    )
    join_timeout_s: float = setting(
        60.0, "Failure", "Longest time for joining, from the request to the join self-test.", gt=0, le=3600
    )
    token: SecretStr | None = setting(
        None, "Access", "Secret that workers need to join.", allowed="at least one character", in_argv=False
    )
    token_file: Path | None = setting(
        None,
        "Access",
        "File with the join token on its first line; a leader accepts the token of any line and rereads the file at SIGHUP.",
    )
    otlp_endpoint: str | None = setting(
        None,
        "Logging",
        "OTLP/HTTP URL that OpenTelemetry traces are sent to; by default there is no tracing.",
        pattern=r"^https?://[^\s]+$",
        allowed="a URL with its path, such as http://127.0.0.1:4318/v1/traces",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Logging", "Minimum level to log.")
    log_format: Literal["text", "json"] = setting("text", "Logging", "Text, or one JSON object per line.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @field_validator("token")
    @classmethod
    def _token_is_not_blank(cls, token: SecretStr | None) -> SecretStr | None:
        if token is None:
            return None
        stripped = token.get_secret_value().strip()
        if not stripped:
            raise ValueError("must be at least one character")
        return SecretStr(stripped)

    @model_validator(mode="after")
    def _timeout_outlasts_interval(self) -> Self:
        if self.heartbeat_timeout_s <= self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeat_timeout_s ({self.heartbeat_timeout_s:g}) must be longer than heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g}), ideally five times as long"
            )
        if 0 < self.loop_stall_timeout_s < 4 * self.heartbeat_interval_s:
            raise ValueError(
                f"loop_stall_timeout_s ({self.loop_stall_timeout_s:g}) must be 0, or at least four times heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g})"
            )
        return self

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
            return self.replace("token", read_token(self.token_file), f"file {self.token_file}")
        return self._without_token()

    def _without_token(self) -> Self:
        raise SettingsError("no join token: set MULTIWORLD_TOKEN or --token-file FILE to the leader's join token")

    def replace(self, name: str, value: object, origin: str) -> Self:
        """A copy with one setting changed, not validated again, that remembers where its value came from."""
        copy = self.model_copy(update={name: value})
        copy._origins = {**self._origins, name: origin}
        return copy

    def origin(self, name: str) -> str:
        """Source of this value: "default", "command line", "environment", "file PATH" or "generated"."""
        return self._origins.get(name, "default")


class EffectiveSetting(NamedTuple):
    """One setting as text. Secrets are masked."""

    name: str
    value: str
    origin: str


def effective_settings(settings: Settings) -> list[EffectiveSetting]:
    """All settings with their values as text and their sources, secrets masked, in the order of declaration."""
    return [
        EffectiveSetting(name, "-" if (value := getattr(settings, name)) is None else str(value), settings.origin(name))
        for name in fields_of(type(settings))
    ]


def describe(settings: Settings) -> str:
    """All settings in one log line, secrets masked; values that are not defaults are followed by their source."""
    return " ".join(
        f"{row.name}={row.value}" + ("" if row.origin == "default" else f" ({row.origin})")
        for row in effective_settings(settings)
    )


def fields_of(cls: type[Settings]) -> dict[str, FieldInfo]:
    """The fields of a program: its own first, then the shared ones."""
    return dict(sorted(cls.model_fields.items(), key=lambda item: item[0] in Settings.model_fields))


def declaration(field: FieldInfo) -> dict[str, Any]:
    """`panel`, `allowed`, `in_argv`, `hidden` and `repeatable` as passed to `setting`."""
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def value_type(field: FieldInfo) -> Any:
    """The type of a field's values, without None."""
    if get_origin(field.annotation) in (Union, UnionType):
        return next(part for part in get_args(field.annotation) if part is not type(None))
    return field.annotation


def allowed(field: FieldInfo) -> str:
    """Description of the allowed values: "a whole number from 1 to 64"."""
    kind = value_type(field)
    if in_words := declaration(field)["allowed"]:
        return str(in_words)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    noun = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(kind, "text")
    return " ".join([noun, *bounds(field)])


def bounds(field: FieldInfo) -> Iterator[str]:
    """Description of a number's bounds: "from 1", "to 64"."""
    limits = {
        name: getattr(item, name) for item in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(item, name)
    }
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "to" if "ge" in limits else "up to"}
    yield from (f"{words[name]} {limits[name]:,}" for name in words if name in limits)
