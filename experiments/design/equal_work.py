"""Arms that train on equal tokens, with equal model FLOPs, or with equal parameters (`workload.steps.equal`).

With equal parameters every arm makes the same steps. Otherwise the steps of the spec are those of the baseline, and a
variant with another batch, row length or size gets its own number of timed steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ablate.experiments.design.arms import Arm, Resolution, arm_digest, resolve
from ablate.experiments.design.checks import MOST_APART, equal_flops
from ablate.experiments.design.kinds.kind import ArmConfig
from ablate.experiments.design.problems import listed, pointer
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.workload import MAX_TIMED
from ablate.experiments.errors import SpecProblem
from ablate.experiments.outcomes import BASELINE
from ablate.model.config import StepsConfig

MOST_PARAMETERS_APART = 0.02
"""Largest relative difference of parameters that count as equal, because a model has whole blocks."""
_EQUAL = pointer("workload", "steps", "equal")
_TIMED = pointer("workload", "steps", "timed")


def resolve_with_steps(spec: AblationSpec) -> Resolution:
    """Resolve the arms of `spec`, each with the steps in which it does the work that all arms have in common."""
    resolved = resolve(spec)
    if resolved.problems or spec.workload.steps.equal == "steps":
        return resolved
    configs = {arm.name: arm.config for arm in resolved.arms}
    if spec.workload.steps.equal == "parameters":
        other = tuple(_other_parameters(spec, configs))
        return Resolution(arms=(), problems=other) if other else resolved
    problems = tuple(_problems(spec, configs))
    if problems:
        return Resolution(arms=(), problems=problems)
    amounts = _amounts(spec, configs)
    return Resolution(
        arms=tuple(_with_steps(arm, amounts[arm.name], amounts[BASELINE]) for arm in resolved.arms), problems=()
    )


def _other_parameters(spec: AblationSpec, configs: Mapping[str, ArmConfig]) -> Iterator[SpecProblem]:
    """Find arms that have other parameters than the baseline, or whose parameters nobody knows before the run."""
    base = configs[BASELINE].parameters
    for name, config in configs.items():
        if base is None or config.parameters is None:
            why = "a command" if spec.workload.recipe is None else "a recipe of a package"
            detail = f"the parameters of a model are unknown before the run: the workload is {why}"
            yield SpecProblem(pointer=_EQUAL, detail=detail, hint="leave equal out")
            return
        apart = config.parameters / base - 1
        if abs(apart) > MOST_PARAMETERS_APART:
            detail = (
                f"variant '{name}' has {config.parameters:,} parameters, {_more(apart, digits=1)} than the "
                f"baseline's {base:,}; allowed: {MOST_PARAMETERS_APART:.0%}"
            )
            hint = "change pattern, mlp_ratio or d_model of one of them"
            yield SpecProblem(pointer=pointer("variants", name), detail=detail, hint=hint)


def _more(share: float, *, digits: int) -> str:
    return f"{abs(share):.{digits}%} {'more' if share > 0 else 'fewer'}"


def _with_steps(arm: Arm, amount: int, base: int) -> Arm:
    """Return the arm with its timed steps and its schedule of validations, both to the nearest step."""
    steps = arm.config.steps
    own = {"timed": _timed(steps, amount, base)}
    if steps.val_every:
        own["val_every"] = min(max(1, _nearest(steps.val_every * base, amount)), own["timed"])
    config = arm.config.with_steps(replace(steps, **own))
    return arm.model_copy(update={"config": config, "digest": arm_digest(arm.gates, config)})


def _problems(spec: AblationSpec, configs: Mapping[str, ArmConfig]) -> Iterator[SpecProblem]:
    """Find reasons why the arms cannot train on equal work in whole steps."""
    kind, steps = spec.workload.steps.equal, configs[BASELINE].steps
    if steps.slice:
        detail = f"trials in slices take turns after equally many steps; equal {kind} gives each arm its own number"
        yield SpecProblem(pointer=_EQUAL, detail=detail, hint="leave slice out, or equal")
    elif any(config.work is None for config in configs.values()):
        why = "a command" if spec.workload.recipe is None else "a recipe without tokens_per_step and flops_per_step"
        detail = f"the {kind} of a step are unknown before the run: the workload is {why}"
        yield SpecProblem(pointer=_EQUAL, detail=detail, hint="leave equal out")
    else:
        yield from _unequal(kind, steps, _amounts(spec, configs))


def _amounts(spec: AblationSpec, configs: Mapping[str, ArmConfig]) -> dict[str, int]:
    """Return by arm the work of a step of which all arms have equally much."""
    return {name: int(getattr(one.work, spec.workload.steps.equal)) for name, one in configs.items()}


def _timed(steps: StepsConfig, amount: int, base: int) -> int:
    return _nearest(steps.total * base, amount) - 1 - steps.warmup


def _nearest(whole: int, part: int) -> int:
    """Return whole / part to the nearest integer, halves up."""
    return (2 * whole + part) // (2 * part)


def _unequal(kind: str, steps: StepsConfig, amounts: Mapping[str, int]) -> Iterator[SpecProblem]:
    base = amounts[BASELINE]
    for arm, amount in amounts.items():
        timed = _timed(steps, amount, base)
        if kind == "tokens" and steps.total * base % amount:
            detail = (
                f"{steps.total:,} steps of the baseline have {steps.total * base:,} tokens, which are no whole number "
                f"of steps of variant '{arm}', each with {amount:,}"
            )
            hint = f"numbers that divide: {_fitting(kind, steps, amounts)}"
            yield SpecProblem(pointer=_TIMED, detail=detail, hint=hint)
        elif not 1 <= timed <= MAX_TIMED:
            detail = f"for equal {kind} variant '{arm}' needs {timed:,} timed steps; allowed: 1 to {MAX_TIMED:,}"
            yield SpecProblem(pointer=_TIMED, detail=detail, hint=f"use {'more' if timed < 1 else 'fewer'} timed steps")
        elif not equal_flops((1 + steps.warmup + timed) * amount, steps.total * base):
            off = (1 + steps.warmup + timed) * amount / (steps.total * base) - 1
            apart = f"{_more(off, digits=2)} FLOPs than the baseline"
            detail = f"variant '{arm}' has {apart} after its nearest whole step; allowed: {MOST_APART:.1%}"
            hint = f"numbers that fit: {_fitting(kind, steps, amounts)}"
            yield SpecProblem(pointer=_TIMED, detail=detail, hint=hint)


def _fitting(kind: str, steps: StepsConfig, amounts: Mapping[str, int]) -> str:
    """Return the nearest numbers of timed steps, below and above, with which all arms do equal work."""
    most = MAX_TIMED + 1
    below = next((n for n in range(min(steps.timed, most) - 1, 0, -1) if _fits(kind, steps, n, amounts)), None)
    above = next((n for n in range(steps.timed + 1, most) if _fits(kind, steps, n, amounts)), None)
    return listed([n for n in (below, above) if n is not None])


def _fits(kind: str, steps: StepsConfig, timed: int, amounts: Mapping[str, int]) -> bool:
    untimed = 1 + steps.warmup
    whole = (untimed + timed) * amounts[BASELINE]
    for amount in amounts.values():
        total = _nearest(whole, amount)
        equal = total * amount == whole if kind == "tokens" else equal_flops(total * amount, whole)
        if not (equal and 1 <= total - untimed <= MAX_TIMED):
            return False
    return True
