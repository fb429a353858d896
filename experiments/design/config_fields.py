"""Read and replace fields of a TrainConfig by dotted path, write it as plain JSON and read it back."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from model.config import TrainConfig
from model.errors import ConfigError

Config = TypeVar("Config")
_CONFIG = TypeAdapter(TrainConfig)


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


def read_config(config: Mapping[str, Any], *, may_be_older: bool = False) -> TrainConfig:
    """Build the typed configuration from its JSON.

    With `may_be_older` a field that the JSON lacks is one that came after it: its default is what happened then.

    Raises:
        ConfigError: a value is illegal, or the JSON has other fields than TrainConfig.

    """
    try:
        typed = _CONFIG.validate_python(dict(config))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(str(part) for part in first["loc"]) or "config", first["msg"]) from error
    strange = sorted(_difference(_CONFIG.dump_python(typed, mode="json"), config, newer_too=may_be_older))
    if strange:
        raise ConfigError(strange[0], "is missing, unknown to this code, or changed its value when read")
    return typed


def _difference(one: Any, other: Any, where: str = "", *, newer_too: bool = False) -> set[str]:
    """Return the dotted paths at which two JSON values differ; with `newer_too` `one` may have fields more."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return set() if one == other else {where or "config"}
    found: set[str] = set()
    for key in {*one, *other}:
        path = f"{where}.{key}" if where else str(key)
        if key in one and key in other:
            found |= _difference(one[key], other[key], path, newer_too=newer_too)
        elif key in other or not newer_too:
            found.add(path)
    return found
