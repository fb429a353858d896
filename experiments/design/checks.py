"""Problems of a spec that only show beside its resolved arms, and whether a metric may compare two arms at all.

An arm that does half the work of a step needs less memory and less time for it, which is no improvement. An arm that
trains on twice the tokens has a lower loss, which is none either. Arms can have equal tokens, model FLOPs, parameters
or times; a refusal names the comparison that would be fair.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ablate.experiments.design.arms import Arm
from ablate.experiments.design.gate import Claim, show
from ablate.experiments.design.kinds.kind import ArmConfig, StepWork
from ablate.experiments.design.metrics import (
    CURVE_METRICS,
    METRICS,
    PEAK_METRICS,
    PRIMARY_METRICS,
    SEED_METRICS,
    WINDOW_METRICS,
)
from ablate.experiments.design.power import MAX_BLOCKS
from ablate.experiments.design.problems import listed, pointer
from ablate.experiments.design.rule import blocks_for_rarest_event
from ablate.experiments.design.spec import MAX_SEEDS, MIN_BLOCKS, MIN_PROVING_SEEDS, MIN_SEEDS, AblationSpec
from ablate.experiments.design.spec_values import show_percent
from ablate.experiments.design.verdict_rule import Primary, Requirement
from ablate.experiments.errors import SpecProblem
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.kernels.backends import NodeClass
from ablate.model.measurements import Metric

MOST_APART = 0.001
"""Largest relative difference of FLOPs that count as equal, because a run has whole steps."""
MIN_POINTS = 3
"""Fewest validations of a curve: the error between two of them is estimated from three."""
LOSSES_OF_STEPS = ("loss_step1", "loss_final")
"""Losses over training rows; all others are over validation rows."""


def spec_problems(spec: AblationSpec, arms: Sequence[Arm]) -> Iterator[SpecProblem]:
    """Find problems of a placed spec beside its arms, the baseline first; without arms, those of the spec alone."""
    yield from list(_metric_problems(spec)) or _comparison_problems(spec, arms)
    yield from _compile_problems(spec, arms)
    yield from design_problems(spec)
    yield from _curve_problems(spec, arms)


def design_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find numbers of blocks and seeds with which the rule cannot be met."""
    yield from _block_problems(spec)
    yield from _event_problems(spec)
    yield from _seed_problems(spec)
    yield from _requirement_problems(spec)


def _metric_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find metrics that trials of the node class do not have."""
    node_class = NODE_CLASSES[spec.placement.node_class]
    metrics: dict[tuple[str | int, ...], str] = {("primary",): spec.verdict.primary.metric}
    metrics |= {("require", index): part.metric for index, part in enumerate(spec.verdict.require)}
    where_to, why = f"on node class '{node_class}'", "it trains, so no compiler reports a plan"
    sources = {"training", "both", "step"}
    if node_class.compiles_only:
        sources = {"compilation", "both"}
        why = "it compiles the step and executes nothing, so it has no speed, no loss and no memory in use"
    elif not spec.workload.built_in:
        where_to = "of a command" if spec.workload.recipe is None else "of a package's recipe"
        sources = {"step", "program"}
        why = "only the built-in model reports it"
    there = [n for n in PRIMARY_METRICS if METRICS[n].source in sources and not _resident(n, spec)]
    there += spec.workload.metrics
    for part, name in metrics.items():
        if spec.metric_named(name).source not in sources:
            detail = f"metric '{name}' is not measured {where_to}: {why}"
            where = pointer("verdict", *part, "metric")
            yield SpecProblem(pointer=where, detail=detail, hint=f"metrics that can decide there: {listed(there)}")
        elif spec.metric_named(name).field == "peak_driver_bytes" and node_class.device_type != "cuda":
            detail = f"metric '{name}' is not measured {where_to} on node class '{node_class}', which has no GPU"
            yield SpecProblem(pointer=pointer("verdict", *part, "metric"), detail=detail)
    yield from _resident_problems(spec, node_class, there)


def _resident_problems(spec: AblationSpec, node_class: NodeClass, there: Sequence[str]) -> Iterator[SpecProblem]:
    """Find rules that compare resident sets of two processes; metrics in `there` can decide."""
    primary, memory = spec.verdict.primary.metric, [name for name in there if name in PEAK_METRICS]
    why = f"on node class '{node_class}': there it is the resident set of the process, which differs in every run"
    if _resident(primary, spec):
        detail = f"metric '{primary}' cannot decide {why}, so no repeats agree"
        hint = f"metrics that can decide there: {listed(memory or there)}"
        yield SpecProblem(pointer=pointer("verdict", "primary", "metric"), detail=detail, hint=hint)
    for index, part in enumerate(spec.verdict.require):
        if part.max_delta is not None and _resident(part.metric, spec):
            detail = f"metric '{part.metric}' cannot be compared with the baseline's {why}, so a rise proves nothing"
            other = [f"metric {listed(memory)}"] if memory else []
            hint = "use " + " or ".join([*other, "max_value, an absolute budget"])
            yield SpecProblem(pointer=pointer("verdict", "require", index, "max_delta"), detail=detail, hint=hint)


def _resident(metric: str, spec: AblationSpec) -> bool:
    """Say whether a memory metric of `spec` is a resident set; a command on the host has no other memory."""
    node_class = NODE_CLASSES[spec.placement.node_class]
    if metric not in METRICS:
        return False
    command = not spec.workload.built_in and node_class.on_host and bool(METRICS[metric].resident_on)
    return command or is_resident(metric, node_class)


def is_resident(metric: str, node_class: NodeClass) -> bool:
    """Say whether a memory metric is the process's resident set on `node_class`, which no repeat reproduces."""
    return node_class.on_host and node_class.device_type in METRICS[metric].resident_on


def _compile_problems(spec: AblationSpec, arms: Sequence[Arm]) -> Iterator[SpecProblem]:
    """Find arms that compile nothing before step 0 where compile time decides."""
    if not spec.metric.cold or NODE_CLASSES[spec.placement.node_class].compiles_only:
        return
    if not spec.workload.built_in:  # its metric is refused
        return
    silent = [arm.name for arm in arms if not arm.config.compiles]
    if silent:
        detail = f"'{spec.verdict.primary.metric}' decides, and arm '{silent[0]}' compiles nothing before step 0"
        hint = "let every arm compile: gate compile, or lane cuda"
        yield SpecProblem(pointer=pointer("verdict", "primary", "metric"), detail=detail, hint=hint)


def _block_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find numbers of blocks that are too small for the primary metric."""
    primary, blocks, seeds = spec.verdict.primary, spec.design.blocks.schedule[0], spec.design.num_seeds
    speed = next(
        (one.metric for one in spec.verdict.require if one.not_worse_by and one.metric in WINDOW_METRICS), None
    )
    tested = speed if primary.exact else primary.metric
    if tested is not None and blocks < MIN_BLOCKS:
        detail = f"must be at least {MIN_BLOCKS}, got {blocks}: '{tested}' is judged by statistics over blocks"
        yield SpecProblem(
            pointer=pointer("design", "blocks", "count"), detail=detail, hint=f"use {{count: {MIN_BLOCKS}}}"
        )
    if primary.exact and blocks < 2 * seeds:
        detail = f"repeats must prove '{primary.metric}' exact, so every seed needs two blocks; given: "
        detail += f"{blocks} blocks over {seeds} seeds"
        hint = f"use at least {2 * seeds} blocks, or fewer seeds"
        yield SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=hint)


def _event_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find designs with too few runs for the rarest event that must not make a wrong verdict."""
    needed, primary = blocks_for_rarest_event(spec), spec.verdict.primary
    if needed is None or spec.purpose == "calibration":
        return
    where, share = pointer("verdict", "rarest_event"), show_percent(spec.verdict.rarest_event or 0.0)
    if primary.exact:
        detail = f"'{primary.metric}' decides by its value, and no number of runs bounds what rare events do to it"
        yield SpecProblem(pointer=where, detail=detail, hint="leave rarest_event out")
        return
    runs = spec.design.num_seeds if primary.over_seeds else spec.design.blocks.number
    most, unit = (MAX_SEEDS, "seeds") if primary.over_seeds else (MAX_BLOCKS, "blocks")
    if runs >= needed:
        return
    detail = f"events in {share} of one arm's runs need {needed:,} {unit}, the design has {runs:,}"
    hint = f"use {needed:,} {unit}, or a larger share" if needed <= most else f"{unit} end at {most:,}: a larger share"
    yield SpecProblem(pointer=where, detail=detail, hint=hint)


def _seed_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find designs in which a seed repeats although a declared metric decides.

    A repeated seed repeats the luck of its run, so two such blocks are no independent samples. A/A blocks may repeat
    seeds: they show the noise of the machine.
    """
    primary, used = spec.verdict.primary, _seeds_used(spec)
    if primary.over_seeds and used < MIN_SEEDS and spec.purpose == "answer":
        detail = f"'{primary.metric}' is judged over seeds, at least {MIN_SEEDS}; given: {used}"
        yield SpecProblem(
            pointer=pointer("design", "seeds"), detail=detail, hint=f"use seeds: {MIN_SEEDS}, and as many blocks"
        )
    declared = [primary.metric, *(one.metric for one in spec.verdict.require)]
    named = next((name for name in declared if name not in METRICS or name in CURVE_METRICS), None)
    blocks, seeds = spec.design.blocks.number, spec.design.num_seeds
    if named is None or seeds >= blocks or spec.purpose == "calibration":
        return
    detail = (
        f"'{named}' is judged over seeds, so every block needs a seed of its own; given: {seeds} seeds for {blocks} "
    )
    hint = f"use seeds: {blocks}" if blocks <= MAX_SEEDS else f"use at most {MAX_SEEDS} blocks, with as many seeds"
    yield SpecProblem(pointer=pointer("design", "seeds"), detail=f"{detail}blocks", hint=hint)


def _seeds_used(spec: AblationSpec) -> int:
    """Return the number of seeds in the blocks of the first look."""
    return min(spec.design.blocks.schedule[0], spec.design.num_seeds)


def _requirement_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find requirements that this design cannot meet, because missing data fails."""
    for index, requirement in enumerate(spec.verdict.require):
        where = pointer("verdict", "require", index)
        if requirement.metric == "loss_val" and spec.workload.steps.val_rows == 0:
            hint = "set workload.steps.val_rows"
            yield SpecProblem(pointer=where, detail="loss_val is required, but steps.val_rows is 0", hint=hint)
        seeds = _seeds_used(spec)
        if requirement.not_worse_by is not None and requirement.metric in SEED_METRICS and seeds < MIN_PROVING_SEEDS:
            detail = f"'{requirement.metric}' is tested over seeds, at least {MIN_PROVING_SEEDS}; given: {seeds}"
            hint = f"use seeds: {MIN_SEEDS}, and as many blocks"
            yield SpecProblem(pointer=where, detail=detail, hint=hint)


def _curve_problems(spec: AblationSpec, arms: Sequence[Arm]) -> Iterator[SpecProblem]:
    """Find numbers of validation curves that no trial can have."""
    rule, steps = spec.verdict, spec.workload.steps
    parts: dict[tuple[str | int, ...], Primary | Requirement] = {("primary",): rule.primary}
    parts |= {("require", index): one for index, one in enumerate(rule.require)}
    of_curves = {part: one for part, one in parts.items() if one.metric in CURVE_METRICS}
    executed = spec.workload.built_in and not NODE_CLASSES[spec.placement.node_class].compiles_only
    if not of_curves or not arms or not executed:  # the metric itself is refused
        return
    points = min(len(arm.config.steps.validated) for arm in arms)
    if points < MIN_POINTS:
        name = next(iter(of_curves.values())).metric
        detail = f"'{name}' is read from a validation curve of at least {MIN_POINTS} points; val_every = "
        most = max(1, (steps.timed - 1) // (MIN_POINTS - 1))
        hint = f"use val_every: {most} or less, with {MIN_POINTS} timed steps at least"
        where = pointer("workload", "steps", "val_every")
        yield SpecProblem(pointer=where, detail=f"{detail}{steps.val_every} gives {points}", hint=hint)
    untrained = min((loss for arm in arms if (loss := arm.config.untrained_loss) is not None), default=math.inf)
    for part, one in of_curves.items():
        if one.target is not None and one.target.value >= untrained:
            detail = f"a model that was not trained is already at {untrained:.4g} nats, the logarithm of its vocabulary"
            where = pointer("verdict", *part, "target")
            hint = "give a loss that the runs reach on their way"
            yield SpecProblem(pointer=where, detail=f"'{one.metric}' has the target {one.target}; {detail}", hint=hint)


class Unlike(NamedTuple):
    """Why a metric does not compare two arms."""

    why: str
    """How the work of the variant differs."""
    fair: str
    """The comparisons that would be fair."""


def unlike(metric: Metric, own: ArmConfig, base: ArmConfig, *, equal: str) -> Unlike | None:
    """Say how two arms' configurations differ in something that `metric` counts; None if they do not.

    `equal` is `workload.steps.equal`. With equal parameters the FLOPs of a token may differ. None too where only the
    receipts have the work (`ablate.experiments.analysis.programs.other_tokens`).
    """
    if metric.decides == "curve":  # equal tokens, or equal seconds, are on the curves
        return _other_rows(metric, own, base)
    if metric.kind == "loss":
        return _other_rows(metric, own, base) or _other_total(own, base)
    return _other_tokens(metric, own, base) or (None if equal == "parameters" else _other_flops(metric, own, base))


def other_work(metric: Metric, own: ArmConfig, base: ArmConfig, *, equal: str) -> str | None:
    """Say how the work of two arms' configurations differs in what `metric` counts; None if it does not."""
    difference = unlike(metric, own, base, equal=equal)
    return difference and difference.why


def _other_tokens(metric: Metric, own: ArmConfig, base: ArmConfig) -> Unlike | None:
    mine, theirs = own.work, base.work
    if metric.alike != "step" or mine is None or theirs is None or mine.tokens == theirs.tokens:
        return None
    fair = "decide by tokens_per_s, or let steps have equal tokens (micro_batch x seq_len)"
    return Unlike(f"a step has {mine.tokens:,} tokens, the baseline's {theirs.tokens:,}", fair)


def _other_flops(metric: Metric, own: ArmConfig, base: ArmConfig) -> Unlike | None:
    mine, theirs = own.work, base.work
    if metric.alike == "nothing" or mine is None or theirs is None:
        return None
    if mine.flops * theirs.tokens == theirs.flops * mine.tokens:
        return None
    per_token = (f"{work.flops / work.tokens:,.0f}" for work in (mine, theirs))
    fair = (
        "equal parameters (workload.steps.equal: parameters); equal FLOPs: decide by model_tflops_per_s; equal tokens: "
        "by a loss, and require tokens_per_s"
    )
    return Unlike("a token takes {} model FLOPs, the baseline's {}".format(*per_token), fair)


def _other_rows(metric: Metric, own: ArmConfig, base: ArmConfig) -> Unlike | None:
    """Say how the rows differ over which a loss is a mean."""
    of_validation = metric.name not in LOSSES_OF_STEPS
    mine, theirs = ((rows.validation if of_validation else rows.training) for rows in (own.rows, base.rows))
    name = next((name for name in mine if name in theirs and mine[name] != theirs[name]), None)
    if name is None:
        return None
    which, fair = "training", "decide by loss_val after equal tokens, over rows that all arms share"
    if of_validation:
        which, fair = "validation", f"equal validation rows: one {name} for all arms"
    return Unlike(f"its {which} rows are others: {name} {show(mine[name])} instead of {show(theirs[name])}", fair)


def _other_total(own: ArmConfig, base: ArmConfig) -> Unlike | None:
    mine, theirs = trained(own), trained(base)
    if mine is None or theirs is None or mine.tokens == theirs.tokens or equal_flops(mine.flops, theirs.flops):
        return None
    why = f"it trains on {mine.tokens:,} tokens, the baseline on {theirs.tokens:,}"
    fair = "equal tokens (workload.steps.equal: tokens), equal FLOPs (equal: flops), or equal time (loss_val_at_time)"
    return Unlike(why, f"after {fair}")


def trained(config: ArmConfig) -> StepWork | None:
    """Return the work of all steps of an arm; None where only the receipts have it."""
    work, steps = config.work, config.steps.total
    return None if work is None else StepWork(tokens=work.tokens * steps, flops=work.flops * steps)


def equal_flops(own: int, base: int) -> bool:
    """Return whether two numbers of model FLOPs count as equal."""
    return abs(own - base) <= MOST_APART * base


def _comparison_problems(spec: AblationSpec, arms: Sequence[Arm]) -> Iterator[SpecProblem]:
    """Find metrics of the rule that do not compare a variant with the baseline, which is the first arm."""
    names: dict[tuple[str | int, ...], tuple[str, Requirement | None]] = {
        ("verdict", "primary", "metric"): (spec.verdict.primary.metric, None)
    }
    names |= {("verdict", "require", n, "metric"): (one.metric, one) for n, one in enumerate(spec.verdict.require)}
    for place, (name, requirement) in names.items():
        for arm in arms[1:]:
            difference = _unlike_by(spec, name, requirement, arm.config, arms[0].config)
            if difference is not None:
                detail = f"'{name}' does not compare variant '{arm.name}' with the baseline: {difference.why}"
                yield SpecProblem(pointer=pointer(*place), detail=detail, hint=f"fair: {difference.fair}")


def _unlike_by(
    spec: AblationSpec, name: str, requirement: Requirement | None, own: ArmConfig, base: ArmConfig
) -> Unlike | None:
    """Say why a part of the rule can give no answer on two arms.

    Memory of other work is no verdict, but whether a trial fits is an answer. A required speed is a budget, which a
    larger model may use.
    """
    metric = spec.metric_named(name)
    if metric.kind == "absolute" or (requirement is not None and requirement.max_value is not None):
        return None
    if requirement is None or metric.kind == "loss" or metric.decides == "curve":
        return unlike(metric, own, base, equal=spec.workload.steps.equal)
    return _other_tokens(metric, own, base)


def other_model(own: Arm, base: Arm) -> str | None:
    """List the differing gates and values that change the numerical model.

    None without one, and for commands, which have none.
    """
    workload = base.config
    pairs = {name: (value, base.gates[name]) for name, value in own.gates.items() if value != base.gates[name]}
    changed = {
        name: pair
        for name, pair in pairs.items()
        if workload.attested and workload.claim_of(name) is Claim.CHANGES_MODEL
    }
    values = {**changed, **own.config.changed_from(base.config)}
    return (
        ", ".join(f"{name} {show(value)} instead of {show(other)}" for name, (value, other) in values.items()) or None
    )
