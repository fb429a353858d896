"""A receipt on its way to people: with its block's signature, so that who stands behind it can be checked anywhere.

A node signs blocks, not receipts (docs/trust.md): the statement holds the digests of all receipts of the block, so
one receipt, these digests and the signature are enough.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from experiments.design.arms import arm_digest
from experiments.design.config_fields import read_config
from experiments.design.gates import GATES
from experiments.design.problems import shown
from experiments.documents import Frozen, first_problem, seal_problem
from experiments.errors import ReceiptError
from experiments.outcomes import Outcome
from experiments.records.compilation_report import report_problems
from experiments.records.receipt_clocks import clock_problems, start_problems
from experiments.records.receipts import SCHEMA_VERSION, Receipt, read_gates, summarise
from experiments.records.signing import Signature, block_statement, signature_problem
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


class BlockSignature(Frozen):
    """Who signed the block of a receipt, and what besides the receipt the statement takes."""

    node: str
    """Name of the node that ran the block."""
    receipts: tuple[str, ...]
    """Digests of the block's receipts, in running order."""
    by: Signature
    """Over the statement that a node makes about a block."""


class SignedReceipt(Receipt):
    """A receipt with its block's signature, which its digest does not cover."""

    signature: BlockSignature | None = None
    """None where nobody signed."""


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the receipt in `values` as it was sealed, and its block's signature as JSON; None where there is none."""
    return {name: value for name, value in values.items() if name != "signature"}, values.get("signature")


def verify_signed(values: Mapping[str, Any]) -> tuple[list[str], BlockSignature | None]:
    """Return what is wrong with a receipt read from JSON and with its signature, and the signature where it fits.

    Raises SigningUnavailable where there is a signature, and no library to check it.
    """
    receipt, given = split(values)
    problems = verify(receipt)
    if given is None or problems:
        return problems, None
    try:
        signature = BlockSignature.model_validate(given)
    except ValidationError as error:
        return [f"its signature is none: {first_problem(error)}"], None
    problem = _unfit(Receipt.model_validate(receipt), signature)
    return ([], signature) if problem is None else ([problem], None)


def _unfit(receipt: Receipt, signature: BlockSignature) -> str | None:
    """Return in what way a block's signature does not cover `receipt`."""
    ids, place = receipt.ids, receipt.ids.position
    if place >= len(signature.receipts) or signature.receipts[place] != receipt.digest:
        return f"its signature is over other receipts: {receipt.digest} is not the one at place {place + 1}"
    statement = block_statement(
        {"ablation": ids.ablation, "block": ids.block, "attempt": ids.attempt}, signature.receipts
    )
    problem = signature_problem(signature.by, statement)
    return None if problem is None else f"its signature {problem}"
