"""Where the trials of an ablation run: a node class, and how many of its devices share one training step."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from experiments.design.problems import listed, shown
from experiments.design.spec_values import Percent, one_of, refuse
from experiments.documents import Frozen
from kernels.backends import NODE_CLASSES
from model.config import MESH_SIZES


def _schema(schema: dict[str, Any]) -> None:
    """Publish which numbers of devices go with which node class."""
    schema["anyOf"] = [
        {"properties": {"node_class": {"const": entry.name}, "devices": {"enum": list(entry.devices)}}}
        for entry in NODE_CLASSES.values()
    ]


class Placement(Frozen):
    """Where the trials run."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, json_schema_extra=_schema)

    node_class: Annotated[
        str,
        Field(
            description="The kind of machine.",
            json_schema_extra={"enum": [entry.name for entry in NODE_CLASSES.values() if entry.lanes]},
        ),
    ]
    devices: Annotated[
        int,
        Field(
            description="Devices that share one training step (lane xla): each takes as many of its rows.",
            json_schema_extra={"enum": list(MESH_SIZES)},
        ),
    ] = 1
    max_foreign_load: Percent = Field(
        default=25.0,
        description="Share of the cores' time that other processes may take during a trial that runs on the host, "
        "where times decide; beyond it the block runs again.",
        json_schema_extra={"default": "25%"},
    )

    @field_validator("node_class")
    @classmethod
    def _known(cls, value: str) -> str:
        return one_of(value, list(NODE_CLASSES), f"unknown node class {shown(value)}; known")

    @field_validator("devices")
    @classmethod
    def _there(cls, value: int, info: ValidationInfo) -> int:
        """Refuse a number of devices that the node class cannot give one step; an unknown class is a problem itself."""
        node_class = NODE_CLASSES.get(info.data.get("node_class", ""))
        allowed = MESH_SIZES if node_class is None else node_class.devices
        if value not in allowed:
            where = "" if node_class is None else f" on node class '{node_class}'"
            raise refuse(f"{value} devices for one trial are not available{where}; allowed: {listed(allowed)}")
        return value
