"""What a variant changes: settings, arguments flag by flag, and variables, with the values before and after."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from ablate.experiments.design.arguments import flags_of
from ablate.experiments.design.arms import Arm
from ablate.experiments.design.gate import show
from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.design.load import load_values
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import VARIANT

ARGUMENTS, CODE = "args", "code"
_ARROW = "\N{RIGHTWARDS ARROW}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting in which a variant differs from the baseline."""

    name: str
    """A gate, a value, a flag, or a variable; empty for arguments without a flag."""
    before: str | None
    """None if the baseline lacks it, or if only the resolved spec tells."""
    after: str | None
    """None if the variant lacks it."""

    def __str__(self) -> str:
        """Return for example "--lr 0.01 → 0.012", "+ --fused", "psiv_cache false → true"."""
        if self.before is None or self.after is None:
            sign = "\N{MINUS SIGN}" if self.after is None else "+" * self.name.startswith("-")
            value = self.after if self.before is None else self.before
            return " ".join(part for part in (sign, self.name, value) if part)
        return " ".join(part for part in (self.name, self.before or "nothing", _ARROW, self.after or "nothing") if part)


@dataclass(frozen=True, kw_only=True)
class ChangedArm:
    """A variant with its changes, for pages."""

    arm: str
    changes: tuple[Change, ...]

    @property
    def text(self) -> str:
        """Its changes in one line."""
        return in_one_line(self.changes) or "repeats the baseline"


def arm_changes(arm: Arm, baseline: Arm) -> tuple[Change, ...]:
    """Return the changes of an arm against the baseline; none for a repeat."""
    own, base = (settings_of(one.gates, one.config) for one in (arm, baseline))
    for name, (value, other) in arm.config.changed_from(baseline.config).items():
        own[name], base[name] = value, other
    return tuple(changes_between(own, base))


def changed_arms(arms: Sequence[Arm]) -> list[ChangedArm]:
    """Return the variants among the arms of a plan, whose first one is the baseline."""
    return [ChangedArm(arm=arm.name, changes=arm_changes(arm, arms[0])) for arm in arms if arm.role == VARIANT]


@lru_cache(maxsize=256)
def changes_in_plan(plan: str) -> dict[str, ChangedArm]:
    """Return the variants of a stored plan by name; none of one that this version cannot read."""
    try:
        arms = [Arm.model_validate(arm) for arm in json.loads(plan)["arms"]]
    except ValidationError:
        return {}
    return {one.arm: one for one in changed_arms(arms)}


@lru_cache(maxsize=1_024)
def changes_in_spec(text: str, content_type: str) -> dict[str, ChangedArm]:
    """Return the variants of a stored spec by name; none of one that this version cannot read.

    A list of ablations has no time to resolve arms, so a gate whose default the baseline keeps lacks its value before.
    """
    try:
        values = load_values(text.encode(), content_type)
    except SpecError:
        return {}
    base = _written(values.get("baseline") or {}, values.get("workload") or {})
    return {
        str(name): ChangedArm(arm=str(name), changes=tuple(changes_between({**base, **_written(own)}, base)))
        for name, own in (values.get("variants") or {}).items()
    }


def _written(arm: Mapping[str, Any], workload: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the settings that a spec writes for an arm."""
    code = arm.get("code") or workload.get("code")
    settings = {**(workload.get("overrides") or {}), **(arm.get("overrides") or {}), **(arm.get("gates") or {})}
    settings |= {f"env.{name}": value for name, value in (arm.get("env") or {}).items()}
    if arm.get("args") is not None:
        settings[ARGUMENTS] = [str(word) for word in arm["args"]]
    if code:
        settings[CODE] = shown_code(code)
    return settings


def shown_code(code: Any) -> str:
    """Return a short name of code in a spec: a folder, a commit, or the beginning of an archive's digest."""
    if not isinstance(code, Mapping):
        return str(code)
    return str(code.get("commit") or str(code.get("archive", "")).removeprefix("sha256:"))[:12]


def settings_of(gates: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the settings of an arm, whose arguments are words and not one text."""
    settings = dict(gates)
    if isinstance(config, ProgramArm):
        settings = {name: value for name, value in settings.items() if value != "" or not name.startswith("env.")}
        settings |= {CODE: str(gates[CODE]).removeprefix("sha256:")} if CODE in gates else {}
        settings |= {ARGUMENTS: config.args} if ARGUMENTS in gates else {}
    return settings


def changes_between(own: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes between two arms' settings, arguments flag by flag."""
    if own.get(ARGUMENTS) != base.get(ARGUMENTS):
        yield from _of_arguments(own.get(ARGUMENTS) or (), base.get(ARGUMENTS) or ())
    for name in sorted({*own, *base} - {ARGUMENTS}):
        if own.get(name) != base.get(name):
            yield Change(name=name.removeprefix("env."), before=_text(base.get(name)), after=_text(own.get(name)))


def _of_arguments(own: Sequence[str], base: Sequence[str]) -> Iterator[Change]:
    mine, theirs = flags_of(own), flags_of(base)
    for name in {**theirs, **mine}:
        if mine.get(name) != theirs.get(name):
            yield Change(name=name, before=theirs.get(name), after=mine.get(name))


def _text(value: Any) -> str | None:
    return None if value is None else show(value)


def in_one_line(changes: Sequence[Change]) -> str:
    """Return all changes; empty for a repeat."""
    return ", ".join(map(str, changes))
