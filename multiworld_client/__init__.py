"""A client of a multiworld service: pictures in, typed answers out; it tries again where that makes sense, within one deadline.

    with Client("http://127.0.0.1:8000") as client:
        print(client.predict("photo.jpg").label)

Needs httpx alone. Arrays, tensors and pictures of numpy, torch and Pillow are taken where the program that gives them has them.
"""

from multiworld_client.asynchronous import AsyncClient
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
from multiworld_client.synchronous import Client

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
