"""The programs in the library's README run unchanged and print the documented output."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "multiworld" / "README.md").read_text()
BLOCKS = list(re.finditer(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL))
TITLES = [re.findall(r"^\*\*(.*?)\.\*\*", README[: block.start()], re.MULTILINE)[-1] for block in BLOCKS]
PATIENCE_S = 300.0
DOCUMENTED_PORT = "29500"


def test_every_python_block_is_followed_by_its_output() -> None:
    assert len(BLOCKS) == README.count("```python\n") > 0


@pytest.mark.parametrize(("code", "printed"), [block.groups() for block in BLOCKS], ids=TITLES)
def test_readme_program_prints_its_documented_output(code: str, printed: str, tmp_path: Path) -> None:
    with socket.socket() as reserved:  # bound but not listening: reserves the port, and the program can reuse it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = str(reserved.getsockname()[1])
        program = tmp_path / "program.py"
        patient = code.replace("WorldManager()", "WorldManager(heartbeat_timeout_s=30)")  # for a busy machine
        program.write_text(patient.replace(DOCUMENTED_PORT, port))
        command = (sys.executable, "-W", "error", str(program))
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.stdout == printed.replace(DOCUMENTED_PORT, port), result.stderr
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
