"""`multiworld predict`: send files to a running service and show its answers."""

import json
import mimetypes
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from multiworld_serving.cli.options import AsJson
from multiworld_serving.cli.service import (
    Clients,
    ServiceError,
    ServiceOptions,
    ServiceUnreachableError,
    open_clients,
    send_to_any,
)
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import setting


class PredictOptions(AsJson, ServiceOptions):
    """Options of `predict`."""

    files: tuple[Path, ...] = setting(positional=True, metavar="FILE…")
    """Images, bodies for the handler of the service, or .npz files of numpy with the inputs of the model by name."""
    top_k: int | None = setting(None, ge=1)
    """Number of labels per image; by default that of the service."""
    model: str | None = setting(None)
    """Model, if the service has several."""


def predict(options: PredictOptions) -> int:
    """Send files to a running service and show the answers: the labels of images, or what the model or its handler returns.

    With --json, prints one line per file: the response of the service with the file name added.

    Examples:
        multiworld predict photo.jpg
        multiworld predict --top-k 1 --json *.jpg
        multiworld predict question.txt
        multiworld predict tokens.npz

    Exit status: 0 all files were answered, 1 at least one failed, 2 invalid usage.
    """
    failed = False
    with open_clients(options) as clients:
        for file in options.files:
            try:
                answer = (
                    _infer(clients, file, options.model) if file.suffix == ".npz" else _predict(clients, file, options)
                )
            except ServiceUnreachableError:
                raise
            except (OSError, ServiceError, UserError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                print(f"multiworld: error: {file}: {reason}", file=sys.stderr)
                failed = True
                continue
            print(json.dumps({"file": str(file), **answer}) if options.as_json else _text(file, answer), flush=True)
    return int(failed)


def _predict(clients: Clients, file: Path, options: PredictOptions) -> dict[str, Any]:
    """The answer of /predict: its JSON object, or {"response": …} if it is something else."""
    headers = {"Content-Type": mimetypes.guess_type(file.name, strict=False)[0] or "application/octet-stream"}
    params = {} if options.top_k is None else {"top_k": options.top_k}
    path = "/predict" + ("" if options.model is None else f"/{quote(options.model)}")
    response = send_to_any(clients, "POST", path, params=params, content=file.read_bytes(), headers=headers)
    try:
        answer = response.json()
    except ValueError:
        answer = response.text
    return answer if isinstance(answer, dict) else {"response": answer}


def _infer(clients: Clients, file: Path, model: str | None) -> dict[str, Any]:
    """The outputs of the model for the inputs in an .npz file, as lists by name. Raises UserError if it cannot be read."""
    import numpy as np

    from multiworld_client.codec import MODELS, infer_request, only_model, outputs
    from multiworld_client.errors import ClientError

    try:
        with np.load(file) as arrays:
            if model is None:
                model = only_model(send_to_any(clients, "GET", MODELS.path))
            request = infer_request(arrays, model, None)
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
