"""Read and replace fields of a TrainConfig by dotted path, and write it as plain JSON."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from model.config import TrainConfig

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
