"""Verify receipts offline: recompute every value that follows from other values in the receipt.

The digest is compared with the content; phases, counts, tokens and FLOPs with the configuration; the configuration with
the gates, and both with the arm's digest; the gates' readings with the facts; the summary with the raw steps; durations
with the clock. Guards of a trial are in `trial_guards`. A carefully rewritten receipt can still be consistent: only the
node's signature shows where it comes from. A node signs reports of blocks, not receipts (docs/trust.md): the digests of
all receipts of the block and the signature are enough to check one receipt.

Receipts of earlier releases verify by their digests and signatures alone (`earlier_release`). A test verifies every
receipt below `docs/receipts`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from ablate.experiments.design.arms import arm_digest
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.experiments.design.kinds.gate_readings import read_gate
from ablate.experiments.design.kinds.package import PackageArm
from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.design.problems import shown
from ablate.experiments.documents import Frozen, first_problem, seal_problem
from ablate.experiments.errors import ReceiptError
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.outcomes import DECLARED, Outcome
from ablate.experiments.records.compilation_report import report_problems
from ablate.experiments.records.earlier_release import LAST_RECEIPT, digest_problems, is_earlier
from ablate.experiments.records.program_report import report_contradictions
from ablate.experiments.records.receipt_clocks import clock_problems, start_problems
from ablate.experiments.records.receipts import SCHEMA_VERSION, Receipt, held_by, summarise
from ablate.experiments.records.signing import Signature, report_statement, signature_problem
from ablate.experiments.records.trial_guards import trial_problems, window_s
from ablate.model.config import StepsConfig, TrainConfig
from ablate.model.counts import step_flops


def checked(values: Mapping[str, Any]) -> tuple[Receipt | None, list[str]]:
    """Return a receipt read from JSON and its problems; none when it is complete, unaltered and consistent.

    The receipt is None if the values are none.
    """
    version = values.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        return None, [f"schema_version is {shown(version)}; this program reads {SCHEMA_VERSION}"]
    try:
        receipt = Receipt.model_validate_json(json.dumps(values, allow_nan=False), strict=True)
        altered = seal_problem(receipt)
    except ValidationError as error:
        return None, [f"not a receipt: {first_problem(error)}"]
    except (TypeError, ValueError) as error:
        return None, [f"not a receipt: {error}"]
    return receipt, [*filter(None, [altered]), *contradictions(receipt)]


def verify(values: Mapping[str, Any]) -> list[str]:
    """Return the problems of a receipt read from JSON; none when it is complete, unaltered and consistent."""
    _receipt, problems = checked(values)
    return problems


def contradictions(receipt: Receipt) -> list[str]:
    """Return sentences about contradictions of a receipt to itself or to a guard."""
    of_kind = _program_problems if receipt.config.own_process else _model_problems
    return [
        *_outcome_problems(receipt),
        *_arm_problems(receipt),
        *of_kind(receipt),
        *start_problems(receipt),
        *trial_problems(receipt),
    ]


def _model_problems(receipt: Receipt) -> Iterator[str]:
    """Find contradictions of the receipt of the built-in model."""
    config = receipt.config
    if isinstance(config, BuiltInArm):
        yield from _config_problems(receipt, config)
        yield from _gate_problems(receipt, config)
        yield from _work_problems(receipt, config)


def _program_problems(receipt: Receipt) -> Iterator[str]:
    """Find contradictions of the receipt of a program."""
    config = receipt.config
    if not isinstance(config, ProgramArm):
        return
    requested = {name: reading.requested for name, reading in receipt.gates.items()}
    if dict(receipt.gates) != config.readings(requested, receipt.facts):
        says = "the attested values give another reading" if config.attested else f"of a command they are {DECLARED}"
        yield f"gates say more than was observed: {says}"
    if isinstance(config, PackageArm):
        yield from _package_problems(receipt, config)
    yield from _schedule_problems(receipt, config.steps)
    named = len(held_by(receipt.environment))
    if named != config.devices:
        yield f"environment names {named} devices; the configuration has {config.devices}"
    measured = receipt.outcome is Outcome.MEASURED
    if measured and receipt.program is None:
        yield "outcome is measured, but there is no report of the program"
    if measured and receipt.program is not None:
        yield from report_contradictions(receipt.program, config, window_s(receipt) if receipt.steps else None)
    if measured and not receipt.steps and (receipt.waited_s is not None) != config.turns:
        value = "absent" if receipt.waited_s is None else f"{receipt.waited_s:.6g}"
        yield f"waited_s is {value}; the configuration says {'turns' if config.turns else 'no turns'}"
    if receipt.steps:
        yield from _phase_problems(receipt, config.steps)
        yield from _summary_problems(receipt)
        if measured:
            yield from clock_problems(receipt, config.steps)


def _package_problems(receipt: Receipt, config: PackageArm) -> Iterator[str]:
    """Find contradictions of a receipt to the declaration of a package's recipe."""
    package = config.package
    for name, reading in receipt.gates.items():
        if package.values.get(name) != reading.requested or name not in package.claims:
            yield f"gate '{name}' is {reading.requested!r}; the configuration says {package.values.get(name)!r}"
    if receipt.outcome is not Outcome.MEASURED:
        return
    if receipt.flops_per_step != config.flops_per_step:
        yield f"flops_per_step is {receipt.flops_per_step}; the configuration gives {config.flops_per_step}"
    wrong = [step for step in receipt.steps if package.tokens_per_step not in (None, step.tokens)]
    if wrong:
        yield f"step {wrong[0].index} has {wrong[0].tokens} tokens; the configuration gives {package.tokens_per_step}"


def _work_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    """Find contradictions in the trial's steps, or in the compilation report that replaces them."""
    node_class = NODE_CLASSES.get(receipt.environment.node_class)
    compiles_only = node_class is not None and node_class.compiles_only
    if compiles_only != (receipt.compilation is not None) and receipt.outcome is Outcome.MEASURED:
        there = "compiles and executes nothing" if compiles_only else "trains"
        yield f"node class '{node_class}' {there}; compilation is {'absent' if compiles_only else 'present'}"
    if receipt.compilation is None:
        yield from _step_problems(receipt, config)
        yield from _summary_problems(receipt)
        yield from _validation_problems(receipt, config)
        yield from _schedule_problems(receipt, config.steps)
        if receipt.outcome is Outcome.MEASURED:
            yield from clock_problems(receipt, config.steps)
        return
    yield from report_problems(receipt.compilation)
    for name in ("steps", "summary", "warmup_passes"):
        if getattr(receipt, name):
            yield f"{name} is present, but nothing was executed"


def _outcome_problems(receipt: Receipt) -> Iterator[str]:
    measured = receipt.outcome is Outcome.MEASURED
    if measured and receipt.failure_class is not None:
        yield f"outcome is measured, and failure_class is {receipt.failure_class}"
    if not measured and receipt.failure_class is None:
        yield f"outcome is {receipt.outcome}, but there is no failure_class"
    without = receipt.compilation is not None or (receipt.program is not None and not receipt.program.ranks)
    if measured and receipt.summary is None and not without:
        yield "outcome is measured, but there is no summary"
    if measured and receipt.memory is None and receipt.program is None:
        yield "outcome is measured, but there is no memory"


def _arm_problems(receipt: Receipt) -> Iterator[str]:
    if receipt.config.seed != receipt.seed:
        yield f"seed is {receipt.seed}; the configuration says {receipt.config.seed}"
    expected = arm_digest({name: reading.requested for name, reading in receipt.gates.items()}, receipt.config)
    if receipt.digests.arm != expected:
        yield f"digests.arm is {receipt.digests.arm}; gates and configuration give {expected}"


def _config_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    flops = step_flops(config)
    if receipt.flops_per_step not in ({flops} if receipt.outcome is Outcome.MEASURED else {0, flops}):
        yield f"flops_per_step is {receipt.flops_per_step}; the configuration gives {flops}"
    node_class = NODE_CLASSES.get(receipt.environment.node_class)
    peak = None if node_class is None else node_class.peak(config.dtype, config.mesh.devices)
    if receipt.environment.peak_flops != peak:
        yield f"environment.peak_flops is {receipt.environment.peak_flops}; the node class says {peak}"


def _gate_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    """Compare the gates with the configuration and the facts; later gates are not in the receipt."""
    configured = {name: gate.read(config) for name, gate in GATES.items()}
    requested = {name: reading.requested for name, reading in receipt.gates.items()}
    for name, value in sorted(requested.items()):
        if configured.get(name) != value or type(configured.get(name)) is not type(value):
            yield f"gate '{name}' is {value!r}; the configuration says {configured.get(name)!r}"
            return
    for name, stored in receipt.gates.items():
        pattern, devices = config.model.pattern, config.mesh.devices
        reading = read_gate(GATES[name], requested, receipt.facts, pattern=pattern, devices=devices)
        if stored != reading:
            yield f"gates.{name} says {stored.how!r}, live {stored.live}; facts give {reading.how!r}, {reading.live}"


def phases(steps: StepsConfig) -> list[str]:
    """Return the phases of the steps of a whole trial, in order."""
    return [steps.phase_of(index) for index in range(steps.total)]


def _step_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    yield from _phase_problems(receipt, config.steps)
    for place, step in enumerate(receipt.steps):
        if step.tokens != config.tokens_per_step:
            yield f"step {place} has {step.tokens} tokens; the configuration gives {config.tokens_per_step}"
        if step.loss is None or step.grad_norm is None:
            yield f"step {place} has no loss or no gradient norm"


def _phase_problems(receipt: Receipt, steps: StepsConfig) -> Iterator[str]:
    expected = phases(steps)
    count = len(receipt.steps)
    if count > len(expected) or (receipt.outcome is Outcome.MEASURED and count < len(expected)):
        yield f"{count} steps; the configuration gives {len(expected)}"
    for place, (step, phase) in enumerate(zip(receipt.steps, expected, strict=False)):
        if step.index != place:
            yield f"step {place} has index {step.index}"
        if step.phase != phase:
            yield f"step {place} is marked {step.phase}; the configuration makes it {phase}"


def _summary_problems(receipt: Receipt) -> Iterator[str]:
    summary = receipt.summary
    if summary is None:
        return
    try:
        fresh = summarise(
            receipt.steps,
            flops_per_step=receipt.flops_per_step,
            loss_val=summary.loss_val,
            peak_flops=receipt.environment.peak_flops,
            validations=receipt.validations,
            document_flops_per_step=receipt.document_flops_per_step,
        )
    except ReceiptError as error:
        yield f"summary cannot be recomputed: {error}"
        return
    stored, recomputed = summary.model_dump(), fresh.model_dump()
    for key in stored:
        if stored[key] != recomputed[key]:
            yield f"summary.{key} is {stored[key]}; the steps give {recomputed[key]}"


def _validation_problems(receipt: Receipt, config: TrainConfig) -> Iterator[str]:
    summary = receipt.summary
    if summary is not None and (summary.loss_val is None) != (config.steps.val_rows == 0):
        yield f"summary.loss_val is {summary.loss_val}; the configuration has {config.steps.val_rows} validation rows"


def _schedule_problems(receipt: Receipt, steps: StepsConfig) -> Iterator[str]:
    """Find contradictions of the validations between steps to their schedule and to the last one."""
    curve, summary = receipt.validations or (), receipt.summary
    after = tuple(one.step for one in curve)
    expected = steps.validated if receipt.outcome is Outcome.MEASURED else steps.validated[: len(after)]
    if after != expected:
        given = ", ".join(map(str, after[:8])) or "none"
        yield f"validations follow steps {given}; val_every = {steps.val_every} gives {len(steps.validated)} of them"
    elif curve and summary is not None and summary.loss_val != curve[-1].loss:
        yield f"summary.loss_val is {summary.loss_val}; the last validation gives {curve[-1].loss}"


class BlockSignature(Frozen):
    """Signature of a receipt's block, with the other parts of the signed statement."""

    node: str
    """Name of the node that ran the block."""
    receipts: tuple[str, ...]
    """Digests of the block's receipts, in running order."""
    by: Signature
    """Over the statement of the node about its report."""


class SignedReceipt(Receipt):
    """A receipt with the signature of its block, which its digest does not cover."""

    signature: BlockSignature | None = None
    """None without a signature."""


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the sealed receipt in `values` and the signature of its block as JSON, None without one."""
    return {name: value for name, value in values.items() if name != "signature"}, values.get("signature")


def verify_signed(values: Mapping[str, Any], *, any_release: bool = False) -> tuple[list[str], BlockSignature | None]:
    """Return the problems of a receipt read from JSON and of its signature, and the signature if it fits.

    With `any_release`, a receipt of an earlier release is checked by its digest and signature alone. Raises
    SigningUnavailable when there is a signature but no library to check it.
    """
    receipt, signature_values = split(values)
    earlier = any_release and is_earlier(receipt.get("schema_version"), LAST_RECEIPT)
    problems = digest_problems(receipt) if earlier else verify(receipt)
    if signature_values is None or problems:
        return problems, None
    try:
        signature = BlockSignature.model_validate(signature_values)
        problem = _unfit(receipt, signature)
    except ValidationError as error:
        return [f"not a signature: {first_problem(error)}"], None
    except (LookupError, TypeError) as error:
        return [f"not a receipt: {error!r}"], None
    return ([], signature) if problem is None else ([problem], None)


def _unfit(receipt: Mapping[str, Any], signature: BlockSignature) -> str | None:
    """Return why the signature of a block does not cover `receipt`."""
    place = receipt["ids"]["position"]
    if place >= len(signature.receipts) or signature.receipts[place] != receipt["digest"]:
        return f"its signature covers other receipts: the receipt at place {place + 1} is not {receipt['digest']}"
    statement = report_statement(receipt["ids"], signature.receipts)
    problem = signature_problem(signature.by, statement)
    return None if problem is None else f"its signature {problem}"
