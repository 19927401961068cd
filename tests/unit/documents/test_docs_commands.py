"""Every `multiworld` command in the documentation is valid: verb and options, in command lines also the values."""

import re
import shlex
from pathlib import Path

import pytest

from multiworld_serving.cli.main import VERBS
from multiworld_serving.cli.options import options_class, parser_of
from multiworld_serving.common.config.settings import Settings
from multiworld_serving.common.config.sources import load
from tests.documents import documents

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted([*documents(), *ROOT.glob("deploy/systemd/*.service")])
INDENTED = re.compile(r"^(?:ExecStart=| {4,})(?:\S*/|kubectl .* -- )?multiworld (?P<arguments>.*)$", re.MULTILINE)
COMMANDS = {
    f"{document.name}: {found['arguments']}": re.split(r"\s(?:2?>|[|&#])", found["arguments"])[0]
    for document in DOCUMENTS
    for found in INDENTED.finditer(document.read_text(encoding="utf-8"))
}
"""Arguments up to the operators of the shell, by page and line."""


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_is_valid(command: str) -> None:
    verb, *arguments = shlex.split(COMMANDS[command].replace("%i", "0").replace("%l", "host"))
    options = parser_of(verb, VERBS[verb]).parse(arguments)
    program = options_class(VERBS[verb])
    if issubclass(program, Settings):
        for name in ("config", "print_settings"):
            options.pop(name, None)
        if verb in ("frontend", "worker"):
            options.setdefault("leader", "leader.example:8001")  # from the settings file
        load(program, options)
