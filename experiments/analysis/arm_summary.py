"""Summary of one arm's trials: means, peaks and outcomes; and the seeds of all.

A mean is over all measured trials of the blocks that count. If one trial lacks the value there is no mean: the mean of
the others would cover other blocks than the means of the other arms.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from ablate.experiments.analysis.statistics import mean_of
from ablate.experiments.analysis.verdicts import NOT_OBSERVED, ArmSummary, LargestMicroBatch, NodeMeans, SeedReport
from ablate.experiments.design.arms import Arm
from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.design.plan import Plan
from ablate.experiments.outcomes import DECLARED, Outcome, SeedOrigin
from ablate.experiments.records.circumstances import Circumstances
from ablate.experiments.records.receipts import Receipt, read_metric


def measured_trials(receipts: Iterable[Receipt]) -> tuple[Receipt, ...]:
    """Return the trials whose numbers count: those with the outcome `measured`."""
    return tuple(receipt for receipt in receipts if receipt.outcome is Outcome.MEASURED)


def summarise_arm(receipts: Sequence[Receipt]) -> ArmSummary:
    """Summarise the receipts of one arm, all from blocks that count (`WholeBlocks.of`)."""
    measured = measured_trials(receipts)
    summaries = [receipt.summary for receipt in measured]
    memory = [receipt.memory for receipt in receipts if receipt.memory and receipt.outcome in _HAVE_PEAKS]
    return ArmSummary(
        **_means(_MEANS, measured),
        utilisation=_mean([None if summary is None else summary.utilisation for summary in summaries]),
        peak_allocated_bytes=max((part.peak_allocated_bytes for part in memory), default=None),
        peak_reserved_bytes=max((part.peak_reserved_bytes for part in memory), default=None),
        outlier_steps=sum(summary.outlier_steps for summary in summaries if summary),
        outcomes=dict(sorted(Counter(str(receipt.outcome) for receipt in receipts).items())),
        foreign_load=_mean([receipt.environment.foreign_load for receipt in measured]),
        by_node=_by_node(measured),
    )


def largest_micro_batch(plan: Plan, trials_of: Callable[[str], Sequence[Receipt]]) -> LargestMicroBatch | None:
    """Return the most rows in a step that fit; None unless more rows ran out of memory.

    `trials_of` returns the receipts of an arm by its name, all from blocks that count. An arm is left out if it differs
    from the baseline in more than its rows and its number of steps, which may follow from them.
    """
    arms = [arm for arm in (plan.baseline, *plan.variants) if _but_rows(arm) == _but_rows(plan.baseline)]
    outcomes = {arm.name: {receipt.outcome for receipt in trials_of(arm.name)} for arm in arms}
    rows = {arm.name: int(arm.config.values_with_seed.get("micro_batch", 0)) for arm in arms}
    largest = max((name for name in rows if outcomes[name] == {Outcome.MEASURED}), key=rows.__getitem__, default=None)
    if largest is None:
        return None
    more = [name for name in rows if Outcome.OOM in outcomes[name] and rows[name] > rows[largest]]
    if not more:
        return None
    too_many = min(more, key=rows.__getitem__)
    return LargestMicroBatch(arm=largest, rows=rows[largest], too_many_arm=too_many, too_many_rows=rows[too_many])


def _but_rows(arm: Arm) -> dict[str, Any]:
    return {
        name: value for name, value in arm.config.values_without_seed.items() if name not in {"micro_batch", "steps"}
    }


_HAVE_PEAKS = (Outcome.MEASURED, Outcome.OOM)
"""Outcomes whose recorded peak counts. Out of memory gives a lower bound; other stopped trials had not peaked yet."""


def _by_node(measured: Sequence[Receipt]) -> dict[str, NodeMeans] | None:
    nodes = sorted({receipt.environment.node_name for receipt in measured})
    if len(nodes) < 2:
        return None
    by_node = {node: [receipt for receipt in measured if receipt.environment.node_name == node] for node in nodes}
    return {
        node: NodeMeans(blocks=len(own), **_means(("tokens_per_s", "step_s"), own)) for node, own in by_node.items()
    }


_MEANS = ("tokens_per_s", "step_s", "model_tflops_per_s", "loss_step1", "loss_final", "loss_val", "compile_s")


def _means(names: Iterable[str], measured: Sequence[Receipt]) -> dict[str, float | None]:
    return {name: _mean([read_metric(METRICS[name], receipt) for receipt in measured]) for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return mean_of(present) if present and len(present) == len(values) else None


_CUT_SHORT = (Outcome.TIMEOUT, Outcome.OOM, Outcome.FAILED)
"""Outcomes of trials that did not finish."""


def gates_live(receipts: Sequence[Receipt]) -> str:
    """Return how many observed gates were live in the trials that finished, and which gates nothing observes there.

    A gate that cannot act on the node, or in this model, leaves no fact. A stopped trial had not shown all gates.
    """
    if not all(receipt.config.attested for receipt in receipts):
        return DECLARED
    whole = [receipt for receipt in receipts if receipt.outcome not in _CUT_SHORT]
    readings = [(name, reading) for receipt in whole for name, reading in receipt.gates.items()]
    seen = {name for name, reading in readings if reading.observed is not None or not reading.live}
    unseen = sorted({name for name, _ in readings} - seen)
    live = [(name, reading.live) for name, reading in readings if name in seen]
    idle = ", ".join(sorted({name for name, is_live in live if not is_live}))
    cut = len(receipts) - len(whole)
    short = [f"{cut} {'trial' if cut == 1 else 'trials'} stopped early and not counted"] if cut else []
    apart = [f"{NOT_OBSERVED}: {', '.join(unseen)}"] if unseen and live else []
    counts = [f"{sum(is_live for _, is_live in live)}/{len(live)}"] if live else []
    return ", ".join([*counts, *([f"not live: {idle}"] if idle else []), *short, *apart]) or "none was seen"


def seed_report(plan: Plan, receipts: Sequence[Receipt], circumstances: Circumstances) -> SeedReport:
    """Return the seeds of the trials with receipts, and how they came about."""
    ran, carried = {receipt.ids.block_index for receipt in receipts}, circumstances.carried
    used = dict.fromkeys(block.seed for block in plan.blocks if block.index in ran)
    unregistered = carried is not None and carried.registered_at is None
    drawn: Literal["drawn", "unregistered"] = "unregistered" if unregistered else "drawn"
    origin: Literal["chosen", "drawn", "unregistered"] = "chosen" if plan.seeds is SeedOrigin.CHOSEN else drawn
    return SeedReport(origin=origin, used=tuple(used), taken=_take_a_seed(plan, receipts))


def _take_a_seed(plan: Plan, receipts: Iterable[Receipt]) -> bool:
    """Return whether arms take the block's seed: a command by an argument, or as its trial reports."""
    commands = [arm.config for arm in plan.arms if isinstance(arm.config, CommandArm)]
    reported = any(receipt.program is not None and receipt.program.seed is not None for receipt in receipts)
    return not commands or reported or any(config.takes_seed for config in commands)
