"""Fields of a TrainConfig by dotted path, and its JSON."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from model.config import StepsConfig, TrainConfig
from model.errors import ConfigError

Config = TypeVar("Config")
_CONFIG = TypeAdapter(TrainConfig)


def read_field(config: Any, path: str) -> Any:
    """Return the value at the dotted `path`, for example "model.scan.chunk_size"."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at the dotted `path` of a configuration as JSON; None without one."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def replace_fields(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of the dataclass `config` with new values at dotted paths.

    All values change at once. Raises ConfigError when the result is illegal.
    """
    own = {path: value for path, value in changes.items() if "." not in path}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, dot, rest = path.partition(".")
        if dot:
            nested.setdefault(head, {})[rest] = value
    for head, part in nested.items():
        own[head] = replace_fields(getattr(config, head), part)
    return replace(config, **own)  # type: ignore[type-var]  # every part of TrainConfig is a dataclass


def steps_of(config: Mapping[str, Any]) -> StepsConfig:
    """Return the steps in the JSON of a recipe's or a command's configuration, also of earlier code."""
    return StepsConfig(**config["steps"])


def read_config(config: Mapping[str, Any], *, may_be_older: bool = False) -> TrainConfig:
    """Return the typed configuration of its JSON.

    With `may_be_older` the JSON may lack fields that were added later: their defaults are the earlier behaviour.
    Raises ConfigError when a value is illegal, or when the JSON has other fields than TrainConfig.
    """
    try:
        typed = _CONFIG.validate_python(dict(config))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(str(part) for part in first["loc"]) or "config", first["msg"]) from error
    differing = sorted(differing_fields(_CONFIG.dump_python(typed, mode="json"), config, may_be_older=may_be_older))
    if differing:
        raise ConfigError(differing[0], "is missing, unknown to this code, or changed its value when read")
    return typed


def differing_fields(read: Any, config: Any, where: str = "", *, may_be_older: bool) -> set[str]:
    """Return the dotted paths at which two JSON values differ."""
    if not (isinstance(read, Mapping) and isinstance(config, Mapping)):
        return set() if read == config else {where or "config"}
    paths: set[str] = set()
    for key in {*read, *config}:
        path = f"{where}.{key}" if where else str(key)
        if key in read and key in config:
            paths |= differing_fields(read[key], config[key], path, may_be_older=may_be_older)
        elif key in config or not may_be_older:
            paths.add(path)
    return paths
