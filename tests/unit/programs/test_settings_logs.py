"""Log lines in text and JSON format."""

import json
import logging
import os
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.common.config.logs import JsonFormatter, TextFormatter


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("workers.link").makeRecord(
        "workers.link", logging.INFO, __file__, 1, message, args, None, extra=extra
    )


def as_json(message: str, *args: object, **extra: object) -> dict[str, Any]:
    line = JsonFormatter("worker-0").format(record(message, *args, **extra))
    assert "\n" not in line
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_text_line_has_process_logger_and_extra_fields() -> None:
    line = TextFormatter("worker-0").format(record("world=%s ready->broken", "s0r1", cause="exit"))
    assert line.endswith(" INFO    worker-0 workers.link: world=s0r1 ready->broken cause=exit")
    assert datetime.fromisoformat(line.partition(" INFO")[0]).tzinfo is not None


def test_json_line_has_the_fields_of_message_and_extra_with_their_types() -> None:
    fields = 'after_s=0.250 delta=-3 joined=True leader=127.0.0.1:8001 code="500" hash=007 version=1.2.3'
    line = as_json(f'world=s0r1 ready->broken detail="closed by peer" {fields}', attempts=2)
    assert line.pop("message").startswith("world=s0r1")
    assert (
        line.items()
        >= {
            **{"level": "info", "logger": "workers.link", "process": "worker-0", "world": "s0r1", "attempts": 2},
            **{"detail": "closed by peer", "after_s": 0.25, "delta": -3, "joined": True, "leader": "127.0.0.1:8001"},
            **{"code": "500", "hash": "007", "version": "1.2.3"},
        }.items()
    )


def test_text_cannot_forge_another_line_or_field() -> None:
    line = TextFormatter().format(record("request", target="/a status=200", key="bob"))
    assert "\n" not in TextFormatter().format(record("a\r\n2026-01-01 00:00:00 INFO forged: b"))
    assert line.endswith(': request target="/a status=200" key=bob')


def test_lines_of_the_minimum_level_go_to_standard_error() -> None:
    program = (
        "import logging, warnings\n"
        "from multiworld_serving.common.config.logs import configure_logging\n"
        "configure_logging('info', 'json', process='leader')\n"
        "logging.getLogger('a').debug('quiet')\n"
        "logging.getLogger('a').info('loud')\n"
        "logging.getLogger('httpx').info('quiet')\n"
        "warnings.warn('careful')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.stdout == ""
    assert [line["level"] for line in lines] == ["info", "warning"]
    assert lines[0]["message"] == "loud"


UNREAD = """
import logging, sys
from multiworld_serving.common.config.logs import configure_logging
configure_logging("info", {format!r}, process="leader")
for number in range(5000):
    logging.getLogger("a").info("number=%d %s", number, "x" * 100)
print("logged", flush=True)
sys.stdin.readline()
logging.getLogger("a").info("read again")
raise ValueError("the end of this program")
"""


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_reader_that_does_not_read_loses_lines_and_blocks_nobody(format: str, kind: str) -> None:
    reader, writer = os.pipe() if kind == "pipe" else (each.detach() for each in socket.socketpair())
    command = [sys.executable, "-c", UNREAD.format(format=format)]
    with (
        open(reader, encoding="utf-8") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer, text=True) as process,
    ):
        os.close(writer)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "logged\n"
        lines = [log.readline()]
        while "number=50 " not in lines[-1]:  # then there is room
            lines.append(log.readline())
        process.stdin.write("\n")
        process.stdin.flush()
        lines += log.read().splitlines()
    written = len([line for line in lines if "number=" in line])
    assert 50 < written < 5000
    said = next(at for at, line in enumerate(lines) if f"dropped lines={5000 - written}:" in line)
    assert "read again" in lines[said + 1]
    assert (format == "json") == (lines[said][0] == "{")
    assert lines[-1] == "ValueError: the end of this program"


def test_lines_of_a_file_are_complete(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", UNREAD.format(format="text")]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, check=False)
    assert (tmp_path / "log").read_text().count("number=") == 5000
