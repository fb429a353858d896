"""Synthetic ablation views, seeded and realistic, for the tests of what people read: report, pictures, MLflow."""

import dataclasses
import math
import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from experiments.analysis.verdicts import Comparison, RequirementResult, VariantVerdict, Verdict
from experiments.design.arms import Arm
from experiments.design.gates import GATES
from experiments.design.plan import BlockPlan, Plan
from experiments.digest import digest
from experiments.outcomes import Decision, FailureClass, Outcome, VerdictWord
from experiments.records.device_events import DeviceEvents
from experiments.records.receipts import (
    Digests,
    Environment,
    GateReading,
    Ids,
    Memory,
    Receipt,
    Step,
    Summary,
)
from experiments.reporting.view import AblationView, TrialView
from kernels.scan import ScanFact
from model.facts import ModelFact

START = datetime(2026, 11, 20, 9, 30, tzinfo=UTC)
GIB = 2**30
T95 = {5: 2.571, 9: 2.262}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""
T90 = {5: 2.015, 9: 1.833}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """How one arm differs from the baseline."""

    gates: Mapping[str, Any]
    speed_pct: float = 0.0
    memory_gib: float = 0.0
    loss: float = 0.0
    outcome: Outcome = Outcome.MEASURED
    message: str | None = None


EFFECTS: dict[str, Effect] = {
    "base": Effect(gates={"schedule": "chunk_parallel", "chunk_size": 16, "psiv_cache": False, "tma": False}),
    "psiv-on": Effect(
        gates={"schedule": "chunk_parallel", "chunk_size": 16, "psiv_cache": True, "tma": False},
        speed_pct=2.4,
        memory_gib=5.14,
    ),
    "chunk-32": Effect(
        gates={"schedule": "chunk_parallel", "chunk_size": 32, "psiv_cache": False, "tma": False},
        speed_pct=-3.1,
        memory_gib=-1.4,
        loss=2e-4,
    ),
    "tma": Effect(
        gates={"schedule": "chunk_parallel", "chunk_size": 16, "psiv_cache": False, "tma": True},
        outcome=Outcome.REFUSED,
        message="Gate tma was requested as true and observed as false: the binary holds no TMA instruction",
    ),
    "psiv-chunk-64": Effect(
        gates={"schedule": "chunk_parallel", "chunk_size": 64, "psiv_cache": True, "tma": False},
        outcome=Outcome.OOM,
        message="Out of memory at step 0: 139.2 GiB reserved of 139.8 GiB",
        memory_gib=24.3,
    ),
}


def plan(*, arms: Mapping[str, Effect] = EFFECTS, num_blocks: int = 6, node_class: str = "h200") -> Plan:
    """Build a plan with shuffled, seeded orders."""
    chance = random.Random(7)  # noqa: S311  # not for secrets
    names = list(arms)
    blocks = tuple(
        BlockPlan(index=i, seed=1 + i % 3, order=tuple(chance.sample(names, len(names)))) for i in range(num_blocks)
    )
    return Plan(
        ablation="psiv-cache",
        spec_digest=digest("spec"),
        rule_digest=digest("rule"),
        node_class=node_class,
        devices=1,
        arms=tuple(
            Arm(
                name=name,
                role="variant" if i else "baseline",
                gates=dict(effect.gates),
                config={"micro_batch": 8, "data": {"seq_len": 8192}, "model": {"d_model": 2048, "scan": effect.gates}},
                digest=digest([name, dict(effect.gates)]),
            )
            for i, (name, effect) in enumerate(arms.items())
        ),
        blocks=blocks,
        mde_pct_per_sd_pct=1.435,
        expected_device_minutes=72.0,
    )


def _steps(chance: random.Random, speed: float, effect: Effect, seed: int, timed: int, cpu: bool) -> tuple[Step, ...]:
    tokens, base_s = (1024, 0.21) if cpu else (65536, 0.842)
    phases = ["compile"] + ["warmup"] * 3 + ["timed"] * timed
    slow = {0: 6.5, 1: 1.35, 2: 1.08, 3: 1.02}
    clock = chance.gauss(1740, 9)
    return tuple(
        Step(
            index=i,
            phase=phase,  # type: ignore[arg-type]  # one of the literals above
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
    )


def _summary(steps: tuple[Step, ...], cpu: bool) -> Summary:
    timed = [step for step in steps if step.phase == "timed"]
    seconds = sum(step.seconds for step in timed)
    tflops = 0.0412 if cpu else 0.311 * len(timed) / seconds * 989
    return Summary(
        timed_steps=len(timed),
        step_s_mean=seconds / len(timed),
        step_s_median=sorted(step.seconds for step in timed)[len(timed) // 2],
        tokens_per_s=sum(step.tokens for step in timed) / seconds,
        model_tflops_per_s=tflops,
        mfu=None if cpu else tflops / 989,
        loss_step1=steps[0].loss,
        loss_final=sum(step.loss for step in timed[-3:]) / 3,
        loss_val=timed[-1].loss + 0.06,
    )


def _environment(cpu: bool, chance: random.Random) -> Environment:
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    if not cpu:
        versions |= {"cuda": "13.0", "driver": "580.82.07", "tilelang": "0.1.15"}
    return Environment(
        node_name="two-core" if cpu else "h200-03",
        node_class="cpu" if cpu else "h200",
        device_name="Intel Xeon, 2 cores" if cpu else "NVIDIA H200",
        device_serial=None if cpu else "1652923041577",
        git_commit="43b7f4e91c0de5a3b1f9d7c2e8a6405f3b2d1c09",
        git_dirty_digest=None,
        versions=versions,
        cpu_threads=2,
        load_average_before=abs(chance.gauss(0.6, 0.25)) if cpu else None,
        throttle=None if cpu else DeviceEvents(sw_power_cap=2.5, ecc_uncorrected=0),
    )


KERNELS = (
    {"name": "mimo_fwd_inter", "registers": 168, "shared_bytes": 65_536, "wgmma": 96, "tma_loads": 24},
    {"name": "mimo_bwd_dqkv", "registers": 232, "shared_bytes": 107_008, "wgmma": 288, "tma_loads": 48},
)


def kernels_of(arm: Arm) -> tuple[dict[str, object], ...]:
    """The forward kernel is every arm's own, the backward kernel is shared."""
    codes = (f"{arm.name:0<64}", "b" * 64)
    return tuple({**kernel, "binary_sha256": code} for kernel, code in zip(KERNELS, codes, strict=True))


def _receipt(the_plan: Plan, block: BlockPlan, arm: Arm, effect: Effect, timed: int) -> Receipt:
    cpu = the_plan.node_class == "cpu"
    chance = random.Random(f"{block.index}/{arm.name}")  # noqa: S311  # not for secrets
    drift = 1 - 0.0006 * block.index
    speed = math.exp(effect.speed_pct / 100 + chance.gauss(0, 0.0035)) * drift
    ran = effect.outcome in {Outcome.MEASURED, Outcome.INVALID}
    steps = _steps(chance, speed, effect, block.seed, timed, cpu) if ran else ()
    position = block.order.index(arm.name)
    started = START + timedelta(minutes=6 * block.index, seconds=70 * position)
    limit = 16 * GIB if cpu else int(139.8 * GIB)
    allocated = int((0.31 if cpu else 104.1 + effect.memory_gib) * GIB)
    fields: dict[str, Any] = {
        "ids": Ids(
            ablation="abl_01JD3Q8V6N",
            block=f"blk_{block.index:04}",
            block_index=block.index,
            position=position,
            trial=f"trl_{block.index:04}_{arm.name}",
            attempt=f"att_{block.index:04}",
            node="nod_01JD3",
            device="0",
        ),
        "arm": arm.name,
        "role": arm.role,
        "seed": block.seed,
        "outcome": effect.outcome,
        "failure_class": _failure_class(effect.outcome),
        "message": effect.message,
        "digests": Digests(
            spec=the_plan.spec_digest,
            rule=the_plan.rule_digest,
            arm=arm.digest,
            code=digest("code"),
            data=digest("data"),
        ),
        "config": {**arm.config, "seed": block.seed},
        "environment": _environment(cpu, chance),
        "gates": {
            name: GateReading(
                requested=value,
                observed=False if effect.outcome is Outcome.REFUSED and name == "tma" else value,
                live=not (effect.outcome is Outcome.REFUSED and name == "tma"),
                how=GATES[name].attested_by,
            )
            for name, value in arm.gates.items()
        },
        "facts": {ScanFact.LANE: "reference" if cpu else "cuda", ModelFact.ATTENTION: "sdpa"},
        "steps": steps,
        "summary": _summary(steps, cpu) if ran else None,
        "memory": Memory(peak_allocated_bytes=allocated, peak_reserved_bytes=int(allocated * 1.08), limit_bytes=limit),
        "compile_s": 4.1,
        "compile_cache_hit": block.index > 0,
        "kernels": () if cpu else kernels_of(arm),
        "parameters": 1_208_832 if cpu else 1_312_555_008,
        "flops_per_step": 43_000_000_000,
        "started_at": started.isoformat().replace("+00:00", "Z"),
        "training_s": sum(step.seconds for step in steps) + 2.0,
        "wall_s": sum(step.seconds for step in steps) + 9.0,
    }
    unsealed = Receipt(**fields, digest="")
    return unsealed.model_copy(update={"digest": digest(unsealed.model_dump(mode="json", exclude={"digest"}))})


def _failure_class(outcome: Outcome) -> FailureClass | None:
    return {
        Outcome.OOM: FailureClass.OOM,
        Outcome.REFUSED: FailureClass.GATE_REFUSED,
        Outcome.INVALID: FailureClass.INVALID_MEASUREMENT,
        Outcome.FAILED: FailureClass.NUMERICS,
    }.get(outcome)


def _differences(receipts: list[Receipt], arm: str) -> list[float]:
    speed = {(r.ids.block_index, r.arm): r.summary.tokens_per_s for r in receipts if r.summary}
    return [100 * math.log(v / speed[i, "base"]) for (i, name), v in sorted(speed.items()) if name == arm]


def _comparison(receipts: list[Receipt], arm: str) -> Comparison:
    d = _differences(receipts, arm)
    n = len(d)
    mean = sum(d) / n
    sd = math.sqrt(sum((x - mean) ** 2 for x in d) / (n - 1))
    wide, narrow = T95[n - 1] * sd / math.sqrt(n), T90[n - 1] * sd / math.sqrt(n)
    return Comparison(
        metric="tokens_per_s",
        blocks=n,
        delta_pct=mean,
        median_pct=sorted(d)[n // 2],
        ci_low_pct=mean - wide,
        ci_high_pct=mean + wide,
        ci90_low_pct=mean - narrow,
        ci90_high_pct=mean + narrow,
        p_sign_flip=2 / 2**n,
        p_holm=4 / 2**n,
        sd_pct=sd,
        mde_pct=1.435 * sd,
        differences_pct=tuple(d),
    )


def _variant(receipts: list[Receipt], arm: Arm, effect: Effect, calibrated: bool, num_blocks: int) -> VariantVerdict:
    if effect.outcome is not Outcome.MEASURED:
        return VariantVerdict(
            arm=arm.name,
            verdict=VerdictWord(effect.outcome.value),
            measured=VerdictWord(effect.outcome.value),
            reason=f"{effect.message}.",
            decision=Decision.REJECT if effect.outcome is Outcome.OOM else Decision.INVALID,
            primary=None,
            gates_live=f"{num_blocks * (3 if effect.outcome is Outcome.REFUSED else 4)}/{num_blocks * 4}",
        )
    measured = VerdictWord.BETTER if effect.speed_pct > 0 else VerdictWord.WORSE
    good = measured is VerdictWord.BETTER
    return VariantVerdict(
        arm=arm.name,
        verdict=measured if calibrated else VerdictWord.INCONCLUSIVE,
        measured=measured,
        reason="The interval excludes zero and the estimate is beyond the margin of 0.5 %."
        if calibrated
        else "The samples say better, but node class cpu has no A/A calibration for this workload.",
        decision=(Decision.ADOPT if good else Decision.REJECT) if calibrated else Decision.INCONCLUSIVE,
        primary=_comparison(receipts, arm.name),
        requirements=(
            RequirementResult(
                metric="peak_reserved_gib",
                rule="max_delta 6.0 GiB",
                passed=effect.memory_gib * 1.08 <= 6.0,
                detail=f"{effect.memory_gib * 1.08:+.2f} GiB",
            ),
            RequirementResult(
                metric="loss_step1", rule="identical", passed=True, detail=f"bit-identical in {num_blocks} blocks"
            ),
        ),
        gates_live=f"{num_blocks * 4}/{num_blocks * 4}",
        blocks_needed=None if calibrated else 10,
        device_minutes_needed=None if calibrated else 48.0,
        notes=() if calibrated else ("Run `ablate aa cpu` to calibrate this node class.",),
    )


def _verdict(the_plan: Plan, receipts: list[Receipt], arms: Mapping[str, Effect], calibrated: bool) -> Verdict:
    n = len(the_plan.blocks)
    return Verdict(
        ablation="abl_01JD3Q8V6N",
        spec_digest=the_plan.spec_digest,
        rule_digest=the_plan.rule_digest,
        rule={
            "primary": {"metric": "tokens_per_s", "margin_pct": 0.5, "adopt_if_pct": 1.5},
            "require": [{"metric": "peak_reserved_gib", "max_delta": 6.0}],
            "blocks": n,
            "comparison": {"alpha": 0.05, "test": "exact sign flip"},
        },
        calibrated=calibrated,
        blocks_planned=n,
        blocks_counted=n,
        node_class=the_plan.node_class,
        baseline="base",
        variants=tuple(_variant(receipts, arm, arms[arm.name], calibrated, n) for arm in the_plan.arms[1:]),
        arms={},
        digest=digest("verdict"),
    )


SPEC_TEXT = """\
ablation: psiv-cache
question: Does caching PsiV raise step throughput without costing headroom or loss?
workload:
  recipe: hybrid-ref-h200
  overrides: {seq_len: 8192, micro_batch: 8}
  steps: {warmup: 3, timed: 20}
baseline: {gates: {schedule: chunk_parallel, chunk_size: 16}}
variants:
  psiv-on: {gates: {psiv_cache: true}}
  chunk-32: {gates: {chunk_size: 32}}
design: {seeds: [1, 2, 3], blocks: 6, order_seed: 20261120}
placement: {node_class: h200, devices: 1}
verdict:
  primary: {metric: tokens_per_s, margin: 0.5%, adopt_if: 1.5%}
"""


def view(
    *,
    arms: Mapping[str, Effect] = EFFECTS,
    num_blocks: int = 10,
    node_class: str = "h200",
    calibrated: bool = True,
    timed: int = 20,
) -> AblationView:
    """Build a completed ablation with a receipt for every trial and a verdict."""
    the_plan = plan(arms=arms, num_blocks=num_blocks, node_class=node_class)
    by_name = {arm.name: arm for arm in the_plan.arms}
    receipts = [
        _receipt(the_plan, block, by_name[name], arms[name], timed) for block in the_plan.blocks for name in block.order
    ]
    return AblationView(
        ablation_id="abl_01JD3Q8V6N",
        name="psiv-cache",
        question="Does caching PsiV raise step throughput without costing headroom or loss?",
        state="completed",
        created_at="2026-11-20T09:28:11Z",
        spec_text=SPEC_TEXT,
        spec_digest=the_plan.spec_digest,
        plan=the_plan,
        verdict=_verdict(the_plan, receipts, arms, calibrated) if num_blocks - 1 in T95 else None,
        trials=tuple(
            TrialView(
                trial_id=r.ids.trial,
                block_index=r.ids.block_index,
                arm=r.arm,
                position=r.ids.position,
                state="done",
                attempt_id=r.ids.attempt,
                receipt=r,
            )
            for r in receipts
        ),
    )


def cpu_view() -> AblationView:
    """Build the small CPU case: one variant, an uncalibrated node class, no clocks and no kernel table."""
    return view(
        arms={name: EFFECTS[name] for name in ("base", "psiv-on")},
        node_class="cpu",
        calibrated=False,
        num_blocks=6,
        timed=10,
    )


def unfinished(state: str, *, done_blocks: int = 0) -> AblationView:
    """Build an ablation in `state` without a verdict, with receipts for the first `done_blocks` blocks only."""
    full = view()
    trials = tuple(
        trial
        if trial.block_index < done_blocks
        else dataclasses.replace(trial, state="queued", attempt_id=None, receipt=None)
        for trial in full.trials
    )
    return dataclasses.replace(full, state=state, verdict=None, trials=trials)


HOSTILE = (
    "</title><script>alert(1)</script><img src=https://example.org/x onerror=alert(2)> & \"quoted\" 'too' $x^2$ {{ 7 }}"
)


def hostile() -> AblationView:
    """Build a view in which every free text tries to be markup."""
    whole = cpu_view()
    arms = tuple(arm.model_copy(update={"name": f"{arm.name}{HOSTILE}"}) for arm in whole.plan.arms)
    renamed = {arm.name: f"{arm.name}{HOSTILE}" for arm in whole.plan.arms}
    blocks = tuple(
        block.model_copy(update={"order": tuple(renamed[name] for name in block.order)}) for block in whole.plan.blocks
    )
    trials = tuple(
        dataclasses.replace(
            trial,
            arm=renamed[trial.arm],
            receipt=trial.receipt
            and trial.receipt.model_copy(update={"arm": renamed[trial.arm], "message": HOSTILE, "outcome": outcome}),
        )
        for trial, outcome in zip(
            whole.trials, [Outcome.INVALID, *[Outcome.MEASURED] * len(whole.trials)], strict=False
        )
    )
    verdict = whole.verdict
    if verdict is None:
        raise AssertionError("the CPU view has a verdict")
    variants = tuple(
        v.model_copy(update={"arm": renamed[v.arm], "reason": HOSTILE, "notes": (HOSTILE,)}) for v in verdict.variants
    )
    return dataclasses.replace(
        whole,
        name=HOSTILE,
        question=HOSTILE,
        spec_text=HOSTILE,
        plan=whole.plan.model_copy(update={"arms": arms, "blocks": blocks}),
        verdict=verdict.model_copy(update={"baseline": renamed["base"], "variants": variants}),
        trials=trials,
    )
