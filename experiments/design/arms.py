"""Resolve the arms of a spec: complete configurations, or problems with pointers into the spec."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.design.kinds.kind import ArmConfig, Draft
from ablate.experiments.design.kinds.package import PackageArm
from ablate.experiments.design.problems import listed, pointer, shown
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.digest import digest
from ablate.experiments.documents import Frozen
from ablate.experiments.errors import SpecProblem
from ablate.experiments.outcomes import BASELINE, VARIANT, ArmRole

KINDS: list[type[ArmConfig]] = [PackageArm, CommandArm, BuiltInArm]
"""All kinds of workload. JSON is of the first one whose mark it has."""


def read_config(values: Any) -> ArmConfig:
    """Return the configuration of its JSON. Raises ValueError for values that no kind has."""
    if isinstance(values, ArmConfig):
        return values
    marks = values if isinstance(values, Mapping) else {}
    kind = next((kind for kind in KINDS if marks.get(kind.marked_by) is not None), None)
    if kind is None:
        allowed = listed(kind.marked_by for kind in KINDS)
        raise ValueError(f"a configuration is a mapping with one of {allowed}; given: {shown(values)}")
    return kind.read(values)


def _read_without_seed(values: Any) -> ArmConfig:
    if isinstance(values, Mapping) and "seed" in values:
        raise ValueError("the configuration of an arm has no seed, because each block has its own")
    return read_config(values)


_SCHEMA = WithJsonSchema({"type": "object", "additionalProperties": True})
Config = Annotated[
    ArmConfig, PlainValidator(_read_without_seed), PlainSerializer(lambda config: config.values_without_seed), _SCHEMA
]
"""The configuration of an arm in a document."""
TrialConfig = Annotated[
    ArmConfig, PlainValidator(read_config), PlainSerializer(lambda config: config.values_with_seed), _SCHEMA
]
"""The configuration of a trial in a document, with the block's seed."""


class Arm(Frozen):
    """The baseline or a variant as a complete configuration."""

    name: str
    role: ArmRole
    gates: Mapping[str, Any]
    """All gates with their values, defaults included; of a command its declared settings."""
    config: Config
    digest: str
    """Digest of gates and configuration (`arm_digest`)."""


def arm_digest(gates: Mapping[str, Any], config: ArmConfig) -> str:
    """Return the digest of an arm; its name, its role and the seed do not count."""
    return digest({"gates": gates, "config": config.values_without_seed})


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The arms of a spec, baseline first, and all problems with them."""

    arms: tuple[Arm, ...]
    problems: tuple[SpecProblem, ...]


def resolve(spec: AblationSpec) -> Resolution:
    """Resolve the arms of `spec` with its steps; there are none when there are problems.

    For the steps of each arm see `ablate.experiments.design.equal_work`.
    """
    kind = next(kind for kind in KINDS if kind.takes(spec.workload))
    drafts = kind.drafts(spec)
    arms = tuple(map(_arm, drafts.arms))
    unwanted = _unequal_arms(arms) if spec.purpose == "calibration" else _equal_arms(arms)
    problems = (*drafts.problems, *unwanted)
    return Resolution(arms=() if problems else arms, problems=problems)


def _arm(draft: Draft) -> Arm:
    role: ArmRole = BASELINE if draft.name == BASELINE else VARIANT
    return Arm(role=role, digest=arm_digest(draft.gates, draft.config), **draft._asdict())


def _equal_arms(arms: Sequence[Arm]) -> list[SpecProblem]:
    seen: dict[str, Arm] = {}
    problems = []
    for arm in arms:
        first = seen.setdefault(digest(arm.config.content()), arm)
        if first is not arm:
            other = "the baseline" if first.name == BASELINE else f"variant '{first.name}'"
            detail = f"variant '{arm.name}' resolves to the same configuration as {other}"
            if without_effect := arm.config.changed_from(first.config):
                detail += f"; without effect in this model: {listed(without_effect)}"
            hint = "change at least one setting, or remove the variant"
            problems.append(SpecProblem(pointer=pointer("variants", arm.name), detail=detail, hint=hint))
    return problems


def _unequal_arms(arms: Sequence[Arm]) -> list[SpecProblem]:
    """Find variants of a calibration that do not repeat the baseline: equal arms measure the noise."""
    hint = "give it the baseline's settings, or leave out purpose: calibration"
    return [
        SpecProblem(
            pointer=pointer("variants", arm.name),
            detail=f"variant '{arm.name}' must repeat the baseline, but resolves to another configuration",
            hint=hint,
        )
        for arm in arms[1:]
        if arm.digest != arms[0].digest
    ]
