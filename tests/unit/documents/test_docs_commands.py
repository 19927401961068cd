"""Every `multiworld` command in the documentation is valid: verb and options, in command lines also the values."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from multiworld_serving.cli.main import app
from multiworld_serving.common.config.settings import Settings
from multiworld_serving.common.config.sources import load
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings, ServeSettings
from multiworld_serving.common.settings.worker import WorkerSettings
from tests.documents import documents

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted([*documents(), *ROOT.glob("deploy/systemd/*.service")])
INDENTED = re.compile(r"^(?:ExecStart=| {4,})(?:\S*/|kubectl .* -- )?multiworld (?P<arguments>.*)$", re.MULTILINE)
PROGRAMS: dict[str, type[Settings]] = {
    "serve": ServeSettings,
    "leader": LeaderSettings,
    "frontend": FrontendSettings,
    "worker": WorkerSettings,
}


COMMANDS = {
    f"{document.name}: {found['arguments']}": re.split(r"\s(?:2?>|[|&#])", found["arguments"])[0]
    for document in DOCUMENTS
    for found in INDENTED.finditer(document.read_text(encoding="utf-8"))
}
"""Arguments up to the operators of the shell, by page and line."""


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_is_valid(command: str) -> None:
    verb, *arguments = shlex.split(COMMANDS[command].replace("%i", "0").replace("%l", "host"))
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    given = group.commands[verb].make_context(verb, arguments).params
    if verb in PROGRAMS:
        options = {
            name: ",".join(value) or None if isinstance(value, list | tuple) else value for name, value in given.items()
        }
        for name in ("config", "print_settings"):
            options.pop(name, None)
        if verb in ("frontend", "worker") and not options.get("leader"):
            options["leader"] = "leader.example:8001"  # from the settings file
        load(PROGRAMS[verb], options)
