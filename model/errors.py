"""Errors of the model layer."""


class ModelError(Exception):
    """The model or its training failed."""


class ConfigError(ModelError, ValueError):
    """A configuration value is illegal.

    `field` is the dotted path inside TrainConfig, such as "model.mamba.headdim". The validation of a spec uses it to
    point at the user's line.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class DataError(ModelError):
    """No dataset can be made from the corpus."""


class DatasetDamaged(ModelError):
    """A prepared dataset is missing or damaged; the next preparation builds it again."""


class NonFiniteLoss(ModelError):
    """The loss became NaN or infinite."""


class MeasurementError(ModelError):
    """A required number of a receipt cannot be measured on this machine."""


class StillCompiling(ModelError):
    """The warm-up did not end, because every pass compiled something."""
