"""Errors of the model layer."""


class ModelError(Exception):
    """The model or its training could not go on."""


class ConfigError(ModelError, ValueError):
    """A configuration value is illegal.

    `field` is the dotted path inside TrainConfig (for example "model.mamba.headdim"), so that a spec's validation
    can point at the line the user wrote.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class DataError(ModelError):
    """The corpus cannot be built or read."""


class NonFiniteLoss(ModelError):
    """The loss became NaN or infinite."""


class MeasurementError(ModelError):
    """A number that a receipt must carry cannot be measured on this machine."""


class StillCompiling(ModelError):
    """The warm-up did not come to an end, because every pass compiled something again."""
