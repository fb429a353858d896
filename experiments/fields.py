"""Read and replace fields of a TrainConfig by dotted path, and turn configurations into plain JSON and back."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

from model.config import TrainConfig
from model.errors import ConfigError

Config = TypeVar("Config")


def read_field(config: Any, path: str) -> Any:
    """Return the value at the dotted `path`, for example "model.scan.chunk_size"."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def replace_fields(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of the dataclass `config` with the value at each dotted path replaced, all at once.

    Raises ConfigError when the result is illegal; values that are only legal together may be changed together.
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


def config_to_json(config: TrainConfig) -> dict[str, Any]:
    """Return `config` as plain JSON, seed included."""
    return asdict(config)


def config_from_json(value: Mapping[str, Any]) -> TrainConfig:
    """Return the TrainConfig that `config_to_json` wrote.

    Raises ValueError (ConfigError or pydantic's ValidationError) on a missing, unknown or illegal value.
    """
    _check_keys(TrainConfig(), value, "")
    return _adapter().validate_python(value)


def _check_keys(template: Any, value: Mapping[str, Any], where: str) -> None:
    names = {part.name for part in fields(template)}
    if not isinstance(value, Mapping) or set(value) != names:
        given = sorted(value) if isinstance(value, Mapping) else value
        raise ConfigError(where or "config", f"has the keys {given}; exactly these are needed: {sorted(names)}")
    for name in names:
        if is_dataclass(getattr(template, name)):
            _check_keys(getattr(template, name), value[name], f"{where}.{name}" if where else name)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[TrainConfig]:
    return TypeAdapter(TrainConfig)
