"""Python client of multiworld-serving: images in, typed predictions out, with retries within one deadline.

    with Client("http://127.0.0.1:8000") as client:
        print(client.predict("photo.jpg").label)

Imports nothing of the rest of the project and needs only httpx. numpy arrays, torch tensors and Pillow images are accepted if the caller
has imported these libraries. Start reading at `clients.py`; `codec.py` builds requests and parses answers, `retries.py` decides
about retries.
"""

from multiworld_client.clients import AsyncClient, Client
from multiworld_client.errors import (
    AccessDeniedError,
    ClientError,
    DeadlineError,
    InputError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    RefusedError,
    ServerFailedError,
    UnavailableError,
    UnreachableError,
)
from multiworld_client.results import Label, Prediction
from multiworld_client.retries import Retries

__all__ = [
    "AccessDeniedError",
    "AsyncClient",
    "Client",
    "ClientError",
    "DeadlineError",
    "InputError",
    "InvalidRequestError",
    "Label",
    "OverloadedError",
    "Prediction",
    "ProtocolError",
    "RefusedError",
    "Retries",
    "ServerFailedError",
    "UnavailableError",
    "UnreachableError",
]
