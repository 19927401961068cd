"""What a person can get wrong about a model.

    ValueError
    └── ModelError              everything below; catch this one at the edge
        ├── WeightsError        weights cannot be had or read: name, file, download. Try again after mending it.
        ├── ArchitectureError   weights were read, but they are another model's. Not recoverable.
        ├── LabelsError         labels cannot be read, or do not match the number of classes.
        ├── PreprocessingError  image size, mean or std out of range.
        └── StageError          a cut or a stage that this model cannot have.

Each message is one line: what was wrong, what was expected, what to do. Nothing is left half done: an error means that
no model, stage or file was made.
"""


class ModelError(ValueError):
    """Bad input of a person about a model."""


class WeightsError(ModelError):
    """The weights cannot be found, downloaded or read."""


class ArchitectureError(ModelError):
    """The weights belong to another architecture."""


class LabelsError(ModelError):
    """The labels cannot be read or their number is not the model's number of classes."""


class PreprocessingError(ModelError):
    """An image size, mean or std that makes no sense."""


class StageError(ModelError):
    """A cut, or a description of a stage, that does not fit the model."""
