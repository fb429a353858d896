"""A spec on its way in, what it would run, and the answer to its submission."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import Field

from experiments.outcomes import AblationState
from experiments.records.sizing import Sizing
from service.schemas.ablations import Links
from service.schemas.public import INDEX, Public


@dataclass(frozen=True, kw_only=True)
class SpecBody:
    """A spec as somebody wrote it: bytes with their content type."""

    content: bytes
    content_type: str = "application/yaml"

    @classmethod
    def of(cls, spec: "SpecBody | Mapping[str, Any] | str | PathLike[str]") -> "SpecBody":
        """Return `spec` itself, a mapping as JSON, or the file at a path. Raises OSError, SpecError."""
        if isinstance(spec, SpecBody):
            return spec
        if isinstance(spec, Mapping):
            return cls(content=json.dumps(spec).encode(), content_type="application/json")
        from experiments.design.spec_files import content_type_of

        path = Path(spec)
        return cls(content=path.read_bytes(), content_type=content_type_of(path))


class SpecText(Public):
    """A spec as its author wrote it."""

    text: str
    content_type: str


class PlanSummary(Public):
    """The size of what will run."""

    arms: list[str]
    blocks: int
    trials: int
    node_class: str
    devices: int
    mde_pct_per_sd_pct: float | None
    expected_device_minutes: float | None


class AblationAccepted(Public):
    """The answer to a submission."""

    id: str = Field(examples=["abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3"])
    name: str
    state: AblationState
    spec_digest: str
    rule_digest: str
    plan: PlanSummary
    warnings: list[str]
    """What the spec will not get as it stands, though it runs."""
    links: Links


class ArmPublic(Public):
    """One arm of a plan."""

    name: str
    role: str
    digest: str
    gates: dict[str, Any]


class BlockOrder(Public):
    """One planned block."""

    index: int = Field(description=INDEX)
    seed: int
    order: list[str]


class NodeClassAnswer(Public):
    """Whether nodes could run the plan now."""

    node_class: str
    live_nodes: int
    eligible: bool
    reason: str | None
    """Why not, when not."""


class PlanPublic(Public):
    """What a spec would run, without running it."""

    ablation: str
    spec_digest: str
    rule_digest: str
    node_class: str
    devices: int
    arms: list[ArmPublic]
    blocks: list[BlockOrder]
    trials: int
    window_steps: int
    """Timed steps of a trial."""
    mde_pct_per_sd_pct: float | None
    sizing: Sizing | None
    """What it can see at the noise that was measured; None where no node of the class was calibrated for it."""
    mended_by: str | None
    """The command that measures its noise where no node of the class was calibrated for it: until then no word beyond
    inconclusive is published. None where one was, and where the metric that decides is exact."""
    expected_device_minutes: float | None
    device_minutes_allowed: float
    """Budget of the whole ablation; blocks that wait when it is used up are cancelled."""
    warnings: list[str]
    """What the spec would not get as it stands, though it would run."""
    node_classes: list[NodeClassAnswer]
