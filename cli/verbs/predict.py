"""`multiworld predict`: classify images with a running service."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multiworld_serving.cli.service import (
    DEFAULT_URL,
    ApiKeyFile,
    AsJson,
    CaFile,
    ClientCertFile,
    ServiceError,
    ServiceUnreachableError,
    TimeoutS,
    Url,
    access,
    open_client,
    send_request,
)

if TYPE_CHECKING:
    import httpx

EPILOG = """
[bold]Examples[/bold]

multiworld predict photo.jpg

multiworld predict --top-k 1 --json *.jpg

[bold]Exit status[/bold]: 0 all images were classified, 1 at least one failed, 2 invalid usage.
"""

Files = Annotated[list[Path], typer.Argument(metavar="FILE…", help="JPEG, PNG or WebP images.", show_default=False)]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", min=1, metavar="N", help="Number of labels per image.", show_default="setting of the service"
    ),
]


def predict(
    files: Files,
    url: Url = DEFAULT_URL,
    top_k: TopK = None,
    as_json: AsJson = False,
    timeout_s: TimeoutS = 60.0,
    api_key_file: ApiKeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
) -> int:
    """Send images to a running service and show the predicted labels.

    With --json, prints one line per image: the response of the service with the file name added.
    """
    from multiworld_serving.cli.console import progress

    failed = 0
    with (
        open_client(url, timeout_s, access(api_key_file, ca_file, client_cert_file)) as client,
        progress("images", len(files)) as advance,
    ):
        for file in files:
            failed += not _predict_file(client, file, top_k, as_json=as_json)
            advance()
    return 1 if failed else 0


def _predict_file(client: "httpx.Client", file: Path, top_k: int | None, *, as_json: bool) -> bool:
    """Classify one image and print the result or the error. Returns whether it succeeded. Raises ServiceUnreachableError."""
    try:
        answer = _predict(client, file, top_k)
    except ServiceUnreachableError:
        raise
    except (OSError, ServiceError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"multiworld: error: {file}: {reason}", file=sys.stderr)
        return False
    if as_json:
        print(json.dumps({"file": str(file), **answer}))
    else:
        _show(file, answer)
    return True


def _predict(client: "httpx.Client", file: Path, top_k: int | None) -> dict[str, Any]:
    params = {} if top_k is None else {"top_k": top_k}
    response = send_request(client, "POST", "/predict", params=params, files={"image": (file.name, file.read_bytes())})
    try:
        answer = response.json()
        return {**answer, "predictions": list(answer["predictions"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ServiceError(f"{client.base_url} does not answer like a multiworld service") from error


def _show(file: Path, answer: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from multiworld_serving.cli.console import console

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("label")
    table.add_column("class", justify="right")
    table.add_column("probability", justify="right")
    for prediction in answer["predictions"]:
        label = Text(str(prediction["label"]))
        table.add_row(label, str(prediction["class_id"]), f"{prediction['probability']:.4f}")
    out = console()
    out.print(Text(str(file), style="bold"))
    out.print(table)
    out.print(Text(_timings(answer), style="dim"))


def _timings(answer: dict[str, Any]) -> str:
    model = " ".join(str(answer[name]) for name in ("model", "version") if name in answer)
    times = ", ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in answer.get("timings_ms", {}).items())
    return ": ".join(part for part in (model, times) if part)
