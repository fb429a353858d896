"""Factories that many tests share: specs, plans and sealed receipts with believable numbers."""

import copy
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ablate.experiments.analysis.placing import Kind, placed
from ablate.experiments.catalog.files import read_catalog_file
from ablate.experiments.design.arms import Arm
from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.experiments.design.kinds.kind import ArmConfig
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import BlockPlan, Plan
from ablate.experiments.design.plan import make_plan as plan_of
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records.compilation_report import CompilationReport, HbmPlan, Overflow
from ablate.experiments.records.receipts import Digests, Environment, Ids, Memory, Receipt, seal, summarise
from ablate.experiments.records.spec_code import pack_spec
from ablate.kernels.backends import NODE_CLASSES
from ablate.kernels.scan_switches import ScanFact
from ablate.model.counts import step_flops
from ablate.model.facts import ModelFact
from ablate.model.measurements import Step, Validation

GIB = 2**30
PAUSE_S = 1e-4
"""Pause between two steps."""
VALIDATION_S = 0.25
"""Seconds of a validation between two steps."""
FIRST_TRIAL = datetime(2026, 11, 20, 12, tzinfo=UTC)

SPEC: dict[str, Any] = {
    "ablation": "factory",
    "question": "Does caching PsiV or a larger chunk raise throughput?",
    "workload": {"recipe": "hybrid-tiny", "steps": {"warmup": 1, "warmup_s": 0, "timed": 4, "val_rows": 2}},
    "baseline": {"gates": {"chunk_size": 16}},
    "variants": {"psiv-on": {"gates": {"psiv_cache": True}}, "chunk-32": {"gates": {"chunk_size": 32}}},
    "design": {"seeds": [1, 2], "blocks": {"count": 6}, "order_seed": 7},
    "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
    "verdict": {"primary": {"metric": "tokens_per_s", "margin": "0.5%", "adopt_if": "1.5%"}},
}
"""A small valid spec as plain values."""


def spec_values(**changes: Any) -> dict[str, Any]:
    """Return SPEC with changed values; a key such as design__seeds names a nested value."""
    return with_changes(SPEC, changes)


def with_changes(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of plain values with changed ones; a key such as design__seeds names a nested value."""
    values = copy.deepcopy(dict(plain))
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = values
        for name in parents:
            target = target.setdefault(name, {})
        target[last] = value
    return values


def command_values(**changes: Any) -> dict[str, Any]:
    """As spec_values, with a command instead of a recipe."""
    base = {
        "workload": {
            "command": ["python", "train.py", "--seed", "{seed}"],
            "code": "/srv/lab",
            "steps": {"warmup": 2, "timed": 5},
        },
        "baseline": {},
        "variants": {"fused": {"args": ["--loss=fused"]}},
    }
    return spec_values(**{**base, **changes})


def catalog_spec(name: str) -> AblationSpec:
    """Return a spec of the catalog, whose folder of code was packed: one that never changes."""
    folder = Path(__file__).parent / "golden/code"
    packed = pack_spec(read_catalog_file(name), "application/yaml", folder)
    return on_cpu(packed.content, packed.content_type)


def on_cpu(content: bytes, content_type: str = "application/yaml") -> AblationSpec:
    """Return a spec, as a service places it that has nodes of class `cpu` only."""
    return placed(content, content_type, parse_spec(content, content_type), [Kind(node_class="cpu")])[2]


def make_spec(**changes: Any) -> AblationSpec:
    """Return a validated spec; `changes` as in spec_values, e.g. make_spec(design__blocks={"count": 12})."""
    return AblationSpec.model_validate(spec_values(**changes))


SUPERCHUNK_OF_SIZES, HEADS_IN_TURN_OF_SIZES = 1024, 4
"""Automatic choices of lane cuda for its reference shape."""


def make_plan(spec: AblationSpec | None = None) -> Plan:
    """Return the plan of `spec`, by default that of make_spec(): baseline, psiv-on, chunk-32 over 6 blocks."""
    return plan_of(spec or make_spec())


def observed_facts(gates: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded facts of an arm with `gates` when every gate is live."""
    facts: dict[str, Any] = {
        ScanFact.LANE: gates["lane"],
        ScanFact.SCHEDULE: gates["schedule"],
        ScanFact.DTYPE: gates["dtype"],
        ModelFact.ATTENTION: gates["attention"],
        ModelFact.LOSS: gates["loss"],
        ModelFact.HIDDEN_DTYPE: gates["dtype"],
        ModelFact.ROWS: gates["micro_batch"],
    }
    if gates["devices"] > 1:
        facts[ModelFact.MESH_DEVICES] = gates["devices"]
    if gates["lane"] == "cuda":
        switches = ("tma", "warp_specialize", "aggressive_smem_merge", "layout_2d", "pipeline_stages", "fast_math")
        facts |= {ScanFact.of(name): gates[name] for name in switches}
        facts[ScanFact.SUPERCHUNK_OF_SIZES] = SUPERCHUNK_OF_SIZES
        facts[ScanFact.SUPERCHUNK] = gates["superchunk"] or SUPERCHUNK_OF_SIZES
        facts[ScanFact.HEADS_IN_TURN_OF_SIZES] = HEADS_IN_TURN_OF_SIZES
        facts[ScanFact.HEADS_IN_TURN] = gates["heads_in_turn"] or HEADS_IN_TURN_OF_SIZES
    if gates["schedule"] == "chunk_parallel":
        facts[ScanFact.CHUNK_SIZE] = gates["chunk_size"]
        facts[ScanFact.PSIV_SAVED_BYTES if gates["psiv_cache"] else ScanFact.PSIV_RECOMPUTES] = 4096
    if gates["lane"] == "xla":
        facts[ScanFact.REMAT] = gates["remat"]
    if gates["compile"]:
        facts[ModelFact.COMPILED_GRAPHS] = 1
    return facts


def make_steps(config: ArmConfig, *, tokens_per_s: float, loss_step1: float, seed: int) -> tuple[Step, ...]:
    """Return the steps of a trial whose timed steps have a mean throughput of `tokens_per_s`."""
    steps = config.steps
    phases = ["compile"] + ["warmup"] * steps.warmup + ["timed"] * steps.timed
    tokens = config.tokens_per_step
    seconds = tokens / tokens_per_s
    wobble = np.random.default_rng(seed).uniform(-0.005, 0.005, len(phases))
    timed = [index for index, phase in enumerate(phases) if phase == "timed"]
    wobble[timed] -= wobble[timed].mean()
    return clocked(
        [
            Step(
                index=index,
                phase=phase,
                seconds=float(seconds * (1 + wobble[index]) * (5 if index == 0 else 1)),
                began_s=0.0,
                ended_s=0.0,
                tokens=tokens,
                loss=loss_step1 - 0.05 * index,
                grad_norm=1.0,
            )
            for index, phase in enumerate(phases)
        ],
        load_s=steps.warmup_s,
        validated=config.steps.validated,
    )


def clocked(steps: Sequence[Step], *, load_s: float = 0.0, validated: Sequence[int] = ()) -> tuple[Step, ...]:
    """Return `steps` with clocks that fit their seconds, `load_s` seconds of load after step 0, and validations."""
    gaps = {1: load_s} | {index + 1: VALIDATION_S for index in validated}
    spent = (step.seconds + PAUSE_S + gaps.get(step.index, 0.0) for step in steps)
    ends = zip(steps, accumulate(spent), strict=True)
    return tuple(step.model_copy(update={"began_s": end - step.seconds, "ended_s": end}) for step, end in ends)


def make_validations(config: ArmConfig, steps: Sequence[Step], losses: Sequence[float]) -> Any:
    """Return the validations of a trial with `steps`; None without a schedule. The last loss comes last."""
    after = [step for step in steps if step.index in config.steps.validated]
    if not after:
        return None
    curve = [*losses][-len(after) :] if len(losses) >= len(after) else [losses[-1]] * len(after)
    return tuple(
        Validation(step=step.index, loss=loss, began_s=step.ended_s, ended_s=step.ended_s + VALIDATION_S)
        for step, loss in zip(after, curve, strict=True)
    )


def make_receipt(
    plan: Plan,
    block: BlockPlan | int,
    arm: Arm | str,
    *,
    tokens_per_s: float = 5000.0,
    **changes: Any,
) -> Receipt:
    """Return a sealed receipt of `arm` in `block` (objects, or name and index).

    `changes`: loss_step1, loss_val (with a schedule also val_losses, of every validation), peak_bytes, wall_s, facts,
    outcome, failure_class, message, steps, ids and environment (mappings of single values); others replace a field of
    the receipt. Only the outcome `measured` has a summary.
    """
    block = plan.blocks[block] if isinstance(block, int) else block
    arm = plan.arm_by_name[arm] if isinstance(arm, str) else arm
    val_losses = changes.pop("val_losses", ())
    loss_val = changes.pop("loss_val", val_losses[-1] if val_losses else 7.5)
    loss_step1 = changes.pop("loss_step1", 8.3 + block.seed / 100)
    peak = changes.pop("peak_bytes", GIB)
    outcome = Outcome(changes.get("outcome", Outcome.MEASURED))
    facts = changes.pop("facts", observed_facts(arm.gates))
    steps = changes.pop("steps", None)
    if steps is None:
        steps = make_steps(arm.config, tokens_per_s=tokens_per_s, loss_step1=loss_step1, seed=block.index)
    config = arm.config.with_seed(block.seed)
    flops = changes.pop("flops_per_step", step_flops(config))
    environment = {**_environment(plan.node_class, config), **changes.pop("environment", {})}
    peak_flops = environment["peak_flops"]
    if environment["node_class"] == "h200":
        steps = tuple(step if step.clock_mhz else step.model_copy(update={"clock_mhz": 1980.0}) for step in steps)
    validations = changes.pop("validations", make_validations(config, steps, (*val_losses[:-1], loss_val)))
    training_s = max((step.ended_s for step in steps), default=0.0) + 0.5
    wall_s = changes.pop("wall_s", max(3.0, training_s + 0.5))
    position = block.order.index(arm.name)
    summary = None
    if outcome is Outcome.MEASURED and steps:
        summary = summarise(
            steps, flops_per_step=flops, loss_val=loss_val, peak_flops=peak_flops, validations=validations
        )
    fields: dict[str, Any] = {
        "ids": {**_ids(plan, block, arm).model_dump(), **changes.pop("ids", {})},
        "arm": arm.name,
        "role": arm.role,
        "seed": block.seed,
        "outcome": outcome,
        "failure_class": _FAILURES.get(outcome),
        "digests": Digests(
            spec=plan.spec_digest, rule=plan.rule_digest, arm=arm.digest, code="sha256:code", data="sha256:data"
        ),
        "config": config,
        "environment": environment,
        "gates": read_gates(arm.gates, facts, pattern=config.model.pattern, devices=config.mesh.devices),
        "facts": facts,
        "steps": steps,
        "warmup_passes": (config.steps.warmup_s,) if config.steps.warmup_s else (),
        "summary": summary,
        "memory": Memory(peak_allocated_bytes=peak // 2, peak_reserved_bytes=peak, limit_bytes=16 * GIB),
        "compile_s": 0.0,
        "compile_cache_hit": None,
        "validations": validations,
        "parameters": 1_000_000,
        "flops_per_step": flops,
        "started_at": (FIRST_TRIAL + timedelta(hours=block.index, seconds=position * (wall_s + 1))).isoformat(),
        "training_s": training_s,
        "wall_s": wall_s,
    }
    return seal({**fields, **changes})


_FAILURES = {
    Outcome.OOM: FailureClass.OOM,
    Outcome.REFUSED: FailureClass.GATE_REFUSED,
    Outcome.INVALID: FailureClass.INVALID_MEASUREMENT,
    Outcome.FAILED: FailureClass.NUMERICS,
}

NOTHING_HAPPENED: dict[str, Any] = {
    "sw_power_cap": 0.0,
    "sw_thermal_slowdown": 0.0,
    "hw_thermal_slowdown": 0.0,
    "hw_power_brake": 0.0,
    "ecc_uncorrected": 0,
    "foreign_processes": (),
}
"""Report of a driver on a trial without events."""


def _environment(node_class: str, config: BuiltInArm) -> dict[str, Any]:
    on_host = NODE_CLASSES[node_class].on_host
    return Environment(
        node_name="node-a",
        node_class=node_class,
        device_name="CPU" if on_host else "NVIDIA H200",
        device_serial=None if on_host else "1652923041577",
        git_commit=None,
        git_dirty_digest=None,
        versions={"python": "3.11", "torch": "2.13.0"},
        cpu_threads=2,
        peak_flops=NODE_CLASSES[node_class].peak_flops.get(config.dtype),
        load_average_before=0.1,
        foreign_load=0.02,
    ).model_dump() | ({} if on_host else {"throttle": NOTHING_HAPPENED})


def _ids(plan: Plan, block: BlockPlan, arm: Arm) -> Ids:
    return Ids(
        ablation="abl_factory",
        block=f"blk_{block.index}",
        block_index=block.index,
        position=block.order.index(arm.name),
        trial=f"trl_{block.index}_{arm.name}",
        attempt=f"att_{block.index}",
        node="nod_a",
        device="node-a/0",
    )


def make_receipts(
    plan: Plan, speeds: Mapping[str, float] | None = None, *, sd: float = 0.003, seed: int = 0, **changes: Any
) -> list[Receipt]:
    """Return receipts of all trials of `plan`.

    `speeds` is each arm's relative speed (default 1.0); `sd` is the noise of ln(tokens/s) of one trial.
    """
    rng = np.random.default_rng(seed)
    return [
        make_receipt(
            plan,
            block,
            arm,
            tokens_per_s=float(5000 * (speeds or {}).get(arm, 1.0) * np.exp(rng.normal(0, sd))),
            **copy.deepcopy(changes),
        )
        for block in plan.blocks
        for arm in block.order
    ]


def make_compiled(plan: Plan, block: BlockPlan | int, arm: Arm | str, *, peak_bytes: int, **changes: Any) -> Receipt:
    """Return a sealed receipt of a trial that compiled and executed nothing.

    `changes`: report (a mapping over fields of the CompilationReport), needed_bytes (does not fit); as make_receipt.
    """
    needed = changes.pop("needed_bytes", None)
    temp = peak_bytes - _ARGUMENTS - 8
    plan_of_hbm = HbmPlan(
        argument_bytes=_ARGUMENTS,
        output_bytes=_ARGUMENTS + 8,
        alias_bytes=_ARGUMENTS,
        temp_bytes=temp,
        code_bytes=2**24,
        peak_bytes=peak_bytes,
    )
    report = CompilationReport(
        topology="v6e:1x1",
        device_kind="TPU v6 lite",
        chips=1,
        versions={"libtpu": "0.0.42.1", "jax": "0.7.1", "torch_xla": "2.9.0"},
        hlo_digest="sha256:module",
        instructions=26_508,
        custom_calls=3,
        kernels={"_flash_attention_kernel": 3},
        matmul_flops=13_909_050_261_504,
        hbm=plan_of_hbm if needed is None else None,
        overflow=None if needed is None else Overflow(memory="hbm", needed_bytes=needed, available_bytes=31 * GIB),
        trace_s=1.5,
    ).model_copy(update=changes.pop("report", {}))
    outcome = Outcome.MEASURED if needed is None else Outcome.OOM
    environment = {"node_class": plan.node_class, **changes.pop("environment", {})}
    receipt = make_receipt(plan, block, arm, outcome=outcome, environment=environment, steps=(), **changes)
    fields = {
        **dict(receipt),
        "summary": None,
        "warmup_passes": (),
        "compilation": report,
        "digests": {**dict(receipt.digests), "data": ""},
    }
    return seal(fields)


_ARGUMENTS = 2**30
