"""Every `multiworld` command in the documents is one that the program takes: its verb, its options and their values."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from cli.main import app
from config import Settings, SettingsError, load
from server.settings import ServeSettings
from workers.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/systemd/*.service")])
INDENTED = re.compile(r"^(?:ExecStart=| {4,})(?:\S*/|kubectl .* -- )?multiworld (?P<arguments>.*)$", re.MULTILINE)
PROGRAMS: dict[str, type[Settings]] = {"serve": ServeSettings, "worker": WorkerSettings}


class Command(NamedTuple):
    document: Path
    arguments: str

    def __str__(self) -> str:
        return f"{self.document.name}: {self.arguments}"


def commands() -> Iterator[Command]:
    for document in DOCUMENTS:
        for found in INDENTED.finditer(document.read_text(encoding="utf-8")):
            arguments = re.split(r"\s(?:2?>|[|&#])", found["arguments"])[0]  # what follows is the shell's
            yield Command(document, arguments.strip())


COMMANDS = list(commands())


def test_commands_are_found_in_the_documents() -> None:
    assert {"operations.md", "several-machines.md", "kubernetes.md", "README.md"} <= {x.document.name for x in COMMANDS}
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_command_in_a_document_is_one_that_the_program_takes(command: Command) -> None:
    verb, *arguments = shlex.split(command.arguments.replace("%i", "0").replace("%l", "host"))
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    given = group.commands[verb].make_context(verb, arguments).params
    if verb in PROGRAMS:
        options = {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
        options.pop("config", None)
        if verb == "worker" and not options.get("leader"):
            options["leader"] = "leader.example:8001"  # from the settings' file
        load(PROGRAMS[verb], options)


def test_option_that_does_not_exist_would_be_found() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    with pytest.raises(typer.TyperException, match="--replica-count"):
        group.commands["serve"].make_context("serve", ["--replica-count", "2"])
    with pytest.raises(SettingsError):
        load(ServeSettings, {"stages": "none"})
