"""Programs that do not compute start without torch, and what `multiworld serve` refuses before it imports torch or starts a process."""

import json
import subprocess
import sys

PROGRAM = """
import contextlib, io, json, subprocess, sys
import multiworld_serving.server.supervisor.service
from multiworld_serving.cli.main import main

def refuse_to_start(*_: object, **__: object) -> None:
    raise AssertionError("a process was started")

subprocess.Popen.__init__ = refuse_to_start
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for arguments in (["--help"], ["leader", "--help"], ["frontend", "--help"], ["status", "--url", "http://127.0.0.1:1"]):
        main(arguments)
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        status = main(["serve", *arguments, "--http-port", "0", "--join-port", "0", "--admin-port", "0"])
    print(json.dumps([status, "torch" in sys.modules, printed.getvalue()]))
"""
REFUSED = {
    ("--model", "nowhere/classifier.bundle"): "--model nowhere/classifier.bundle: there is no such ",
    ("--model", "unet.py:make"): "the pipeline unet.py:make cannot be read: ",
    ("--model", "classifier.bundle"): "--model classifier.bundle: there is no such ",
    ("--model", "x" * 300 + ".bundle"): "there is no such ",
    ("--weights", "nowhere.pth"): "--weights nowhere.pth: there is no such ",
    ("--weights-dir", "nowhere"): "--weights-dir nowhere: there is no such ",
    ("--model", "/tmp", "--weights", "random:1"): "error: --weights",
    ("--model", "/tmp", "--image-size", "32"): "error: --image-size",
}
"""Options, and a part of the line that is printed. A folder is a bundle."""


def test_refusal_is_one_line_before_torch_is_imported_or_a_process_is_started() -> None:
    given = json.dumps(list(REFUSED))
    ended = subprocess.run([sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, check=True)
    for says, line in zip(REFUSED.values(), ended.stdout.splitlines(), strict=True):
        status, imported_torch, printed = json.loads(line)
        assert (status, imported_torch, printed.count("\n")) == (2, False, 1), printed
        assert printed.startswith("multiworld: error: ")
        assert says in printed
