"""Command lines that are refused."""

import pytest

from multiworld_serving.cli.main import main


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that a command prints on standard error when it is refused with exit status 2. The last one is the error."""
    assert main(arguments) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("multiworld: error: ")
    return lines
