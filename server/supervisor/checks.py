"""The early checks of `multiworld serve`: files of keys, certificates, handlers and models, before any process is started."""

import re
import symtable
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.keys import read_keys
from multiworld_serving.common.http.tls import server_context
from multiworld_serving.common.service.model_files import available_weights, check_model_files, served_name
from multiworld_serving.common.settings.serve import MODEL_NAME, MODEL_NAME_ALLOWED, ServeSettings

Table = Mapping[str, Any]
"""A table [[models]]."""


def check_files(settings: ServeSettings) -> None:
    """Raise UserError for a file that a frontend could not use."""
    for keys in filter(None, (settings.api_keys_file, settings.admin_keys_file)):
        read_keys(keys)
    for client_ca in (settings.tls_client_ca_file, settings.metrics_client_ca_file):
        server_context(settings, client_ca)


def check_model(settings: ServeSettings) -> None:
    """Raise UserError if a file of this model is missing, or its handler is invalid."""
    check_model_files(settings)
    if settings.handler is not None:
        _check_handler(settings.handler)


def prepared(settings: ServeSettings, changes: Mapping[str, Table | None]) -> dict[str, ServeSettings]:
    """The settings of each model by its name, when its files are checked and exported. Raises UserError or ModelError.

    Args:
        changes: models that commands have added to the service that this one replaces, or removed.
    """
    groups = [each for each in settings.groups if served_name(each) not in changes]
    groups += [settings.group_of(table) for table in changes.values() if table is not None]
    return {
        name: each.model_copy(update={"weights": available_weights(each)}) for name, each in checked(groups).items()
    }


def checked(groups: Sequence[ServeSettings]) -> dict[str, ServeSettings]:
    """The settings of each model by its name, when its files are checked. Raises UserError or ModelError."""
    for each in groups:
        check_model(each)
    return by_name(groups)


def by_name(groups: Sequence[ServeSettings]) -> dict[str, ServeSettings]:
    """The settings of each model by its name. Raises UserError."""
    models: dict[str, ServeSettings] = {}
    for each in groups:
        name = served_name(each)
        if len(groups) > 1 and not re.fullmatch(MODEL_NAME, name):
            raise UserError(f"the model {name!r} needs a name of {MODEL_NAME_ALLOWED}; write NAME={each.model_source}")
        if name in models:
            raise UserError(f"two models have the name {name!r}: choose different ones with NAME=SOURCE")
        models[name] = each
    return models


def _check_handler(handler: str) -> None:
    """Raise UserError if the file cannot be read or is not Python, or does not define the class. Does not run it."""
    file, _, name = handler.rpartition(":")
    try:
        names = symtable.symtable(Path(file).read_text(encoding="utf-8"), file, "exec").get_identifiers()
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise UserError(f"--handler {handler}: cannot be read: {error}; expected FILE.py:CLASS") from error
    if name not in names:
        raise UserError(f"--handler {handler}: {file} does not define {name}; expected FILE.py:CLASS")
