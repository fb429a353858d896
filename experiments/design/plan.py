"""The plan of a spec: its arms and blocks with seeds and running orders, its detectable effect and its questions.

A question is one variant against its baseline: the content of both arms, in either order, the deciding metric and the
node class. Names of ablations, recipes and arms, other arms beside them, seeds, numbers of blocks and steps, margins,
limits and labels do not change the question, nor do sizes that both arms share (micro-batch, threads, and row lengths
up to the nearest power of two), nor does a metric that follows from the same number.

A spec with a number of seeds gives a plan without them. They are drawn once, when the spec can no longer change.
"""

import math
import random
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count
from typing import TypeVar

from pydantic import Field

from ablate.experiments.design.arms import Arm
from ablate.experiments.design.comparability import comparison_problems
from ablate.experiments.design.equal_work import resolve_with_steps
from ablate.experiments.design.metrics import (
    CURVE_METRICS,
    METRICS,
    PEAK_METRICS,
    PER_DEVICE,
    PRIMARY_METRICS,
    SEED_METRICS,
    THROUGHPUT,
    WINDOW_METRICS,
)
from ablate.experiments.design.power import MAX_BLOCKS, detectable_per_sd
from ablate.experiments.design.problems import listed, pointer
from ablate.experiments.design.recipes import RECIPES
from ablate.experiments.design.rule import blocks_for_rarest_event, rule_digest
from ablate.experiments.design.spec import MAX_SEEDS, MIN_BLOCKS, MIN_PROVING_SEEDS, MIN_SEEDS, AblationSpec
from ablate.experiments.design.spec_values import show_percent
from ablate.experiments.design.verdict_rule import Primary, Requirement
from ablate.experiments.digest import digest
from ablate.experiments.documents import Frozen
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.outcomes import CONTROL, VARIANT, SeedOrigin
from ablate.kernels.backends import NodeClass

Item = TypeVar("Item")


MIN_POINTS = 3
"""Fewest validations of a curve: the error between two of them is estimated from three."""


_RANDOM = secrets.SystemRandom()
_DRAWN_BELOW = 2**31
"""Seeds below it suit every library. Two ablations share one with a chance of at most two in a million."""


class BlockPlan(Frozen):
    """The arms of one block in running order."""

    index: int
    """From 0; people see `block_number(index)`."""
    seed: int
    """Before the seeds are drawn, the number of its seed, from 1."""
    order: tuple[str, ...]
    """Arm names, each exactly once."""


class Plan(Frozen):
    """The work of a submitted spec. The service stores it whole and hands out its blocks."""

    ablation: str
    spec_digest: str
    rule_digest: str
    """Digest of the verdict rule with the estimator."""
    node_class: str
    devices: int
    max_foreign_load: float
    """Share of the cores' time that other processes may take during a trial on the host, where times decide."""
    cold_caches: bool = Field(default=False, exclude_if=lambda cold: not cold)
    """Whether trials start with empty compiler caches on disk: where compile time decides."""
    profile: bool = Field(default=False, exclude_if=lambda profile: not profile)
    """Whether trials of the built-in model run one more step under torch's profiler; arms of commands say it."""
    arms: tuple[Arm, ...]
    """Baseline first."""
    seeds: SeedOrigin
    blocks: tuple[BlockPlan, ...]
    mde_pct_per_sd_pct: float | None
    """Detectable effect in percent per percent of sd of the paired difference: 80 % power at the level of a first
    asking, corrected for the variants and the looks before the last. None where no time decides or is required."""
    expected_device_minutes: float | None
    """From earlier receipts of the same arms; None without any."""

    @property
    def busy_devices(self) -> int:
        """Devices that a trial occupies, which is also the device minutes per minute."""
        return NODE_CLASSES[self.node_class].occupied(self.devices)

    @property
    def baseline(self) -> Arm:
        """The arm that variants are compared with."""
        return self.arms[0]

    @property
    def timed(self) -> bool:
        """Whether times decide; guards of times alone (load, clocks, heat) apply only then."""
        return self.mde_pct_per_sd_pct is not None

    @property
    def variants(self) -> tuple[Arm, ...]:
        """All arms except the baseline and the control."""
        return tuple(arm for arm in self.arms if arm.role == VARIANT)

    @property
    def control(self) -> Arm | None:
        """Arm that repeats the baseline to monitor the noise; None in most plans."""
        return next((arm for arm in self.arms if arm.role == CONTROL), None)

    @cached_property
    def arm_by_name(self) -> Mapping[str, Arm]:
        """All arms by name."""
        return {arm.name: arm for arm in self.arms}


def may_have_control(spec: AblationSpec) -> bool:
    """Return whether a control arm would measure noise that a verdict on `spec` needs."""
    return spec.purpose != "calibration" and spec.verdict.timed


def make_plan(spec: AblationSpec) -> Plan:
    """Return the plan of `spec`, without a control.

    Raises SpecError with all problems that only show when arms are resolved.
    """
    if spec.design.blocks.auto:
        raise SpecError([unsized(spec)])
    if not spec.placement.node_class:
        raise AssertionError("a spec is placed before it is planned")
    resolution = resolve_with_steps(spec)
    problems = [
        *resolution.problems,
        *(list(_metric_problems(spec)) or comparison_problems(spec, resolution.arms)),
        *_compile_problems(spec, resolution.arms),
        *_design_problems(spec),
        *_curve_problems(spec, resolution.arms),
    ]
    if problems:
        raise SpecError(problems)
    return _plan(spec, resolution.arms)


def replan(spec: AblationSpec, plan: Plan) -> Plan:
    """Return the plan of a spec that differs from that of `plan` in its number of blocks. Raises SpecError."""
    problems = list(_design_problems(spec))
    if problems:
        raise SpecError(problems)
    return _plan(spec, plan.arms)


def _design_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    yield from _block_problems(spec)
    yield from _event_problems(spec)
    yield from _seed_problems(spec)
    yield from _requirement_problems(spec)


def _plan(spec: AblationSpec, arms: tuple[Arm, ...]) -> Plan:
    return Plan(
        ablation=spec.ablation,
        spec_digest=spec.digest,
        rule_digest=rule_digest(spec),
        node_class=spec.placement.node_class,
        devices=spec.placement.devices,
        max_foreign_load=spec.placement.max_foreign_load / 100,
        cold_caches=spec.metric.cold,
        profile=spec.workload.profile and spec.workload.recipe in RECIPES,
        arms=arms,
        seeds=SeedOrigin.TO_BE_DRAWN if spec.design.chosen_seeds is None else SeedOrigin.CHOSEN,
        blocks=plan_blocks(spec, [arm.name for arm in arms]),
        mde_pct_per_sd_pct=_detectable_per_sd(spec, variants=len(arms) - 1),
        expected_device_minutes=None,
    )


def controlled(spec: AblationSpec, plan: Plan) -> Plan:
    """Return the plan of `spec` with one more arm, which repeats the baseline."""
    arms = with_control(plan.arms)
    return Plan(**{**dict(plan), "arms": arms, "blocks": plan_blocks(spec, [arm.name for arm in arms])})


def unsized(spec: AblationSpec) -> SpecProblem:
    """Return the problem of a spec with `blocks: auto` whose noise was not measured."""
    node_class = spec.placement.node_class
    detail = f"blocks: auto needs the noise of this workload on {node_class}, which was not measured"
    hint = f"measure it: ablate aa {node_class} --like SPEC; or give a number, such as {{count: {MIN_BLOCKS}}}"
    return SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=hint)


def with_control(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Return `arms` and a copy of the baseline, the first one, under an unused name."""
    taken = {arm.name for arm in arms}
    name = next(name for name in chain([CONTROL], (f"{CONTROL}-{n}" for n in count(2))) if name not in taken)
    return (*arms, arms[0].model_copy(update={"name": name, "role": CONTROL}))


def _detectable_per_sd(spec: AblationSpec, *, variants: int) -> float | None:
    if not spec.verdict.timed:
        return None
    blocks = spec.design.blocks
    return detectable_per_sd(blocks.number, level=blocks.last_look.level(spec.verdict.level_of(1) / variants))


def plan_blocks(spec: AblationSpec, arms: Sequence[str]) -> tuple[BlockPlan, ...]:
    """Return the blocks of `spec` with these arms: chosen seeds or their numbers in turn, balanced orders."""
    seeds = spec.design.chosen_seeds or range(1, spec.design.num_seeds + 1)
    running = orders(arms, blocks=spec.design.blocks.number, seed=spec.design.order_seed)
    return tuple(
        BlockPlan(index=index, seed=seeds[index % len(seeds)], order=order) for index, order in enumerate(running)
    )


def draw_seeds(plan: Plan) -> Plan:
    """Return the plan with seeds that nobody could foresee; unchanged if it has its seeds."""
    if plan.seeds is not SeedOrigin.TO_BE_DRAWN:
        return plan
    return with_drawn(plan, _RANDOM.sample(range(_DRAWN_BELOW), len(seeds_of(plan))))


def with_drawn(plan: Plan, seeds: Sequence[int]) -> Plan:
    """Return a plan whose seeds were to be drawn with these."""
    return plan.model_copy(update={"seeds": SeedOrigin.DRAWN, "blocks": _seeded(plan.blocks, seeds)})


def _seeded(blocks: Iterable[BlockPlan], seeds: Sequence[int]) -> tuple[BlockPlan, ...]:
    return tuple(block.model_copy(update={"seed": seeds[block.seed - 1]}) for block in blocks)


def seeds_of(plan: Plan) -> tuple[int, ...]:
    """Return the distinct seeds of a plan in the order of their first blocks."""
    return tuple(dict.fromkeys(block.seed for block in plan.blocks))


def block_difference(spec: AblationSpec, plan: Plan) -> str | None:
    """Return how the blocks of `plan` are not those of `spec`; None if they are, with any drawn seeds."""
    if (plan.seeds is SeedOrigin.CHOSEN) != (spec.design.chosen_seeds is not None):
        own_seeds = "lists them" if spec.design.chosen_seeds else "has their number"
        return f"the seeds are {plan.seeds}, and the spec {own_seeds}"
    own = plan_blocks(spec, [arm.name for arm in plan.arms])
    if plan.seeds is SeedOrigin.DRAWN and len(seeds_of(plan)) == min(spec.design.num_seeds, len(own)):
        own = _seeded(own, seeds_of(plan))
    return None if own == plan.blocks else "blocks have other seeds or another order"


def orders(arms: Sequence[str], *, blocks: int, seed: int) -> list[tuple[str, ...]]:
    """Return the running order of each block, with every arm exactly once.

    The orders are random, balanced for position and carry-over, and the same on every machine for one seed. They come
    from Williams squares: in one square (two mirrored squares for an odd number of arms) every arm takes every position
    equally often and follows every other arm equally often. Rows come in groups of one Latin square each. So after any
    number of blocks no arm is ahead of another in any position by more than one.
    """
    rows = _endless(len(arms), random.Random(seed))  # noqa: S311  # reproducible by design, nothing secret
    return [tuple(arms[index] for index in next(rows)) for _ in range(blocks)]


def running_order(trials: Sequence[Item], slices: int) -> Iterator[tuple[int, Item]]:
    """Yield (slice number, trial) in running order: forward through the block, then back, and so on.

    After any even number of slices, a drift that is linear in time adds the same to every trial.
    """
    for number in range(slices):
        for trial in trials if number % 2 == 0 else reversed(trials):
            yield number, trial


def _endless(number: int, rng: random.Random) -> Iterator[list[int]]:
    while True:
        labels = _shuffled(range(number), rng)
        for square in _shuffled(_williams(number), rng):
            for row in _shuffled(square, rng):
                yield [labels[index] for index in row]


def _williams(number: int) -> list[list[list[int]]]:
    """Return one square (even `number`) or a mirrored pair (odd) as lists of rows."""
    first = [(step + 1) // 2 if step % 2 else -(step // 2) for step in range(number)]
    square = [[(start + offset) % number for offset in first] for start in range(number)]
    return [square] if number % 2 == 0 else [square, [row[::-1] for row in square]]


def _shuffled(items: Sequence[Item], rng: random.Random) -> list[Item]:
    """Shuffle by Fisher-Yates on rng.random(), the one method whose sequence Python keeps across versions."""
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        chosen = int(rng.random() * (last + 1))
        result[last], result[chosen] = result[chosen], result[last]
    return result


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


def questions(spec: AblationSpec, plan: Plan) -> dict[str, str]:
    """Return the digest of each variant's question by its name.

    A question is an unordered pair of arms by their content. A variant that repeats the baseline has no question.
    """
    shared = {"node_class": plan.node_class, "devices": plan.devices}
    base = plan.baseline
    return {
        arm.name: digest(
            {
                **shared,
                "arms": _contents(base, arm),
                "metric": _measured(spec.verdict.primary.metric, base, arm),
            }
        )
        for arm in plan.arms[1:]
        if arm.digest != base.digest
    }


def _contents(base: Arm, arm: Arm) -> list[str]:
    """Return the digests of two arms in either order; sizes count only where the arms differ in nothing else."""
    asked = sorted(digest(one.config.asked_content()) for one in (base, arm))
    return asked if asked[0] != asked[1] else sorted(digest(one.config.content()) for one in (base, arm))


def _measured(metric: str, base: Arm, other: Arm) -> str:
    """Return a name that metrics share if they are the same number in another unit or under another name.

    The metrics of the window follow from its throughput where both arms do the same work in a step, that of a device
    where both have as many. A printed metric is the line that its program prints.
    """
    if metric in WINDOW_METRICS:
        one, two = base.config, other.config
        if metric == PER_DEVICE and one.devices == two.devices:
            metric = THROUGHPUT
        if metric != PER_DEVICE and one.work == two.work:
            return "window"
    line = base.config.line_of(metric)
    return metric if line is None else f"line: {line}"


def question_digest(variants: Iterable[str]) -> str | None:
    """Return the digest of a set of question digests; None for an empty one."""
    distinct = sorted(set(variants))
    return digest(distinct) if distinct else None
