"""The base of the programs' settings: one frozen object, each field declared in one place."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from config.errors import SettingsError
from config.tokens import read_token, read_tokens

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
    lt: float | None = None,
    pattern: str | None = None,
    allowed: str | None = None,
    default_factory: Callable[[], Any] | None = None,
    in_argv: bool = True,
    hidden: bool = False,
    repeatable: bool = False,
) -> Any:
    """Declare one setting.

    Args:
        default: `...` where the setting must be given; ignored where there is a `default_factory`.
        panel: heading under which `--help` lists it.
        description: one sentence for `--help` and the documentation.
        allowed: what a value may be, in words; worked out from the type and the bounds if not given.
        in_argv: False for what must not be seen in a process list: then there is no command line option.
        hidden: True for an option that `--help` does not list, because only our own programs give it.
        repeatable: True for an option that may be given several times; the value is all of them with commas between.
    """
    extra: JsonDict = {
        "panel": panel,
        "allowed": allowed,
        "in_argv": in_argv,
        "hidden": hidden,
        "repeatable": repeatable,
    }
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt, "pattern": pattern}
    given: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    given |= {"default_factory": default_factory} if default_factory else {"default": default}
    return Field(description=description, json_schema_extra=extra, **given)


class Settings(BaseSettings):
    """What leader and workers both have. The constructor looks at nothing but its arguments: see `config.load`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, allow_inf_nan=False
    )

    section: ClassVar[str] = ""
    """Name of the program, and of its table in a TOML file."""
    rivals: ClassVar[tuple[frozenset[str], ...]] = (frozenset({"token", "token_file"}),)
    """Settings of which at most one may be given at a time; the stronger source wins."""

    heartbeat_interval_s: float = setting(
        0.2, "Failure", "Pause between two heartbeats on an otherwise silent link.", gt=0, le=60
    )
    heartbeat_timeout_s: float = setting(
        1.0, "Failure", "Silence after which the other end of a link counts as hung or cut off.", gt=0, le=600
    )
    join_timeout_s: float = setting(
        60.0, "Failure", "Longest time that joining may take, from the first word to the canary batch.", gt=0, le=3600
    )
    token: SecretStr | None = setting(
        None, "Access", "Secret that a worker must know to join.", allowed="at least one character", in_argv=False
    )
    token_file: Path | None = setting(
        None,
        "Access",
        "File that holds the join token, on its first line; a leader lets in who knows that of any line, and reads it again at SIGHUP.",
    )
    otlp_endpoint: str | None = setting(
        None,
        "Logging",
        "URL that OpenTelemetry traces are sent to, by OTLP over HTTP; none traces nothing.",
        pattern=r"^https?://[^\s]+$",
        allowed="a URL with its path, such as http://127.0.0.1:4318/v1/traces",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Logging", "Least severity to be logged.")
    log_format: Literal["text", "json"] = setting("text", "Logging", "Lines for people, or one JSON object a line.")

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
                f"({self.heartbeat_interval_s:g}), best five times as long"
            )
        return self

    @property
    def secret(self) -> bytes:
        """The token as it is proven; empty while there is none."""
        return self.token.get_secret_value().encode() if self.token else b""

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """Who knows one of these is let in: the token, or all that the token's file holds now. Raises SettingsError."""
        if self.token_file is None:
            return (self.secret,)
        return tuple(token.get_secret_value().encode() for token in read_tokens(self.token_file))

    def with_token(self) -> Self:
        """A copy whose `token` is set, from `token_file` if need be. Raises SettingsError if there is none."""
        if self.token is not None:
            return self
        if self.token_file is not None:
            return self.replace("token", read_token(self.token_file), f"file {self.token_file}")
        return self._without_token()

    def _without_token(self) -> Self:
        raise SettingsError(
            "no join token: set MULTIWORLD_TOKEN or --token-file FILE to the one that the leader was given"
        )

    def replace(self, name: str, value: object, origin: str) -> Self:
        """A copy with one setting changed, not validated again, that remembers where its value came from."""
        copy = self.model_copy(update={name: value})
        copy._origins = {**self._origins, name: origin}
        return copy

    def origin(self, name: str) -> str:
        """Where this value came from: "default", "command line", "environment", "file PATH" or "generated"."""
        return self._origins.get(name, "default")


class Row(NamedTuple):
    """One effective setting, safe to be shown: a secret's value is masked."""

    name: str
    value: str
    origin: str


def effective(settings: Settings) -> list[Row]:
    """Every setting with its value as text and where it came from, secrets masked, in the order of declaration."""
    return [
        Row(name, "-" if (value := getattr(settings, name)) is None else str(value), settings.origin(name))
        for name in fields_of(type(settings))
    ]


def describe(settings: Settings) -> str:
    """All effective settings in one log line, secrets masked; what is not a default is followed by its origin."""
    return " ".join(
        f"{row.name}={row.value}" + ("" if row.origin == "default" else f" ({row.origin})")
        for row in effective(settings)
    )


def fields_of(cls: type[Settings]) -> dict[str, FieldInfo]:
    """The fields of a program: its own first, then what all programs share."""
    return dict(sorted(cls.model_fields.items(), key=lambda item: item[0] in Settings.model_fields))


def facts(field: FieldInfo) -> dict[str, Any]:
    """`panel`, `allowed`, `in_argv`, `hidden` and `repeatable` as given to `setting`."""
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def value_type(field: FieldInfo) -> Any:
    """The type of a field's values, without the None of an optional one."""
    if get_origin(field.annotation) in (Union, UnionType):
        return next(part for part in get_args(field.annotation) if part is not type(None))
    return field.annotation


def allowed(field: FieldInfo) -> str:
    """What a value of this field may be, in words: "a whole number from 1 to 64"."""
    kind = value_type(field)
    if in_words := facts(field)["allowed"]:
        return str(in_words)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    noun = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(kind, "text")
    return " ".join([noun, *bounds(field)])


def bounds(field: FieldInfo) -> Iterator[str]:
    """The limits of a number, in words: "from 1", "to 64"."""
    limits = {
        name: getattr(item, name) for item in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(item, name)
    }
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "to" if "ge" in limits else "up to"}
    yield from (f"{words[name]} {limits[name]:,}" for name in words if name in limits)
