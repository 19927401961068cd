"""Logging as text or as one JSON object per line. Only a program's `main` calls `configure_logging`.

Fields are written as `key=value` in the message or passed as `extra`; in JSON both become members.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal

STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?")
_PLAIN = re.compile(r'[^\s"]+')
FIELD_PATTERN = re.compile(r'(?<!\S)([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|\S+)')
NOISY_LOGGERS = ("httpx", "httpcore", "asyncio", "PIL")


def configure_logging(level: str, format: Literal["text", "json"] = "text", *, process: str = "") -> None:
    """Send all log records to standard error.

    Args:
        level: minimum level, "debug" to "error".
        format: "text" or "json".
        process: name of this process, part of every line, which tells apart workers that share a terminal.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO    worker-0 workers.link: world=… ready->broken cause=exit`, local time."""

    default_msec_format = "%s.%03d"

    def __init__(self, process: str = "") -> None:
        name = f"{process} ".replace("%", "%%") if process else ""
        super().__init__(f"%(asctime)s %(levelname)-7s {name}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  overrides logging's method
        extra = "".join(f" {name}={_as_text(value)}" for name, value in _extra(record).items())
        # Escape line breaks, so that a message cannot forge another log line.
        return (super().formatMessage(record) + extra).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """`{"time": "…Z", "level": "info", "logger": …, "message": …}` and the line's fields. Times in UTC."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        head: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **self._process,
        }
        if record.exc_info:
            head["exception"] = self.formatException(record.exc_info)
        fields = {name: _typed(value) for name, value in FIELD_PATTERN.findall(message)} | _extra(record)
        return json.dumps({**fields, **head}, default=str, ensure_ascii=False)


def _typed(value: str) -> str | int | float | bool:
    """The value of a field of a message: a number or a boolean if it looks like one and is not in quotes."""
    if _NUMBER.fullmatch(value):
        return float(value) if "." in value else int(value)
    return value == "True" if value in ("True", "False") else value.strip('"')


def _as_text(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    # Ray adds attributes with an underscore to all records.
    return {name: value for name, value in vars(record).items() if name not in STANDARD_ATTRIBUTES and name[:1] != "_"}
