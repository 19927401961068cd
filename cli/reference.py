"""The reference of the command line, made from its declarations: `python -m cli.reference > docs/reference/commands.md`."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from cli.main import app
from cli.options import PROGRAMS

_HEAD = """# Reference: the command line

Made from the declarations by `python -m cli.reference`. `multiworld VERB --help` says the same.

| exit status | |
|---|---|
| 0 | all went well |
| 1 | something failed at run time: the service does not answer, a request failed, a worker did not come back |
| 2 | bad usage, or settings that cannot be: one line on standard error says what was wrong, what was expected and what to do |
| 130 | interrupted by Ctrl-C |

Results go to standard output, progress and errors to standard error. Colours and live displays are for terminals alone;
`NO_COLOR=1` takes the colours away there too. `--json` prints one JSON document, or one for each line where results come one by
one. Where option and environment both say something, the option wins.

**Completion** of verbs, options and values: `multiworld --install-completion` for bash, zsh, fish or PowerShell, whichever runs it.
"""
_MARKUP = re.compile(r"(?<!\\)\[/?[a-z]+\]")


def document() -> str:
    """The page."""
    group: Any = typer.main.get_command(app)
    verbs = {name: command for name, command in group.commands.items() if not command.hidden}
    return "\n".join([_HEAD, *(line for name, command in verbs.items() for line in _verb(name, command))])


def _verb(name: str, command: Any) -> Iterator[str]:
    yield from (f"## multiworld {name}", "", _plain(command.help), "")
    examples = re.findall(r"^(?:\S+=\S+ )*(?:multiworld|curl) .*$", _plain(command.epilog or ""), re.MULTILINE)
    if examples:
        yield from ("```sh", *examples, "```", "")
    if name in {cls.section for cls in PROGRAMS}:
        yield from (f"Its options are its settings: [the settings](serving.md#settings-of-{_ANCHORS[name]}).", "")
        return
    yield from ("| | default | meaning |", "|---|---|---|")
    for parameter in command.params:
        if parameter.name != "help" and not getattr(parameter, "hidden", False):
            yield _row(parameter)
    yield ""


_ANCHORS = {"serve": "the-leader", "worker": "a-worker"}


def _row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    value = "" if getattr(parameter, "is_flag", False) else parameter.metavar or ""
    names = [value] if is_argument else [f"{option} {value}".strip() for option in parameter.opts]
    names += [parameter.envvar] if isinstance(parameter.envvar, str) else []
    cells = ["<br>".join(f"`{name}`" for name in names), _default(parameter), _plain(parameter.help or "")]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", True)
    if isinstance(shown, str):
        return shown
    default = getattr(parameter.default, "value", parameter.default)
    if parameter.required:
        return "**must be given**"
    return "" if default in (None, False, "") else f"`{default}`"


def _plain(text: str) -> str:
    return _MARKUP.sub("", text).replace("\\[", "[").strip()


if __name__ == "__main__":
    print(document(), end="")
