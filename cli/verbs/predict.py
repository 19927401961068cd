"""`multiworld predict`: classify images with a running service."""

import json
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

if TYPE_CHECKING:
    import httpx

EPILOG = """
[bold]Examples[/bold]

multiworld predict photo.jpg

multiworld predict --top-k 1 --json *.jpg

[bold]Exit status[/bold]: 0 all images were classified, 1 at least one failed, 2 invalid usage.
"""

_NEXT_LABELS = 2
"""Labels beside the best one in the table of several images."""
Files = Annotated[list[Path], typer.Argument(metavar="FILE…", help="JPEG, PNG or WebP images.", show_default=False)]
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
    """Send images to a running service and show the predicted labels.

    Several images make one table, with one row each. With --json, prints one line per image: the response of the service with the
    file name added.
    """
    from multiworld_serving.cli.console import progress

    answers: dict[Path, dict[str, Any]] = {}
    with (
        open_clients(urls, timeout_s, access.credentials()) as clients,
        progress("images", len(files)) as advance,
    ):
        for file in files:
            answer = _predict_file(clients, file, top_k)
            advance()
            if answer is None:
                continue
            answers[file] = answer
            if as_json:
                print(json.dumps({"file": str(file), **answer}))
            elif len(files) == 1:
                _show(file, answer)
    if len(files) > 1 and answers and not as_json:
        _show_all(answers)
    return 1 if len(answers) < len(dict.fromkeys(files)) else 0


def _predict_file(clients: "deque[httpx.Client]", file: Path, top_k: int | None) -> dict[str, Any] | None:
    """Classify one image. Prints the error and returns None if that fails. Raises ServiceUnreachableError."""
    try:
        return _predict(clients, file, top_k)
    except ServiceUnreachableError:
        raise
    except (OSError, ServiceError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"multiworld: error: {file}: {reason}", file=sys.stderr)
        return None


def _predict(clients: "deque[httpx.Client]", file: Path, top_k: int | None) -> dict[str, Any]:
    params = {} if top_k is None else {"top_k": top_k}
    response = send_to_any(clients, "POST", "/predict", params=params, files={"image": (file.name, file.read_bytes())})
    with answer_errors(clients[0].base_url, "a multiworld service"):
        answer = response.json()
        return {**answer, "predictions": list(answer["predictions"])}


def _show(file: Path, answer: dict[str, Any]) -> None:
    from rich.text import Text

    from multiworld_serving.cli.console import console, table

    rows = table("label", "class", "probability", numbers=("class", "probability"))
    for prediction in answer["predictions"]:
        label = Text(str(prediction["label"]))
        rows.add_row(label, str(prediction["class_id"]), f"{prediction['probability']:.4f}")
    out = console()
    out.print(Text(str(file), style="bold"))
    out.print(rows)
    out.print(Text(_timings(answer), style="dim"))


def _show_all(answers: dict[Path, dict[str, Any]]) -> None:
    """Show one row per image, with its best labels."""
    from rich.text import Text

    from multiworld_serving.cli.console import console, table

    rows = table("file", "label", "class", "probability", "next labels", "ms", numbers=("class", "probability", "ms"))
    for file, answer in answers.items():
        best, *others = answer["predictions"]
        following = ", ".join(f"{other['label']} {other['probability']:.4f}" for other in others[:_NEXT_LABELS])
        total_ms = answer.get("timings_ms", {}).get("total", 0.0)
        cells = (
            str(file),
            str(best["label"]),
            str(best["class_id"]),
            f"{best['probability']:.4f}",
            following,
            f"{total_ms:.1f}",
        )
        rows.add_row(*map(Text, cells))
    console().print(rows)


def _timings(answer: dict[str, Any]) -> str:
    model = " ".join(str(answer[name]) for name in ("model", "version") if name in answer)
    times = ", ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in answer.get("timings_ms", {}).items())
    return ": ".join(part for part in (model, times) if part)
