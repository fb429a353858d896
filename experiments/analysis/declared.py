"""Declared metrics: numbers that a program reports, and values of theirs that no test of a ratio can judge."""

from experiments.analysis.evidence import Evidence
from experiments.block_numbers import block_name
from experiments.design.metrics import METRICS
from experiments.outcomes import Outcome
from experiments.records.receipts import read_named


def no_ratio(evidence: Evidence, name: str) -> str | None:
    """Name the first measured value of a declared metric that is not above zero; None without one."""
    if name in METRICS:
        return None
    for pair in evidence.pairs:
        for receipt in (pair.variant, pair.baseline):
            value = read_named(name, receipt)
            if receipt.outcome is Outcome.MEASURED and value is not None and not value > 0:
                where = f"{block_name(pair.block_index)}, arm '{receipt.arm}'"
                return f"{where}: {name} is {value:g}, and a margin in percent needs numbers above zero"
    return None


def one_value(evidence: Evidence, name: str) -> str | None:
    """Say which arm reports one number with every seed although the arms differ; None if no arm does.

    Such an arm ignores its seed. Its blocks repeat one run, so they do not show what another run would give.
    """
    if name in METRICS:
        return None
    values = [(read_named(name, pair.variant), read_named(name, pair.baseline)) for pair in evidence.pairs]
    if len({pair.seed for pair in evidence.pairs}) < 2 or all(own == base for own, base in values):
        return None
    for arm, own in ((evidence.arm.name, [one for one, _ in values]), ("baseline", [base for _, base in values])):
        if len(set(own)) == 1:
            return f"arm '{arm}' reports {name} {own[0]:g} with every seed, so its blocks repeat one run"
    return None
