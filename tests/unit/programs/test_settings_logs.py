"""Log lines in text and JSON format."""

import json
import logging
import subprocess
import sys
from typing import Any

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


def test_json_line_has_the_fields_of_message_and_extra() -> None:
    line = as_json('world=s0r1 ready->broken cause=exit detail="closed by peer"', attempts=2)
    assert line["message"].startswith("world=s0r1")
    assert (line["level"], line["logger"], line["process"]) == ("info", "workers.link", "worker-0")
    assert (line["world"], line["cause"], line["detail"], line["attempts"]) == ("s0r1", "exit", "closed by peer", 2)


def test_json_fields_of_a_message_have_types() -> None:
    line = as_json('stage=0 after_s=0.250 delta=-3 joined=True leader=127.0.0.1:8001 code="500" hash=007 version=1.2.3')
    found = {name: line[name] for name in ("stage", "after_s", "delta", "joined", "leader", "code", "hash", "version")}
    assert found == {
        **{"stage": 0, "after_s": 0.25, "delta": -3, "joined": True},
        **{"leader": "127.0.0.1:8001", "code": "500", "hash": "007", "version": "1.2.3"},
    }


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
