"""Logging as text or as one JSON object per line. Only a program's `main` calls `configure_logging`.

Fields are written as `key=value` in the message or passed as `extra`; in JSON both become members.

A reader that does not read must not stop a process. Lines for which a pipe or socket has no room are dropped, and the next line says how
many. No thread writes the lines, because processes that fork their children must have one thread, and no line is lost when a process ends.
"""

import contextlib
import errno
import io
import json
import logging
import os
import re
import select
import stat
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?")
_PLAIN = re.compile(r'[^\s"]+')
FIELD_PATTERN = re.compile(r'(?<!\S)([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|\S+)')
_PATIENCE_S = 0.1
_PATIENCE_EVERY_S = 10.0
NOISY_LOGGERS = ("httpx", "httpcore", "asyncio", "PIL")


def configure_logging(level: str, format: Literal["text", "json"] = "text", *, process: str = "") -> None:
    """Send all log records to standard error.

    Args:
        level: minimum level, "debug" to "error".
        format: "text" or "json".
        process: name of this process, part of every line, which tells apart workers that share a terminal.
    """
    handler = _standard_error_handler()
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # it warns at each start without Triton
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class _NonBlocking(io.RawIOBase):
    """Standard error as a pipe, socket or terminal that is written to without blocking.

    Attributes:
        dropped: the number of lines that were not written since it was last set to 0.
    """

    name = "<stderr>"

    def __init__(self) -> None:
        self.dropped = 0
        self._rest = b""
        """The end of a line whose beginning is written."""
        self._waited_s = float("-inf")
        self._poll = select.poll()
        self._poll.register(2, select.POLLOUT)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all of it, or nothing and count its lines. Never raises."""
        lines = bytes(data)
        self._rest = self._unwritten(self._rest)
        left = lines if self._rest else self._unwritten(lines)
        if len(left) == len(lines):
            self.dropped += lines.count(b"\n")
        else:
            self._rest = left
        return len(lines)

    def _unwritten(self, data: bytes) -> bytes:
        while data and (written := self._write_some(data)):
            data = data[written:]
        return data

    def _write_some(self, data: bytes) -> int:
        """Returns how many bytes were written; 0 if there is no room. A reader that is only slow gets time every ten seconds."""
        try:
            with contextlib.suppress(BlockingIOError):
                return os.pwritev(2, [data], -1, os.RWF_NOWAIT)
            now_s = time.monotonic()
            if now_s - self._waited_s > _PATIENCE_EVERY_S:
                self._waited_s = now_s
                self._poll.poll(_PATIENCE_S * 1000)
                return os.pwritev(2, [data], -1, os.RWF_NOWAIT)
        except OSError as error:
            # Terminals, and Linux before 6.4. Another process may fill the pipe between the two calls.
            if error.errno == errno.EOPNOTSUPP and self._poll.poll(0):
                with contextlib.suppress(OSError):
                    return os.write(2, data[: select.PIPE_BUF])
        return 0


class _Handler(logging.StreamHandler[io.TextIOWrapper]):
    """Writes lines to standard error, and says how many were dropped when there is room again."""

    def __init__(self, raw: _NonBlocking) -> None:
        super().__init__(io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))
        self._raw = raw

    def emit(self, record: logging.LogRecord) -> None:
        if dropped := self._raw.dropped:
            self._raw.dropped = 0
            fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
            text = f"dropped lines={dropped}: nobody has read the log of this process"
            super().emit(logging.makeLogRecord({**fields, "msg": text}))
            if self._raw.dropped:
                self._raw.dropped = dropped + 1
                return
        super().emit(record)


def _standard_error_handler() -> logging.Handler:
    """Also replaces `sys.stderr`, for tracebacks, unless it is not descriptor 2 or that is a file, which takes all lines."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.fileno() == 2 and not stat.S_ISREG(os.fstat(2).st_mode):
            handler = _Handler(_NonBlocking())
            sys.stderr = handler.stream
            return handler
    return logging.StreamHandler(sys.stderr)


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123+01:00 INFO    worker-0 workers.link: world=… ready->broken cause=exit`, local time and its zone."""

    def __init__(self, process: str = "") -> None:
        name = f"{process} ".replace("%", "%%") if process else ""
        super().__init__(f"%(asctime)s %(levelname)-7s {name}%(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  overrides logging's method
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")

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
