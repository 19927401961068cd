"""The settings of the models of a service: their names, which differ, and the files that they name."""

import re
from collections.abc import Sequence

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.service.model_files import (
    check_model_files,
    pipeline_source,
    served_name,
    with_description,
)
from multiworld_serving.common.service.model_versions import model_and_version
from multiworld_serving.common.settings.serve import MODEL_NAME, MODEL_NAME_ALLOWED, ServeSettings
from multiworld_serving.models.stages.pipeline import describe


def checked(groups: Sequence[ServeSettings]) -> dict[str, ServeSettings]:
    """The settings of each model by its name, when its files are checked. Raises UserError or ModelError."""
    for each in groups:
        check_model_files(each)
    return by_name(groups)


def described(settings: ServeSettings) -> ServeSettings:
    """The settings with the stages of a pipeline in Python; of another model as they are. Blocks. Raises StageSpecError."""
    pipeline = pipeline_source(settings)
    return settings if pipeline is None else with_description(settings, describe(pipeline))


def by_name(groups: Sequence[ServeSettings]) -> dict[str, ServeSettings]:
    """The settings of each model by its name. Raises UserError."""
    models: dict[str, ServeSettings] = {}
    for each in groups:
        name = served_name(each)
        if len(groups) > 1 and not re.fullmatch(MODEL_NAME, name):
            raise UserError(f"the model {name!r} needs a name of {MODEL_NAME_ALLOWED}; write NAME={each.model_source}")
        if model_and_version(name) in map(model_and_version, models):
            raise UserError(
                f"two models have the name {name!r}: choose different ones with NAME=SOURCE or NAME@VERSION=SOURCE"
            )
        models[name] = each
    return models
