"""The plan of a spec: its arms and blocks with seeds and running orders, its detectable effect and its questions.

A question is one variant against its baseline: the content of both arms, in either order, the deciding metric and the
node class. Names of ablations, recipes and arms, other arms beside them, seeds, numbers of blocks and steps, margins,
limits and labels do not change the question, nor do sizes that both arms share (micro-batch, threads, and row lengths
up to the nearest power of two), nor does a metric that follows from the same number.

A spec with a number of seeds gives a plan without them. They are drawn once, when the spec can no longer change.
"""

import random
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count
from typing import TypeVar

from pydantic import Field

from ablate.experiments.design.arms import Arm
from ablate.experiments.design.checks import design_problems, spec_problems
from ablate.experiments.design.equal_work import resolve_with_steps
from ablate.experiments.design.metrics import (
    PER_DEVICE,
    THROUGHPUT,
    WINDOW_METRICS,
)
from ablate.experiments.design.power import detectable_per_sd
from ablate.experiments.design.problems import pointer
from ablate.experiments.design.recipes import RECIPES
from ablate.experiments.design.rule import rule_digest
from ablate.experiments.design.spec import MIN_BLOCKS, AblationSpec
from ablate.experiments.digest import digest
from ablate.experiments.documents import Frozen
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.outcomes import CONTROL, VARIANT, SeedOrigin

Item = TypeVar("Item")


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
        """Devices that a trial occupies on all its nodes, which is also the device minutes per minute."""
        return NODE_CLASSES[self.node_class].occupied(self.devices) * self.baseline.config.nodes

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
    problems = [*resolution.problems, *spec_problems(spec, resolution.arms)]
    if problems:
        raise SpecError(problems)
    return _plan(spec, resolution.arms)


def replan(spec: AblationSpec, plan: Plan) -> Plan:
    """Return the plan of a spec that differs from that of `plan` in its number of blocks. Raises SpecError."""
    problems = list(design_problems(spec))
    if problems:
        raise SpecError(problems)
    return _plan(spec, plan.arms)


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


def running_order(trials: Sequence[Item], slices: int | None) -> Iterator[tuple[int, Item]]:
    """Yield (slice number, trial) in running order: forward through the block, then back, and so on; None: forever.

    After any even number of slices, a drift that is linear in time adds the same to every trial.
    """
    for number in count() if slices is None else range(slices):
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
    where both have as many. A printed metric is the line that its program prints, a
    logged one its name in the log.
    """
    if metric in WINDOW_METRICS:
        one, two = base.config, other.config
        if metric == PER_DEVICE and one.devices == two.devices:
            metric = THROUGHPUT
        if metric != PER_DEVICE and one.work == two.work:
            return "window"
    return base.config.origin_of(metric) or metric


def question_digest(variants: Iterable[str]) -> str | None:
    """Return the digest of a set of question digests; None for an empty one."""
    distinct = sorted(set(variants))
    return digest(distinct) if distinct else None
