"""One ablation as its readers see it: what the report and the MLflow projection are made from."""

from dataclasses import dataclass

from experiments.analysis.verdicts import Verdict
from experiments.design.plan import Plan
from experiments.records.receipts import Receipt


@dataclass(frozen=True, kw_only=True)
class TrialView:
    """One trial, with its receipt once it has one."""

    trial_id: str
    block_index: int
    arm: str
    position: int
    state: str
    attempt_id: str | None
    receipt: Receipt | None


@dataclass(frozen=True, kw_only=True)
class AblationView:
    """One ablation with everything that is stored about it."""

    ablation_id: str
    name: str
    question: str
    state: str
    created_at: str
    """RFC 3339 UTC."""
    spec_text: str
    spec_digest: str
    plan: Plan
    verdict: Verdict | None
    trials: tuple[TrialView, ...]
