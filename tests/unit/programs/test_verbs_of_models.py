"""`bench` and `predict` take the model that a service serves as it is: against the real HTTP application."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multiworld_serving.cli.main import main
from tests.unit.server.frontend_app import MODEL, ColourPredictor, image_bytes, running_frontend
from tests.unit.server.http_port import http_port
from tests.unit.server.text_model import TEXT, text_predictor

SHORT = ["--duration", "1s", "--warm-up", "0s", "--clients", "2"]


async def statuses(
    predictor: Any,
    model: Any,
    *commands: list[str],
) -> list[int]:
    """The exit statuses of these command lines with the URL of a service of this model."""
    async with running_frontend(predictor, model) as frontend, http_port(app=frontend.app) as port:
        url = ["--url", f"http://127.0.0.1:{port.number}"]
        return [await asyncio.to_thread(main, [*command, *url]) for command in commands]


async def test_images_are_sent_to_a_classifier_and_tensors_if_rows_are_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    photo = tmp_path / "photo.png"
    photo.write_bytes(image_bytes("blue"))
    bench = ["bench", "--json", *SHORT]
    commands = (bench, [*bench, "--rows", "3"], [*bench, "--file", str(photo)], ["predict", str(photo)])
    assert await statuses(ColourPredictor(), MODEL, *commands) == [0, 0, 0, 0]
    out = capsys.readouterr().out
    assert '"failed": 0' in out
    assert "blue (class 2)" in out


async def test_tensors_of_the_metadata_are_sent_to_another_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    np.savez(tmp_path / "inputs.npz", ids=ids, mask=ids > 0)
    commands = (["bench", *SHORT], ["predict", "--json", str(tmp_path / "inputs.npz")])
    assert await statuses(text_predictor(), TEXT, *commands) == [0, 0]
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["sums"] == [6.0, 15.0]
