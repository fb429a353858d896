"""Check a receipt without asking anybody: everything in it that follows from something else in it is computed again.

What is checked against what: the digest against the content; phases, counts, tokens and FLOPs against the
configuration; the configuration against the gates and both against the arm's digest; every gate's reading against the
facts; the summary against the raw steps; durations against the clock; the guards of a trial (`trial_guards`). A receipt
that was rewritten with care can still be consistent: that it is the node's own shows by the node's signature.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from experiments.design.arms import arm_digest
from experiments.design.fields import read_config
from experiments.design.gates import GATES
from experiments.design.problems import shown
from experiments.documents import first_problem, seal_problem
from experiments.errors import ReceiptError
from experiments.outcomes import Outcome
from experiments.records.compilation_report import report_problems
from experiments.records.receipt_clock import clock_problems, start_problems
from experiments.records.receipts import SCHEMA_VERSION, Receipt, read_gates, summarise
from experiments.records.trial_guards import trial_problems
from kernels.backends import NODE_CLASSES
from model.config import StepsConfig, TrainConfig
from model.counts import step_flops
from model.errors import ConfigError


def verify(receipt: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a receipt read from JSON; empty when it is whole, unaltered and consistent."""
    version = receipt.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        return [f"schema_version is {shown(version)}; this program reads {SCHEMA_VERSION}"]
    try:
        typed = Receipt.model_validate_json(json.dumps(receipt, allow_nan=False), strict=True)
        altered = seal_problem(typed)
    except ValidationError as error:
        return [f"not a receipt: {first_problem(error)}"]
    except (TypeError, ValueError) as error:
        return [f"not a receipt: {error}"]
    return [*([] if altered is None else [altered]), *contradictions(typed)]


def contradictions(receipt: Receipt) -> list[str]:
    """Return where a receipt contradicts itself or a guard, in sentences."""
    try:
        config = read_config(receipt.config, may_be_older=True)
    except ConfigError as error:
        return [f"config is not one that this program knows: {error}"]
    return [
        *_outcome_problems(receipt),
        *_config_problems(receipt, config),
        *_gate_problems(receipt, config),
        *_work_problems(receipt, config),
        *start_problems(receipt),
        *trial_problems(receipt),
    ]


def _work_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    """Find what contradicts itself in the trial's own work: its steps, or what the compiler said in their place."""
    node_class = NODE_CLASSES.get(receipt.environment.node_class)
    compiles_only = node_class is not None and node_class.compiles_only
    if compiles_only != (receipt.compilation is not None) and receipt.outcome is Outcome.MEASURED:
        there = "compiles and executes nothing" if compiles_only else "trains"
        yield f"node class '{node_class}' {there}; compilation is {'absent' if compiles_only else 'there'}"
    if receipt.compilation is None:
        yield from _step_problems(receipt, config)
        yield from _summary_problems(receipt, config)
        if receipt.outcome is Outcome.MEASURED:
            yield from clock_problems(receipt, config.steps)
        return
    yield from report_problems(receipt.compilation)
    for name in ("steps", "summary", "warmup_passes"):
        if getattr(receipt, name):
            yield f"{name} is there, but nothing was executed"


def _outcome_problems(receipt: Receipt) -> Iterator[str]:
    measured = receipt.outcome is Outcome.MEASURED
    if measured and receipt.failure_class is not None:
        yield f"outcome is measured, and failure_class is {receipt.failure_class}"
    if not measured and receipt.failure_class is None:
        yield f"outcome is {receipt.outcome}, but there is no failure_class"
    if measured and receipt.summary is None and receipt.compilation is None:
        yield "outcome is measured, but there is no summary"
    if measured and receipt.memory is None:
        yield "outcome is measured, but there is no memory"


def _config_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    if config.seed != receipt.seed:
        yield f"seed is {receipt.seed}; the configuration says {config.seed}"
    plain = {name: value for name, value in receipt.config.items() if name != "seed"}
    expected = arm_digest({name: reading.requested for name, reading in receipt.gates.items()}, plain)
    if receipt.digests.arm != expected:
        yield f"digests.arm is {receipt.digests.arm}; gates and configuration give {expected}"
    flops = step_flops(config)
    if receipt.flops_per_step not in ({flops} if receipt.outcome is Outcome.MEASURED else {0, flops}):
        yield f"flops_per_step is {receipt.flops_per_step}; the configuration gives {flops}"
    node_class = NODE_CLASSES.get(receipt.environment.node_class)
    peak = None if node_class is None else node_class.peak(config.dtype, config.mesh.devices)
    if receipt.environment.peak_flops != peak:
        yield f"environment.peak_flops is {receipt.environment.peak_flops}; the node class says {peak}"


def _gate_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    """Compare the gates with the configuration and the facts; a gate that came after the receipt is not in it."""
    asked = {name: gate.read(config) for name, gate in GATES.items()}
    given = {name: reading.requested for name, reading in receipt.gates.items()}
    for name in sorted(given):
        if asked.get(name) != given.get(name) or type(asked.get(name)) is not type(given.get(name)):
            yield f"gate '{name}' is {given.get(name)!r}; the configuration says {asked.get(name)!r}"
            return
    for name, reading in read_gates(given, receipt.facts, pattern=config.model.pattern).items():
        if reading != receipt.gates[name]:
            yield f"gates.{name} says {receipt.gates[name].how!r}, live {receipt.gates[name].live}; the facts give "
            yield f"gates.{name}: {reading.how!r}, live {reading.live}"


def phases(steps: StepsConfig) -> list[str]:
    """Return the phase of every step of a whole trial, in order."""
    return ["compile"] + ["warmup"] * steps.warmup + ["timed"] * steps.timed


def _step_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    expected = phases(config.steps)
    given = [step.phase for step in receipt.steps]
    if len(given) > len(expected) or (receipt.outcome is Outcome.MEASURED and len(given) < len(expected)):
        yield f"{len(given)} steps; the configuration gives {len(expected)}"
    for place, (step, phase) in enumerate(zip(receipt.steps, expected, strict=False)):
        if step.index != place:
            yield f"step {place} has index {step.index}"
        if step.phase != phase:
            yield f"step {place} is marked {step.phase}; by the configuration it is {phase}"
        if step.tokens != config.tokens_per_step:
            yield f"step {place} has {step.tokens} tokens; the configuration gives {config.tokens_per_step}"


def _summary_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    summary = receipt.summary
    if summary is None:
        return
    try:
        fresh = summarise(
            receipt.steps,
            flops_per_step=receipt.flops_per_step,
            loss_val=summary.loss_val,
            peak_flops=receipt.environment.peak_flops,
        )
    except ReceiptError as error:
        yield f"summary cannot be recomputed: {error}"
        return
    given, again = summary.model_dump(), fresh.model_dump()
    for key in given:
        if given[key] != again[key]:
            yield f"summary.{key} is {given[key]}; the steps give {again[key]}"
    if (summary.loss_val is None) != (config.steps.val_rows == 0):
        yield f"summary.loss_val is {summary.loss_val}; {config.steps.val_rows} validation rows were asked for"
