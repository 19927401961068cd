"""What `multiworld serve` refuses before it imports torch or starts a process."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import subprocess, sys
from multiworld_serving.cli.main import main

def refuse_to_start(*_: object, **__: object) -> None:
    raise AssertionError("a process was started")

subprocess.Popen.__init__ = refuse_to_start
status = main(sys.argv[1:])
sys.exit("torch was imported" if "torch" in sys.modules else status)
"""


def refusal(*options: str) -> str:
    """The line that `serve` prints."""
    ports = [each for name in ("http", "join", "metrics") for each in (f"--{name}-port", "0")]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, "serve", *options, *ports], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    return line.removeprefix("multiworld: error: ")


@pytest.mark.parametrize(
    ("option", "file"),
    [
        ("--model", "nowhere/classifier.bundle"),
        ("--model", "classifier.bundle"),
        ("--weights", "nowhere.pth"),
        ("--weights-dir", "nowhere"),
    ],
)
def test_serve_prints_one_line_when_a_file_or_folder_of_the_model_is_missing(option: str, file: str) -> None:
    assert refusal(option, file).startswith(f"{option} {file}: there is no such ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--api-keys-file", "nowhere.keys"), "nowhere.keys"),
        (("--admin-keys-file", "nowhere.keys"), "nowhere.keys"),
        (("--tls-cert-file", "nowhere.pem", "--tls-key-file", "nowhere.pem"), "nowhere.pem"),
        (("--tls-cert-file", __file__, "--tls-key-file", __file__), "no certificate"),
        (("--handler", "nowhere.py:Handler"), "nowhere.py"),
    ],
)
def test_serve_prints_one_line_when_keys_certificates_or_a_handler_cannot_be_read(
    options: tuple[str, ...], says: str
) -> None:
    assert says in refusal(*options)


@pytest.mark.parametrize("options", [("--weights", "random:1"), ("--image-size", "32")])
def test_serve_refuses_options_that_do_not_apply_to_a_bundle(options: tuple[str, str], tmp_path: Path) -> None:
    assert refusal("--model", str(tmp_path), *options).startswith(options[0])
