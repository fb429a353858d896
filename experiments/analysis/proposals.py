"""Proposals of a session: one variant after another against the incumbent, under one error budget.

The incumbent is the baseline of the spec that opened the session, until a proposal is kept: then it is that proposal's
variant. The level of a proposal is a part of its spec, so it is fixed and hashed before the first sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.aa_spec import CONTENT_TYPE
from ablate.experiments.design.kinds.program import set_requirements
from ablate.experiments.design.load import load_values, spec_of
from ablate.experiments.design.metrics import LOSS_METRICS, METRICS
from ablate.experiments.design.power import session_level
from ablate.experiments.design.problems import listed, pointer, shown
from ablate.experiments.design.program_files import RepositoryCommit
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.spec_values import NO_MARGIN
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.design.verdict_rule import SessionLevel
from ablate.experiments.design.workload import BY_ARM, COMMAND
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.outcomes import BASELINE, Decision, ProposalOutcome
from ablate.experiments.records.calibration import Calibration

_OUTCOMES = {
    Decision.ADOPT: ProposalOutcome.KEEP,
    Decision.REJECT: ProposalOutcome.DISCARD,
    Decision.SAME: ProposalOutcome.DISCARD,
    Decision.INCONCLUSIVE: ProposalOutcome.UNDECIDED,
    Decision.INVALID: ProposalOutcome.UNDECIDED,
}

NOTE = "note"
"""Label of a proposal with its author's own words about the change."""


def outcome_of(verdict: Verdict) -> ProposalOutcome:
    """Return the answer to the proposal whose only variant has this verdict."""
    (variant,) = verdict.variants
    return _OUTCOMES[variant.decision]


SAFE_MARGIN = 0.75
"""Margin in standard deviations of a block's noise that keeps a session from most of what A/A blocks do not show."""


def small_margin(spec: AblationSpec, calibrations: Sequence[Calibration]) -> str | None:
    """Say that the margin of a session is small beside the noise; None if it is not, or nobody measured that."""
    sd = max((one.sd_pct for one in calibrations), default=0.0)
    primary = spec.verdict.primary
    if not primary.margin.relative or (margin := primary.margin_pct) >= SAFE_MARGIN * sd:
        return None
    return (
        f"The margin of {margin:g} % is {margin / sd:.2g} standard deviations of a block's noise ({sd:.2g} %). Rare "
        "slow runs of one arm, or blocks that resemble their neighbours where A/A blocks do not, may then lead to a "
        f"wrong keep; a margin from {SAFE_MARGIN * sd:.2g} % on protects from most of that."
    )


def refuse_session_key(spec: AblationSpec) -> None:
    """Raise SpecError if a submitted spec names a session: its author would choose the level."""
    if spec.verdict.session is not None:
        detail = "the service sets 'session', with the level that the session's budget leaves; a spec cannot have it"
        hint = f"remove it and use: ablate try --session {spec.verdict.session.name} -- SPEC"
        raise SpecError([SpecProblem(pointer=pointer("verdict", "session"), detail=detail, hint=hint)])


def opening_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find parts of a spec that cannot open a session."""
    if spec.purpose == "calibration":
        detail = "a session compares proposals with an incumbent; a calibration compares the baseline with itself"
        yield SpecProblem(pointer=pointer("purpose"), detail=detail, hint="leave purpose out")
    primary = spec.verdict.primary
    if primary.exact and primary.metric in LOSS_METRICS:
        detail = f"'{primary.metric}' with margin {NO_MARGIN} is the same or not, so no proposal can be kept"
        where, hint = pointer("verdict", "primary", "margin"), "give a margin, such as 0.01 nats"
        yield SpecProblem(pointer=where, detail=detail, hint=hint)
    evaluate = spec.workload.evaluate
    code = None if evaluate is None else evaluate.code or spec.workload.code
    if isinstance(code, str):
        detail = f"the evaluation's code {shown(code)} is a folder on the node, which may change between two proposals"
        hint = "send it (`code: .`), or name a commit of its repository"
        yield SpecProblem(pointer=pointer("workload", "evaluate"), detail=detail, hint=hint)


def proposal_problems(spec: AblationSpec, incumbent: AblationSpec, session: str) -> Iterator[SpecProblem]:
    """Find reasons why `spec` is no proposal of a session whose incumbent is the baseline of the spec `incumbent`.

    Workload, baseline, placement and rule must be those of the incumbent. Variant, design, limits and labels are free.
    """
    if len(spec.variants) != 1:
        detail = f"a proposal is one variant; given: {len(spec.variants)} ({listed(spec.variants)})"
        yield SpecProblem(pointer=pointer("variants"), detail=detail, hint="propose them one after another")
    if spec.purpose != incumbent.purpose:
        yield SpecProblem(pointer=pointer("purpose"), detail="a calibration is no proposal", hint="leave purpose out")
    yield from _readable_problems(spec, session)
    for part in ("workload", "baseline", "placement", "verdict"):
        own, other = (_comparable(part, one) for one in (spec, incumbent))
        for path in _differing(own, other, (part,)):
            proposed_value, expected = (_at(values, path[1:]) for values in (own, other))
            whose = "the incumbent of " if part in ("workload", "baseline") else ""
            detail = f"{whose}session '{session}' has {_text(expected)} here; given: {_text(proposed_value)}"
            yield SpecProblem(pointer=pointer(*path), detail=detail, hint=_HINTS[part].format(session))


def _readable_problems(spec: AblationSpec, session: str) -> Iterator[SpecProblem]:
    """Find code on the node that a proposal names, in which the answers of the protected evaluation may lie."""
    base = spec.workload.code
    repository = base.git if isinstance(base, RepositoryCommit) else None
    for name, own in spec.variants.items() if spec.workload.evaluate is not None else ():
        folder = own.code.git if isinstance(own.code, RepositoryCommit) else own.code
        if isinstance(folder, str) and folder != repository:
            detail = (
                f"code {shown(folder)} is on the node, where it may have the files of the protected evaluation of "
                f"session '{session}'"
            )
            yield SpecProblem(pointer=pointer("variants", name, "code"), detail=detail, hint="send it: code: .")


_HINTS = {
    "workload": "begin with the incumbent's spec: ablate sessions spec {}",
    "baseline": "begin with the incumbent's spec: ablate sessions spec {}",
    "placement": "another machine has other speeds and another noise: open another session",
    "verdict": "a rule that changes on the way would choose its winner: open another session",
}
_ABSENT = object()


def _comparable(part: str, spec: AblationSpec) -> dict[str, Any]:
    """Return the part as plain values without keys that each proposal has of its own."""
    values: dict[str, Any] = getattr(spec, part).model_dump(mode="json")
    own = {"workload": BY_ARM, "verdict": ("session",)}.get(part, ())
    return {name: value for name, value in values.items() if name not in own}


def _differing(own: Any, other: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of values that differ."""
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys([*own, *other]):
            yield from _differing(own.get(name, _ABSENT), other.get(name, _ABSENT), (*path, name))
    elif own != other or type(own) is not type(other):
        yield path


def _at(values: Any, path: tuple[str | int, ...]) -> Any:
    for name in path:
        values = values.get(name, _ABSENT)
    return values


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    return listed(map(shown, value)) if isinstance(value, list) else shown(value)


def proposed(
    body: bytes, content_type: str, spec: AblationSpec, session: str, *, number: int, kept: tuple[int, ...]
) -> tuple[bytes, AblationSpec]:
    """Return proposal `number` of `session`, made of `spec` from `body`, with its level: YAML, spec.

    A metric that is judged over seeds gets new ones in every proposal, drawn after it came.
    """
    values = load_values(body, content_type)
    if _needs_own_seeds(spec):
        values["design"]["seeds"] = spec.design.num_seeds
    level = SessionLevel(name=session, proposal=number, kept=kept, level=session_level(number, kept))
    values["verdict"]["session"] = level.model_dump(mode="json")
    return spec_yaml(values), spec_of(values)


def _needs_own_seeds(spec: AblationSpec) -> bool:
    """Return whether the deciding metric is judged over seeds, so that a proposal may not choose them.

    The luck of a seed is the same whenever it is used: a change that was chosen by one proposal's seeds, or by seeds
    that can be foreseen, would be tested on its own choice.
    """
    primary = spec.verdict.primary
    return primary.metric not in METRICS or primary.over_seeds


def with_kept(incumbent: bytes, proposal: bytes) -> bytes:
    """Return the YAML of the spec of a session, `incumbent`, with the variant of a kept proposal as its baseline.

    Both are YAML. The baseline has the configuration of that variant. Design, limits and labels stay those of the
    session; the variant stays, to be changed into the next proposal.
    """
    values, kept = load_values(incumbent, CONTENT_TYPE), load_values(proposal, CONTENT_TYPE)
    ((variant, own),) = kept["variants"].items()
    baseline, workload = values.get("baseline") or {}, values["workload"]
    if own.get("gates") is not None:
        baseline["gates"] = {**(baseline.get("gates") or {}), **own["gates"]}
    if own.get("overrides"):
        workload["overrides"] = {**(workload.get("overrides") or {}), **own["overrides"]}
    baseline |= {name: own[name] for name in ("args", "env") if own.get(name) is not None}
    if own.get("environment") is not None:
        workload["environment"] = own["environment"]
    if own.get("code") is not None:
        if workload.get("evaluate") is not None:
            workload["evaluate"] = _with_code(workload["evaluate"], workload.get("code"))
        repository = workload["code"] if isinstance(own["code"], Mapping) and set(own["code"]) == {"commit"} else {}
        workload["code"] = {**repository, **own["code"]} if isinstance(own["code"], Mapping) else own["code"]
    if kept["workload"].get("require_kernels"):
        workload["profile"] = True  # required kernels imply the profiled step
    set_requirements(workload, {BASELINE: (kept["workload"], variant)})
    values |= {"baseline": baseline, "variants": kept["variants"]}
    spec_of(values)
    return spec_yaml(values)


_OF_BOTH = ("overrides", "code", "environment")
"""Keys of the workload that a variant may change."""
INCUMBENT = "incumbent"
"""Name of the variant that compares an incumbent with its session's first baseline."""


def since_the_first(first: bytes, incumbent: bytes) -> bytes:
    """Return the YAML of a spec whose one variant is the incumbent of a session, against its first baseline.

    `first` is the spec of its first proposal and `incumbent` that of the session, both YAML.
    """
    began, values = load_values(first, CONTENT_TYPE), load_values(incumbent, CONTENT_TYPE)
    before, now, baseline = began["workload"], values["workload"], values.get("baseline") or {}
    variant = {name: baseline[name] for name in ("gates", "args", "env") if baseline.get(name)}
    variant |= {"overrides": now["overrides"]} if now.get("overrides") else {}
    variant |= {"environment": now["environment"]} if now.get("environment") != before.get("environment") else {}
    code, old = now.get("code"), before.get("code")
    if code != old:
        both = isinstance(code, Mapping) and isinstance(old, Mapping)
        variant["code"] = {"commit": code["commit"]} if both and code.get("git", "") == old.get("git") else code
    workload = {name: value for name, value in now.items() if name not in _OF_BOTH}
    workload |= {name: before[name] for name in _OF_BOTH if before.get(name) is not None}
    set_requirements(workload, {BASELINE: (before, BASELINE), INCUMBENT: (now, BASELINE)})
    values |= {"baseline": began.get("baseline") or {}, "workload": workload, "variants": {INCUMBENT: variant}}
    return spec_yaml(values)


def _with_code(evaluate: Any, code: Any) -> dict[str, Any]:
    """Return the evaluation with the code that it has had so far, because that of the workload changes."""
    own = dict(evaluate) if isinstance(evaluate, Mapping) else {COMMAND: evaluate}
    return own if own.get("code") is not None else {**own, "code": code}


def as_yaml(body: bytes, content_type: str) -> bytes:
    """Return the spec in `body` as YAML; one that is YAML keeps its comments."""
    return body if "yaml" in content_type else spec_yaml(load_values(body, content_type))
