"""Wire types of specs, plans, and the answers to submissions and imports."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from ablate.experiments.ids import COMMIT_LABEL, TOKEN_NAME
from ablate.experiments.outcomes import AblationState, SeedOrigin
from ablate.experiments.records.calibration import Sizing
from ablate.experiments.records.circumstances import Registration
from ablate.service.schemas.ablations import Links
from ablate.service.schemas.public import INDEX, Public

if TYPE_CHECKING:
    from ablate.experiments.records.code_archive import PackedCode


_NO_COMMITS: Mapping[str, str] = MappingProxyType({})


class ImportPublic(Public):
    """The answer to an import."""

    id: str = Field(examples=["abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3"])
    name: str
    state: AblationState
    changed: bool
    """False when exactly these bundles were imported before."""
    blocks_imported: int
    block_indices_missing: list[int] = Field(
        description="Indices, from 0, of planned blocks that are in no bundle: missing data."
    )
    remarks: list[str]
    """Warnings; none of them stops the import."""
    links: Links


class PlanRegistered(Public):
    """The answer to the registration of a plan."""

    registered: Registration
    """For the field `registered` of the plan file."""
    seeds: list[int]
    """Drawn for the plan, by their number in its blocks; none if its spec lists them."""
    digest: str
    """Of the plan file with both. An import of another one under this id is refused."""


@dataclass(frozen=True, kw_only=True)
class SpecBody:
    """The bytes of a spec with their content type."""

    content: bytes
    content_type: str = "application/yaml"
    archives: "tuple[PackedCode, ...]" = field(default=(), compare=False)
    """Code that the spec names by digest, on its way to the service or into a plan."""
    packed_lines: tuple[str, ...] = field(default=(), compare=False)
    """A line for people about each folder that was packed."""

    @classmethod
    def of(
        cls, spec: "SpecBody | Mapping[str, Any] | str | PathLike[str]", *, commits: Mapping[str, str] = _NO_COMMITS
    ) -> "SpecBody":
        """Return `spec` itself, a mapping as JSON, or the file at a path. Folders of code are packed.

        They are relative to the file, or to the current folder; `commits` has revisions by arm, to pack instead of the
        files as they are. Raises OSError, SpecError.
        """
        if isinstance(spec, SpecBody):
            return spec
        if isinstance(spec, Mapping):
            return cls.packed(json.dumps(spec).encode(), "application/json", commits=commits)
        from ablate.experiments.catalog.files import content_type_of

        path = Path(spec)
        return cls.packed(path.read_bytes(), content_type_of(path), folder=path.parent, commits=commits)

    @classmethod
    def packed(
        cls,
        content: bytes,
        content_type: str = "application/yaml",
        *,
        folder: Path = Path(),
        commits: Mapping[str, str] = _NO_COMMITS,
    ) -> "SpecBody":
        """Return a spec with its folders of code, relative to `folder`, packed. Raises SpecError."""
        named = b"command" in content and (b"code" in content or b"data" in content)
        if not commits and not named:  # most specs; reading one takes many modules
            return cls(content=content, content_type=content_type)
        from ablate.experiments.records.spec_code import pack_spec

        packed = pack_spec(content, content_type, folder, commits)
        return cls(
            content=packed.content,
            content_type=packed.content_type,
            archives=packed.archives,
            packed_lines=packed.packed,
        )

    def without_repeats(self) -> "tuple[SpecBody | None, frozenset[str]]":
        """Return the spec without variants that run as baseline or as an earlier one does; None if none is left.

        Also return the variants that run as the baseline does. The spec's variants are mappings. Raises SpecError.
        """
        from ablate.experiments.design.load import load_values
        from ablate.experiments.design.spec_yaml import spec_yaml

        values = load_values(self.content, self.content_type)
        baseline = {"code": values["workload"].get("code")}
        arms = {name: {**baseline, **variant} for name, variant in values["variants"].items()}
        as_baseline = frozenset(name for name, arm in arms.items() if arm == baseline)
        distinct: dict[str, dict[str, Any]] = {}
        for name, arm in arms.items():
            if name not in as_baseline and arm not in distinct.values():
                distinct[name] = arm
        if not distinct or len(distinct) == len(arms):
            return (self if distinct else None), as_baseline
        values["variants"] = {name: values["variants"][name] for name in distinct}
        for name in arms.keys() - distinct.keys():
            values.get("labels", {}).pop(f"{COMMIT_LABEL}{name}", None)
        return replace(self, content=spec_yaml(values), content_type="application/yaml"), as_baseline


CodeDigest: TypeAlias = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$", examples=["sha256:" + 64 * "0"])]


class CodeWanted(BaseModel):
    """Archives that a client is about to submit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digests: list[CodeDigest] = Field(max_length=100)


class CodeMissing(Public):
    """The archives among them that this token has to send."""

    missing: list[str]


class CodeStored(Public):
    """The answer to an upload of code."""

    digest: str
    size: int
    changed: bool
    """False when this token had sent exactly this archive."""


class CodeShare(BaseModel):
    """A token that may use code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=TOKEN_NAME, description="Name of the token.", examples=["ada"])]


class CodeShared(Public):
    """The answer: what that token could not use before."""

    name: str
    digests: list[str]


class SpecText(Public):
    """The submitted text of a spec."""

    text: str
    content_type: str


class PlanSummary(Public):
    """The size of a plan."""

    arms: list[str]
    blocks: int
    trials: int
    node_class: str
    devices: int
    mde_pct_per_sd_pct: float | None
    expected_device_minutes: float | None
    control: str | None = None
    """The arm that the service added to measure the noise; it repeats the baseline."""


class AblationAccepted(Public):
    """The answer to a submission."""

    id: str = Field(examples=["abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3"])
    name: str
    state: AblationState
    spec_digest: str
    rule_digest: str
    plan: PlanSummary
    warnings: list[str]
    """Problems that do not stop the ablation."""
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
    seed: int | None
    """Null if it will be drawn at the submission."""
    order: list[str]


class NodeClassAnswer(Public):
    """Whether nodes of one class could run the plan now."""

    node_class: str
    live_nodes: int
    eligible: bool
    reason: str | None
    """Why they could not; null if they could."""


class AskingPublic(Public):
    """The place of an ablation among the askings of its questions, and the price of the next one."""

    number: int
    """Of the variant whose question was asked most often, from 1."""
    earlier: list[str]
    """Names of the earlier ablations, oldest first."""
    level_pct: float
    """Two-sided level of its tests, before the correction for variants and looks."""
    next_level_pct: float
    """The same for the next asking."""
    mde_pct_per_sd_pct: float
    """Detectable effect in percent per percent of the standard deviation between neighbouring trials, at this level."""
    next_mde_factor: float
    """The effect that the next asking detects with as many blocks, over that of this one."""


class PlanPublic(Public):
    """The plan of a spec, without running it."""

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
    seeds: SeedOrigin
    over_seeds: bool
    """Whether a loss decides by statistics over seeds."""
    sizing: Sizing | None
    """The detectable effect at the measured noise; None without a calibration of the node class, or, for a loss,
    without an earlier ablation of this baseline that it decided."""
    mended_by: str | None
    """The command that calibrates a node for this plan. None with a calibration, and if the primary metric is exact or
    repeats bit for bit."""
    repeats: bool
    """Whether A/A blocks showed that the primary metric repeats bit for bit, so that only seeds make it differ."""
    control: str | None
    """The arm that the service adds to measure the noise, because no node is calibrated. Without it and without a
    calibration, no verdict goes beyond `inconclusive`."""
    asking: AskingPublic | None
    """How often the questions were asked; None where no level depends on it."""
    expected_device_minutes: float | None
    device_minutes_allowed: float
    """Budget of the whole ablation; when it is used up, waiting blocks are cancelled."""
    warnings: list[str]
    """Problems that would not stop the ablation."""
    node_classes: list[NodeClassAnswer]
