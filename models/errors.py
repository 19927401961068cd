"""Errors that the user of a model can cause.

    ValueError
    └── ModelError              base class; catch this one
        ├── WeightsError        weights cannot be found, downloaded or read. Fix the name, file or network and retry.
        ├── LabelsError         labels cannot be read, or do not match the number of classes.
        ├── PreprocessingError  image size, mean or std is out of range.
        ├── StageSpecError          a partition or stage that the model cannot have.
        ├── BundleError         a bundle is damaged, unknown or not allowed. Export it again.
        ├── CompileError        a stage cannot be compiled, or its code computes something else.
        └── ExportError         a model cannot be exported. Change the model as the message says.

Each message is one line: what was wrong, what was expected, what to do. After an error no model, stage or file has been created.
"""


class ModelError(ValueError):
    """Base class of errors about a model."""


class WeightsError(ModelError):
    """The weights cannot be found, downloaded or read."""


class LabelsError(ModelError):
    """The labels cannot be read or their number is not the model's number of classes."""


class PreprocessingError(ModelError):
    """An image size, mean or std is invalid."""


class StageSpecError(ModelError):
    """A partition or a stage spec is invalid for the model."""


class BundleError(ModelError):
    """A bundle, or a part of it, is invalid."""


class ExportError(ModelError):
    """A model cannot be exported."""


class CompileError(ModelError):
    """A stage cannot be compiled, or its code computes something else."""
