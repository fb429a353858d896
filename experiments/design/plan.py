"""Turn a spec into arms and blocks: resolved configurations, balanced random order, detectable effect."""

from collections.abc import Iterator

from experiments.design.arms import Arm
from experiments.design.order import orders
from experiments.design.plan_types import BlockPlan, Plan
from experiments.design.power import detectable_per_sd
from experiments.design.problems import pointer
from experiments.design.resolve import resolve
from experiments.design.rule import rule_digest
from experiments.design.spec import AblationSpec
from experiments.errors import SpecError, SpecProblem

__all__ = ["Arm", "BlockPlan", "Plan", "make_plan"]


def make_plan(spec: AblationSpec) -> Plan:
    """Return what `spec` will run. Raises SpecError with every problem that only shows when arms are resolved."""
    resolution = resolve(spec)
    problems = [*resolution.problems, *_requirement_problems(spec)]
    if problems:
        raise SpecError(problems)
    blocks = spec.design.blocks.number
    names = tuple(arm.name for arm in resolution.arms)
    seeds = spec.design.seeds
    running = orders(names, blocks=blocks, seed=spec.design.order_seed)
    return Plan(
        ablation=spec.ablation,
        spec_digest=spec.digest,
        rule_digest=rule_digest(spec),
        node_class=spec.placement.node_class,
        devices=spec.placement.devices,
        arms=resolution.arms,
        blocks=tuple(
            BlockPlan(index=index, seed=seeds[index % len(seeds)], order=order) for index, order in enumerate(running)
        ),
        mde_pct_per_sd_pct=detectable_per_sd(blocks),
        expected_device_minutes=None,
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
