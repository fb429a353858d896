"""Ablation views for the tests of reports: a real spec, plan and judge over seeded, realistic receipts."""

import dataclasses
import json
import math
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

from ablate.experiments.analysis.judge import judge
from ablate.experiments.design.arms import Arm
from ablate.experiments.design.kinds.kind import ArmConfig
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import BlockPlan, Plan, make_plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import AblationState, Outcome, TrialState
from ablate.experiments.records.circumstances import CALIBRATED, UNCALIBRATED, Circumstances
from ablate.experiments.records.receipts import Memory, Receipt
from ablate.experiments.reporting.view import AblationView, TrialView
from ablate.model.measurements import KernelFacts, Step, StepTrace
from tests.factories import NOTHING_HAPPENED, VALIDATION_S, clocked, make_receipt, observed_facts

START = datetime(2026, 11, 20, 9, 30, tzinfo=UTC)
GIB = 2**30
QUESTION = "Does caching PsiV raise step throughput without costing headroom or loss?"
RAN = frozenset({Outcome.MEASURED, Outcome.INVALID})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """Difference of one arm from the baseline."""

    gates: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    speed_pct: float = 0.0
    """Change of throughput."""
    memory_gib: float = 0.0
    loss: float = 0.0
    """Added to the loss at every step."""
    outcome: Outcome = Outcome.MEASURED
    message: str | None = None
    dead_gate: str = ""
    """A boolean gate that was not live."""


EFFECTS: dict[str, Effect] = {
    "baseline": Effect(),
    "psiv-on": Effect(gates={"psiv_cache": True}, speed_pct=2.4, memory_gib=5.14),
    "chunk-32": Effect(gates={"chunk_size": 32}, speed_pct=-3.1, memory_gib=-1.4, loss=2e-4),
    "tma": Effect(
        gates={"tma": True},
        outcome=Outcome.REFUSED,
        message="Gate tma was requested as true and observed as false: the binary holds no TMA instruction",
        dead_gate="tma",
    ),
    "psiv-chunk-64": Effect(
        gates={"psiv_cache": True, "chunk_size": 64},
        outcome=Outcome.OOM,
        message="Out of memory at step 0: 139.2 GiB reserved of 139.8 GiB",
        memory_gib=24.3,
    ),
}


def many(count: int) -> dict[str, Effect]:
    """Return the baseline and `count` variants that a CPU can run, each 0.1 % faster than the one before."""
    gates = [
        {"chunk_size": chunk, "psiv_cache": cache, "loss": loss, "compile": compiled}
        for chunk, cache, loss, compiled in product(
            (8, 32, 64, 128, 256), (False, True), ("dense", "chunked"), (False, True)
        )
    ]
    return {"baseline": Effect()} | {
        f"v{i:02}": Effect(gates=own, speed_pct=0.1 * i) for i, own in enumerate(gates[:count])
    }


def spec_text(
    arms: Mapping[str, Effect],
    *,
    num_blocks: int,
    node_class: str,
    timed: int,
    primary: str = "tokens_per_s",
    val_every: int = 0,
) -> str:
    """Return the spec as JSON text."""
    cpu = node_class == "cpu"
    values = {
        "ablation": "psiv-cache",
        "question": QUESTION,
        "workload": {
            "recipe": "hybrid-tiny" if cpu else "hybrid-ref-h200",
            "steps": {"warmup": 3, "warmup_s": 0, "timed": timed, "val_rows": 8, "val_every": val_every},
        },
        "baseline": {"gates": {"chunk_size": 16} if cpu else {"chunk_size": 16, "tma": False}},
        "variants": {name: {"gates": dict(effect.gates)} for name, effect in arms.items() if name != "baseline"},
        "design": {"seeds": [1, 2, 3], "blocks": {"count": num_blocks}, "order_seed": 20261120},
        "placement": {"node_class": node_class},
        "verdict": {
            "primary": {"metric": primary, "margin": "0.5%", "adopt_if": "1.5%"},
            "require": [
                {"metric": "peak_allocated_gib", "max_delta": 6.0},
                {"metric": "loss_step1", "max_delta": 0.001},
            ],
        },
    }
    return json.dumps(values, indent=2)


def _steps(chance: random.Random, config: ArmConfig, speed: float, effect: Effect, seed: int) -> tuple[Step, ...]:
    cpu = config.model.scan.lane == "reference"
    tokens, base_s = (512, 0.21) if cpu else (32_768, 0.421)
    phases = ["compile"] + ["warmup"] * config.steps.warmup + ["timed"] * config.steps.timed
    slow = {0: 6.5, 1: 1.35, 2: 1.08, 3: 1.02}
    clock = chance.gauss(1740, 9)
    return clocked(
        [
            Step(
                index=i,
                began_s=0.0,
                ended_s=0.0,
                phase=phase,  # type: ignore[arg-type]  # one of the literals
                seconds=base_s / speed * slow.get(i, 1.0) * math.exp(chance.gauss(0, 0.004)),
                tokens=tokens,
                loss=4.2
                + 4.1 * math.exp(-i / 9)
                + 0.02 * seed
                + 0.01 * math.sin(i * seed)
                + effect.loss * i
                + (0 if cpu or i == 0 else chance.gauss(0, 4e-4)),
                grad_norm=1.0 + 3.0 * math.exp(-i / 6),
                clock_mhz=None if cpu else clock + chance.gauss(0, 4),
            )
            for i, phase in enumerate(phases)
        ],
        validated=config.steps.validated,
    )


def _environment(cpu: bool, chance: random.Random) -> dict[str, Any]:
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    if cpu:
        load = abs(chance.gauss(0.6, 0.25))
        return {"node_name": "two-core", "device_name": "Intel Xeon, 2 cores", "load_average_before": load} | {
            "versions": versions
        }
    return {
        "node_name": "h200-03",
        "node_class": "h200",
        "device_name": "NVIDIA H200",
        "device_serial": "1652923041577",
        "git_commit": "43b7f4e91c0de5a3b1f9d7c2e8a6405f3b2d1c09",
        "versions": versions | {"cuda": "13.0", "driver": "580.82.07", "tilelang": "0.1.15"},
        "load_average_before": None,
        "throttle": {**NOTHING_HAPPENED, "sw_power_cap": 2.5},
    }


KERNELS = (
    {"name": "mimo_fwd_inter", "registers": 168, "shared_bytes": 65_536, "wgmma": 96, "tma_loads": 24},
    {"name": "mimo_bwd_dqkv", "registers": 232, "shared_bytes": 107_008, "wgmma": 288, "tma_loads": 48},
)


def kernels_of(arm: Arm) -> tuple[dict[str, object], ...]:
    """The forward kernel is every arm's own, the backward kernel is shared."""
    codes = (f"{arm.name:0<64}", "b" * 64)
    return tuple({**kernel, "binary_sha256": code} for kernel, code in zip(KERNELS, codes, strict=True))


def _slot(config: ArmConfig, cpu: bool) -> timedelta:
    """Return the time slot of every trial: a little more than the slowest trial takes."""
    steps = 12 + config.steps.warmup + config.steps.timed
    return timedelta(seconds=12 + 1.2 * (0.21 if cpu else 0.421) * steps)


def _receipt(
    the_plan: Plan, block: BlockPlan, arm: Arm, effect: Effect, noise: float, nodes: Mapping[str, float] | None = None
) -> Receipt:
    cpu = the_plan.node_class == "cpu"
    chance = random.Random(f"{arm.name}/{block.index}")  # noqa: S311  # not for secrets
    nodes = nodes or {}
    node = sorted(nodes)[block.index % len(nodes)] if nodes else None
    speed = (1 + effect.speed_pct / 100) * math.exp(chance.gauss(0, noise)) * (1 - 0.0006 * block.index)
    speed *= nodes.get(node or "", 1.0)
    steps = _steps(chance, arm.config, speed, effect, block.seed) if effect.outcome in RAN else ()
    validated = arm.config.steps.validated
    took_s = sum(step.seconds for step in steps) + VALIDATION_S * len(validated)
    started = START + _slot(arm.config, cpu) * (block.index * len(the_plan.arms) + block.order.index(arm.name))
    allocated = int((0.31 if cpu else 104.1 + effect.memory_gib) * GIB)
    live = {**arm.gates, effect.dead_gate: False} if effect.dead_gate else arm.gates
    return make_receipt(
        the_plan,
        block,
        arm,
        ids={"ablation": "abl_01JD3Q8V6N", "node": "nod_01JD3"},
        outcome=effect.outcome,
        message=effect.message,
        environment=_environment(cpu, chance) | ({"node_name": node} if node else {}),
        facts=observed_facts(live),
        steps=steps,
        loss_val=steps[-1].loss + 0.06 if steps else None,
        val_losses=[step.loss + 0.06 for step in steps if step.index in validated],
        memory=Memory(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=int(allocated * 1.08),
            limit_bytes=16 * GIB if cpu else int(139.8 * GIB),
        ),
        compile_s=4.1,
        compile_cache_hit=block.index > 0,
        kernels=() if cpu else kernels_of(arm),
        parameters=1_208_832 if cpu else 101_255_008,
        flops_per_step=5_000_000_000 if cpu else 130_000_000_000_000,
        started_at=started.isoformat().replace("+00:00", "Z"),
        training_s=took_s + 2.0,
        wall_s=took_s + 9.0,
    )


def view(
    *,
    arms: Mapping[str, Effect] = EFFECTS,
    num_blocks: int = 10,
    node_class: str = "h200",
    calibrated: bool = True,
    timed: int = 20,
    noise: float = 0.0035,
    primary: str = "tokens_per_s",
    nodes: Mapping[str, float] | None = None,
    val_every: int = 0,
) -> AblationView:
    """Build a completed ablation with a receipt for every trial, and its verdict.

    `noise` is the standard deviation of ln(speed) between trials. `nodes` (name -> relative speed) take blocks in turn.
    Needs at least six blocks.
    """
    text = spec_text(
        arms, num_blocks=num_blocks, node_class=node_class, timed=timed, primary=primary, val_every=val_every
    )
    spec = parse_spec(text.encode(), "application/json")
    the_plan = make_plan(spec)
    by_name = {arm.name: arm for arm in the_plan.arms}
    receipts = [
        _receipt(the_plan, block, by_name[name], arms[name], noise, nodes)
        for block in the_plan.blocks
        for name in block.order
    ]
    circumstances = CALIBRATED if calibrated else UNCALIBRATED
    return judged_view(spec, the_plan, receipts, circumstances, ablation_id="abl_01JD3Q8V6N", spec_text=text)


def trial_of(receipt: Receipt) -> TrialView:
    """Return a finished trial with its receipt."""
    return TrialView(
        trial_id=receipt.ids.trial,
        block_index=receipt.ids.block_index,
        arm=receipt.arm,
        position=receipt.ids.position,
        state=TrialState.DONE,
        attempt_id=receipt.ids.attempt,
        receipt=receipt,
    )


def judged_view(
    spec: AblationSpec,
    the_plan: Plan,
    receipts: Sequence[Receipt],
    circumstances: Circumstances = CALIBRATED,
    *,
    ablation_id: str = "abl_1",
    spec_text: str = '{"workload": {}}',
) -> AblationView:
    """Return a completed ablation with the verdict on its receipts."""
    return AblationView(
        ablation_id=ablation_id,
        name=spec.ablation,
        question=spec.question,
        state=AblationState.COMPLETED,
        created_at="2026-11-20T09:28:11Z",
        spec_text=spec_text,
        content_type="application/json",
        spec_digest=spec.digest,
        plan=the_plan,
        verdict=judge(the_plan, spec, receipts, circumstances),
        trials=tuple(map(trial_of, receipts)),
    )


def with_outcomes(whole: AblationView, ended: Mapping[tuple[str, int], Outcome | None]) -> AblationView:
    """Replace trials, by arm and block index, by failed ones with their own reasons, and judge again.

    The outcome None is a trial without a receipt.
    """
    plan = whole.plan
    trials = tuple(
        _ended(plan, t, ended[t.arm, t.block_index]) if (t.arm, t.block_index) in ended else t for t in whole.trials
    )
    receipts = [trial.receipt for trial in trials if trial.receipt is not None]
    return dataclasses.replace(whole, trials=trials, verdict=judge(plan, spec_of(whole), receipts, CALIBRATED))


def why(arm: str, block_index: int, outcome: Outcome | None) -> str:
    """Return the reason that `with_outcomes` gives."""
    return f"{arm} in block {block_index + 1} is {outcome or 'lost'}"


def _ended(plan: Plan, trial: TrialView, outcome: Outcome | None) -> TrialView:
    reason = why(trial.arm, trial.block_index, outcome)
    if outcome is None:
        return dataclasses.replace(trial, state=TrialState.FAILED, receipt=None, reason=reason)
    block, arm = plan.blocks[trial.block_index], plan.arm_by_name[trial.arm]
    receipt = _receipt(plan, block, arm, Effect(outcome=outcome, message=reason), 0.0035)
    return dataclasses.replace(trial, receipt=receipt)


def spec_of(whole: AblationView) -> AblationSpec:
    """Return the spec that a view was made from."""
    return parse_spec(whole.spec_text.encode(), "application/json")


def cpu_view(**changes: Any) -> AblationView:
    """Build the small CPU case: one variant, an uncalibrated node class, no clocks and no kernel table."""
    arms = {name: EFFECTS[name] for name in ("baseline", "psiv-on")}
    values = {"arms": arms, "node_class": "cpu", "calibrated": False, "num_blocks": 6, "timed": 10}
    return view(**{**values, **changes})


def first_blocks(whole: AblationView, count: int, *, state: AblationState = AblationState.RUNNING) -> AblationView:
    """Return the view with receipts for its first `count` blocks only, and without a verdict."""
    trials = tuple(
        trial
        if trial.block_index < count
        else dataclasses.replace(trial, state=TrialState.QUEUED, attempt_id=None, receipt=None)
        for trial in whole.trials
    )
    return dataclasses.replace(whole, state=state, verdict=None, trials=trials)


def unfinished(state: AblationState, *, done_blocks: int = 0) -> AblationView:
    """Build an ablation in `state` without a verdict, with receipts for the first `done_blocks` blocks only."""
    return first_blocks(view(), done_blocks, state=state)


HOSTILE = (
    "</title><script>alert(1)</script><img src=https://example.org/x onerror=alert(2)> & \"quoted\" 'too' $x^2$ {{ 7 }}"
)


def hostile() -> AblationView:
    """Build a view in which every free text contains markup."""
    whole = cpu_view()
    renamed = {arm.name: f"{arm.name}{HOSTILE}" for arm in whole.plan.arms}
    arms = tuple(arm.model_copy(update={"name": renamed[arm.name]}) for arm in whole.plan.arms)
    blocks = tuple(
        block.model_copy(update={"order": tuple(renamed[name] for name in block.order)}) for block in whole.plan.blocks
    )
    outcomes = [Outcome.INVALID, *[Outcome.MEASURED] * len(whole.trials)]
    trials = tuple(
        dataclasses.replace(
            trial,
            arm=renamed[trial.arm],
            receipt=trial.receipt
            and trial.receipt.model_copy(update={"arm": renamed[trial.arm], "message": HOSTILE, "outcome": outcome}),
        )
        for trial, outcome in zip(whole.trials, outcomes, strict=False)
    )
    verdict = whole.verdict
    if verdict is None:
        raise AssertionError("the CPU view has a verdict")
    changes = {
        "baseline": renamed["baseline"],
        "arms": {renamed[name]: summary for name, summary in verdict.arms.items()},
        "variants": tuple(
            v.model_copy(update={"arm": renamed[v.arm], "reason": HOSTILE, "notes": (HOSTILE,)})
            for v in verdict.variants
        ),
    }
    return dataclasses.replace(
        whole,
        name=HOSTILE,
        question=HOSTILE,
        spec_text=HOSTILE,
        plan=whole.plan.model_copy(update={"arms": arms, "blocks": blocks}),
        verdict=verdict.model_copy(update=changes),
        trials=trials,
    )


def trace(peak_mib: int) -> StepTrace:
    """Return a profiled step over time."""
    return StepTrace(
        names=("aten::mm", "<script>alert(1)</script>"),
        tracks=("processor, thread 1", "CUDA 0, stream 7"),
        events=((0, 0, 0.0, 100.5), (1, 1, 10.0, 50.0)),
        left_out=3,
        memory=((1.0, 2**20), (50.0, peak_mib * 2**20), (150.0, 0)),
    )


def kernel_facts(registers: int, *, us: float = 400.0) -> KernelFacts:
    """Return what torch's profiler knows of a kernel that multiplies matrices."""
    return KernelFacts(
        registers=registers,
        shared_bytes=98304,
        block=(128, 1, 1),
        grid=(32, 32, 1),
        launches=1,
        occupancy=0.125,
        product_flops=4 * 2 * 4096**3,
        product_bytes=4 * 6 * 4096**2,
        product_us=us,
    )


def traced(view: AblationView) -> AblationView:
    """Return the ablation with a profiled step in each receipt, in those of the first block also over time."""

    def with_trace(receipt: Receipt) -> Receipt:
        own = receipt.step_kernels is not None or receipt.program is not None
        changes: dict[str, Any] = {} if own else {"step_kernels": (("aten::mm", 4, 400.0), ("aten::exp", 2, 50.0))}
        changes["kernel_facts"] = {} if own else {"aten::mm": kernel_facts(168 if receipt.arm == "baseline" else 128)}
        if receipt.ids.block_index == 0:
            changes["step_trace"] = trace(5 if receipt.arm == "baseline" else 7)
        return receipt.model_copy(update=changes)

    receipts = (one.receipt for one in view.trials if one.receipt is not None)
    return dataclasses.replace(view, trials=tuple(trial_of(with_trace(receipt)) for receipt in receipts))
