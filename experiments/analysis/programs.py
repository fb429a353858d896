"""Comparison of commands beside their speed: their work, their seeds, and the kernels that they ran."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from experiments.analysis.evidence import Evidence, Pair
from experiments.block_numbers import block_name
from experiments.design.metrics import PROCESS_METRIC
from experiments.design.program import DECLARED
from experiments.design.trainable import trainable
from experiments.outcomes import Outcome
from experiments.records.receipts import Receipt

_NAMED = 2
"""Kernels that a note names."""
_NAME_LENGTH = 60


@dataclass(frozen=True, kw_only=True)
class KernelUse:
    """One kernel in the profiled steps of an arm's trials."""

    calls: float
    """In one step, as a mean over the trials."""
    us: float
    """Microseconds in one step, as a mean over the trials."""


@dataclass(frozen=True, kw_only=True)
class KernelChange:
    """A kernel in a variant and in the baseline; None where an arm did not run it."""

    name: str
    baseline: KernelUse | None
    variant: KernelUse | None

    @property
    def change_us(self) -> float:
        """Microseconds that the variant spends more."""
        return (self.variant.us if self.variant else 0.0) - (self.baseline.us if self.baseline else 0.0)

    @property
    def same_calls(self) -> bool:
        """Whether both arms call it equally often."""
        return self.variant is not None and self.baseline is not None and self.variant.calls == self.baseline.calls


def other_tokens(evidence: Evidence) -> str | None:
    """Say how the tokens of a command's steps differ between a variant and the baseline; None if they do not."""
    for pair in evidence.pairs:
        own, other = ([step.tokens for step in receipt.steps] for receipt in (pair.variant, pair.baseline))
        if trainable(pair.baseline.config).work is None and own != other:
            return f"{block_name(pair.block_index)}: the steps have {sum(own):,} tokens, the baseline's {sum(other):,}"
    return None


def kernels_of(receipts: Sequence[Receipt]) -> dict[str, KernelUse]:
    """Return the kernels of an arm by name; empty if a measured trial has no table."""
    measured = [receipt for receipt in receipts if receipt.outcome is Outcome.MEASURED and receipt.program]
    tables = [_table(receipt) for receipt in measured]
    if not tables or not all(tables):
        return {}
    return {
        name: KernelUse(
            calls=statistics.fmean(table.get(name, (0, 0.0))[0] for table in tables),
            us=statistics.fmean(table.get(name, (0, 0.0))[1] for table in tables),
        )
        for name in sorted(set().union(*tables))
    }


def _table(receipt: Receipt) -> dict[str, tuple[int, float]]:
    rows = receipt.program.kernels if receipt.program else ()
    table: dict[str, tuple[int, float]] = {}
    for name, calls, spent in rows:
        before = table.get(name, (0, 0.0))
        table[name] = before[0] + calls, before[1] + spent
    return table


def kernel_changes(variant: Mapping[str, KernelUse], baseline: Mapping[str, KernelUse]) -> tuple[KernelChange, ...]:
    """Return all kernels of two arms, the largest change of time first."""
    names = sorted({*variant, *baseline})
    changes = [KernelChange(name=name, baseline=baseline.get(name), variant=variant.get(name)) for name in names]
    return tuple(sorted(changes, key=lambda change: (-abs(change.change_us), change.name)))


def program_notes(evidence: Evidence, metric: str) -> Iterator[str]:
    """Yield sentences about a variant that is a command."""
    if not evidence.pairs or not (workload := trainable(evidence.pairs[0].baseline.config)).own_process:
        return
    if not workload.attested:
        yield f"its arguments, variables and code are {DECLARED}"
    if metric == PROCESS_METRIC:
        yield "the time is that of the whole process, with its start"
    for arm, receipts in (("variant", evidence.receipts), ("baseline", [pair.baseline for pair in evidence.pairs])):
        if _ignores_seed(receipts):
            yield f"two seeds of the {arm} have bit-identical losses: the program may ignore its seed"
    yield from _kernel_notes(evidence.receipts, evidence.pairs)


def _ignores_seed(receipts: Sequence[Receipt]) -> bool:
    losses: dict[tuple[float | None, ...], int] = {}
    for receipt in receipts:
        own = tuple(step.loss for step in receipt.steps)
        lossy = receipt.outcome is Outcome.MEASURED and any(loss is not None for loss in own)
        if lossy and losses.setdefault(own, receipt.seed) != receipt.seed:
            return True
    return False


def _kernel_notes(receipts: Sequence[Receipt], pairs: Sequence[Pair]) -> Iterator[str]:
    own, base = kernels_of(receipts), kernels_of([pair.baseline for pair in pairs])
    if not own or not base:
        return
    changes = kernel_changes(own, base)
    named = ", ".join(f"{change.name[:_NAME_LENGTH]} {change.change_us:+,.0f} us" for change in changes[:_NAMED])
    same = all(change.same_calls for change in changes)
    what = "the same kernels, equally often" if same else "different kernels"
    yield f"these arms ran {what} in the profiled step; largest changes of their time: {named}"
