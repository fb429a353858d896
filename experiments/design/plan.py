"""The plan: the arms and blocks of a spec, with seeds and running orders, and what they can detect."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from experiments.design.arms import Arm, resolve
from experiments.design.order import orders
from experiments.design.power import detectable_per_sd
from experiments.design.problems import pointer
from experiments.design.rule import rule_digest
from experiments.design.spec import AblationSpec
from experiments.documents import Frozen
from experiments.errors import SpecError, SpecProblem


class BlockPlan(Frozen):
    """One seed's arms in the order in which they run."""

    index: int
    """From 0; people are shown `block_number(index)`."""
    seed: int
    order: tuple[str, ...]
    """Arm names; every arm exactly once."""


class Plan(Frozen):
    """What a submitted spec will run. Stored whole; workers receive their block from it."""

    ablation: str
    spec_digest: str
    rule_digest: str
    """Digest of the verdict rule with the estimator: hashed before the first sample."""
    node_class: str
    devices: int
    arms: tuple[Arm, ...]
    """Baseline first."""
    blocks: tuple[BlockPlan, ...]
    mde_pct_per_sd_pct: float
    """Detectable effect in percent for each percent of sd of the paired difference (5 % two-sided, 80 % power)."""
    expected_device_minutes: float | None
    """From earlier receipts of the same arms; None when nothing is known."""

    @property
    def baseline(self) -> Arm:
        """The arm that variants are compared with."""
        return self.arms[0]

    @cached_property
    def arm_by_name(self) -> Mapping[str, Arm]:
        """Every arm by name."""
        return {arm.name: arm for arm in self.arms}


def make_plan(spec: AblationSpec) -> Plan:
    """Return what `spec` will run. Raises SpecError with every problem that only shows when arms are resolved."""
    resolution = resolve(spec)
    problems = [*resolution.problems, *_requirement_problems(spec)]
    if problems:
        raise SpecError(problems)
    return Plan(
        ablation=spec.ablation,
        spec_digest=spec.digest,
        rule_digest=rule_digest(spec),
        node_class=spec.placement.node_class,
        devices=spec.placement.devices,
        arms=resolution.arms,
        blocks=plan_blocks(spec, [arm.name for arm in resolution.arms]),
        mde_pct_per_sd_pct=detectable_per_sd(spec.design.blocks.number),
        expected_device_minutes=None,
    )


def plan_blocks(spec: AblationSpec, arms: Sequence[str]) -> tuple[BlockPlan, ...]:
    """Return the blocks of `spec` with the arms of these names: seeds in turn, balanced running orders."""
    seeds = spec.design.seeds
    running = orders(arms, blocks=spec.design.blocks.number, seed=spec.design.order_seed)
    return tuple(
        BlockPlan(index=index, seed=seeds[index % len(seeds)], order=order) for index, order in enumerate(running)
    )


def _requirement_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find requirements that no receipt of this design could meet: missing data fails."""
    blocks, seeds = spec.design.blocks.number, len(spec.design.seeds)
    for index, requirement in enumerate(spec.verdict.require):
        where = pointer("verdict", "require", index)
        if requirement.metric == "loss_val" and spec.workload.steps.val_rows == 0:
            hint = "set workload.steps.val_rows"
            yield SpecProblem(pointer=where, detail="loss_val is required, but steps.val_rows is 0", hint=hint)
        if requirement.rule in ("envelope", "as_claimed") and blocks < 2 * seeds:
            detail = f"rule '{requirement.rule}' compares with baseline repeats: every seed needs two blocks; "
            given = f"{blocks} blocks over {seeds} seeds"
            hint = f"use at least {2 * seeds} blocks, or at most {blocks // 2} seeds"
            yield SpecProblem(pointer=where, detail=detail + given, hint=hint)
