"""`multiworld predict`: send files to a running service and show its answers."""

import json
import mimetypes
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multiworld_serving.cli.options import AsJson, value
from multiworld_serving.cli.service import (
    DEFAULT_URL,
    Access,
    ServiceError,
    ServiceUnreachableError,
    TimeoutS,
    Urls,
    answer_errors,
    open_clients,
    send_to_any,
)
from multiworld_serving.common.config import UserError

if TYPE_CHECKING:
    import httpx

EPILOG = """
[bold]Examples[/bold]

multiworld predict photo.jpg

multiworld predict --top-k 1 --json *.jpg

multiworld predict question.txt

multiworld predict tokens.npz

[bold]Exit status[/bold]: 0 all files were answered, 1 at least one failed, 2 invalid usage.
"""

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE…",
        help="Images, bodies for the handler of the service, or .npz files of numpy with the inputs of the model by name.",
        show_default=False,
    ),
]
TopK = Annotated[int | None, value("N", "Number of labels per image.", min=1, show_default="setting of the service")]


def predict(
    *,
    files: Files,
    urls: Urls = (DEFAULT_URL,),  # type: ignore[assignment]
    top_k: TopK = None,
    as_json: AsJson = False,
    timeout_s: TimeoutS = 60.0,
    access: Access,
) -> int:
    """Send files to a running service and show the answers: the labels of images, or what the model or its handler returns.

    With --json, prints one line per file: the response of the service with the file name added.
    """
    failed = False
    with open_clients(urls, timeout_s, access.credentials()) as clients:
        for file in files:
            try:
                answer = _infer(clients, file) if file.suffix == ".npz" else _predict(clients, file, top_k)
            except ServiceUnreachableError:
                raise
            except (OSError, ServiceError, UserError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                print(f"multiworld: error: {file}: {reason}", file=sys.stderr)
                failed = True
                continue
            print(json.dumps({"file": str(file), **answer}) if as_json else _text(file, answer), flush=True)
    return int(failed)


def _predict(clients: "deque[httpx.Client]", file: Path, top_k: int | None) -> dict[str, Any]:
    """The answer of /predict: its JSON object, or {"response": …} if it is something else."""
    headers = {"Content-Type": mimetypes.guess_type(file.name, strict=False)[0] or "application/octet-stream"}
    params = {} if top_k is None else {"top_k": top_k}
    response = send_to_any(clients, "POST", "/predict", params=params, content=file.read_bytes(), headers=headers)
    try:
        answer = response.json()
    except ValueError:
        answer = response.text
    return answer if isinstance(answer, dict) else {"response": answer}


def _infer(clients: "deque[httpx.Client]", file: Path) -> dict[str, Any]:
    """The outputs of the model for the inputs in an .npz file, as lists by name. Raises UserError if it cannot be read."""
    import numpy as np

    from multiworld_client.errors import ClientError
    from multiworld_client.tensors import infer_request, outputs

    try:
        with np.load(file) as arrays, answer_errors(clients[0].base_url):
            (model, *_) = send_to_any(clients, "POST", "/v2/repository/index").json()
            request = infer_request(arrays, model["name"], None)
            response = send_to_any(clients, "POST", request.path, content=request.content, headers=request.headers)
            return {name: array.tolist() for name, array in outputs(response).items()}
    except (ValueError, ClientError) as error:
        raise UserError(str(error)) from error


def _text(file: Path, answer: dict[str, Any]) -> str:
    """One line for each label, or for each value of another answer."""
    if "predictions" not in answer:
        return "\n".join(f"{file}: {name}: {json.dumps(each)}" for name, each in answer.items())
    lines = [f"{each['probability']:.4f}  {each['label']} (class {each['class_id']})" for each in answer["predictions"]]
    total_ms = answer.get("timings_ms", {}).get("total", 0.0)
    return "\n  ".join([f"{file}: {answer['model']} {answer['version']}, {total_ms:.1f} ms", *lines])
