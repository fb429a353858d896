"""Specs, plans and sealed receipts of commands."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ablate.experiments.design.arms import Arm
from ablate.experiments.design.kinds.gate_readings import declared_readings
from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import BlockPlan, Plan, make_plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.digest import canonical_json
from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records.program_report import OUT, LoggedCurve, ProgramReport
from ablate.experiments.records.receipts import (
    Digests,
    Environment,
    Ids,
    Memory,
    Receipt,
    seal,
    summarise,
)
from ablate.model.measurements import Step
from tests.factories import FIRST_TRIAL, GIB, with_changes

VALUES: dict[str, Any] = {
    "ablation": "fused-loss",
    "question": "Does the fused loss hurt the validation loss?",
    "workload": {
        "command": ["python", "train.py", "--seed", "{seed}"],
        "steps": {"warmup": 1, "timed": 4},
        "metrics": {"val_bpb": {"better": "lower"}},
    },
    "variants": {"fused": {"args": ["--loss=fused"]}},
    "design": {"seeds": [1, 2, 3, 4, 5, 6], "blocks": {"count": 6}, "order_seed": 7},
    "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
    "verdict": {"primary": {"metric": "val_bpb", "margin": "0.5%", "adopt_if": "1.5%"}},
}
"""A small valid spec of a command as plain values."""


def program_values(**changes: Any) -> dict[str, Any]:
    """Return VALUES with changed values; a key such as design__seeds names a nested value."""
    return with_changes(VALUES, changes)


def program_spec(**changes: Any) -> AblationSpec:
    """Return the spec of `program_values`."""
    return parse_spec(canonical_json(program_values(**changes)).encode(), "application/json")


def program_receipt(
    plan: Plan,
    block: BlockPlan,
    arm: Arm | str,
    *,
    reported: Mapping[str, float],
    kernels: Sequence[tuple[str, int, float]] = (),
    step_s: float = 0.02,
    more_loss: float = 0.0,
    curves: Mapping[str, LoggedCurve] | None = None,
    **changes: Any,
) -> Receipt:
    """Return a sealed receipt of a command without marks of its own clock; `changes` replace fields."""
    arm = plan.arm_by_name[arm] if isinstance(arm, str) else arm
    config = arm.config.with_seed(block.seed)
    assert isinstance(config, ProgramArm)
    outcome = Outcome(changes.get("outcome", Outcome.MEASURED))
    steps = tuple(
        Step(
            index=index,
            phase=config.steps.phase_of(index),
            seconds=step_s,
            tokens=100,
            loss=2.0 + block.seed / 100 - index / 1000 + more_loss,
            began_s=index * step_s,
            ended_s=(index + 1) * step_s,
        )
        for index in range(config.steps.total)
    )
    window_s = steps[-1].ended_s - steps[-config.steps.timed].began_s
    position = block.order.index(arm.name)
    fields: dict[str, Any] = {
        "ids": Ids(
            ablation="abl_program",
            block=f"blk_{block.index}",
            block_index=block.index,
            position=position,
            trial=f"trl_{block.index}_{arm.name}",
            attempt=f"att_{block.index}",
            node="nod_a",
            device="node-a/0",
        ),
        "arm": arm.name,
        "role": arm.role,
        "seed": block.seed,
        "outcome": outcome,
        "failure_class": None if outcome is Outcome.MEASURED else FailureClass.USER_ERROR,
        "digests": Digests(
            spec=plan.spec_digest, rule=plan.rule_digest, arm=arm.digest, code="sha256:code", data="sha256:data"
        ),
        "config": config,
        "environment": Environment(
            node_name="node-a",
            node_class=plan.node_class,
            device_name="CPU",
            device_serial=None,
            git_commit=None,
            git_dirty_digest=None,
            versions={"python": "3.11"},
            cpu_threads=2,
            peak_flops=None,
            load_average_before=0.1,
            foreign_load=0.02,
        ),
        "gates": declared_readings(arm.gates),
        "facts": {},
        "steps": steps,
        "warmup_passes": (),
        "summary": summarise(steps, flops_per_step=0, loss_val=None, peak_flops=None)
        if outcome is Outcome.MEASURED
        else None,
        "program": ProgramReport(
            argv=tuple(config.argv(out=OUT)),
            code=None if config.code is None else "sha256:tree",
            interpreter="CPython 3.11.9",
            packages="sha256:packages",
            seed=block.seed,
            ranks=1,
            window_s=window_s,
            window_seen_s=window_s,
            reported=reported,
            curves=curves or {},
            kernels=tuple(kernels),
            exit_code=0,
        ),
        "memory": Memory(peak_allocated_bytes=GIB, peak_reserved_bytes=GIB, limit_bytes=16 * GIB),
        "compile_s": 0.0,
        "compile_cache_hit": None,
        "parameters": 0,
        "flops_per_step": 0,
        "started_at": (FIRST_TRIAL + timedelta(hours=block.index, seconds=position * 4)).isoformat(),
        "training_began_s": 100.0,
        "training_s": 1.0,
        "wall_s": 3.0,
    }
    return seal({**fields, **changes})


def program_receipts(
    plan: Plan, values: Mapping[tuple[int, str], Mapping[str, float]], **changes: Any
) -> list[Receipt]:
    """Return receipts of all trials of `plan` that report `values` by (block, arm)."""
    return [
        program_receipt(plan, block, arm, reported=values[block.index, arm], **changes)
        for block in plan.blocks
        for arm in block.order
    ]


def plan_of(**changes: Any) -> tuple[AblationSpec, Plan]:
    """Return the spec of `program_values` and its plan."""
    spec = program_spec(**changes)
    return spec, make_plan(spec)
