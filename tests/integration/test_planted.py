"""What is planted in real training of one arm is found by the judge, on whatever machine this runs.

Trials train in this process, one after the other in the plan's order; their steps are real, their receipts are sealed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.records.receipt_check import verify
from ablate.experiments.records.receipts import Receipt
from ablate.model.data import dataset as prepared_data
from ablate.model.data.dataset import Dataset
from ablate.model.measurements import Step
from ablate.model.training import loss, optim_step
from ablate.model.training.train import train
from tests.factories import make_plan, make_receipt, make_spec
from tests.integration.worker_service import corpus

Plant: TypeAlias = Callable[[], AbstractContextManager[None]]

STALLED = (7, 12)
"""Timed steps of the variant that a planted stall makes long."""
STALL_S = 0.5


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> AblationSpec:
    folder = corpus(tmp_path_factory.mktemp("planted") / "corpus")
    tiny = {"seq_len": 32, "d_model": 32, "headdim": 16, "d_state": 16, "num_heads": 2, "vocab_size": 512}
    workload = {
        "recipe": "hybrid-tiny",
        "overrides": {**tiny, "corpus": str(folder), "threads": 1},
        "steps": {"warmup": 3, "warmup_s": 0, "timed": 12, "val_rows": 2},
    }
    return make_spec(workload=workload, baseline={}, variants={"psiv-on": {"gates": {"psiv_cache": True}}})


def judged(spec: AblationSpec, plant: Plant, folder: Path) -> VariantVerdict:
    """Train every trial of the spec's plan, the variant's with `plant`, and return the variant's verdict."""
    plan = make_plan(spec)
    config = plan.baseline.config.with_seed(1)
    dataset = prepared_data.prepare(config.data, config.model.vocab_size, cache_dir=folder, report=lambda _: None)
    receipts = [
        trial(plan, block.index, arm, dataset, plant if arm != plan.baseline.name else nullcontext)
        for block in plan.blocks
        for arm in block.order
    ]
    assert [verify(receipt.model_dump(mode="json")) for receipt in receipts] == [[]] * len(receipts)
    (verdict,) = judge(plan, spec, receipts, CALIBRATED).variants
    return verdict


def trial(plan: Plan, index: int, arm: str, dataset: Dataset, plant: Plant) -> Receipt:
    config = plan.arm_by_name[arm].config.with_seed(plan.blocks[index].seed)
    started_at, start = datetime.now(UTC), time.perf_counter()
    with plant():
        result = train(config, dataset=dataset, on_step=lambda _: None)
    measured: dict[str, Any] = {name: getattr(result, name) for name in ("compile_s", "training_s", "warmup_passes")}
    return make_receipt(
        plan,
        index,
        arm,
        steps=tuple(Step.model_validate(vars(step)) for step in result.steps),
        facts=dict(result.facts),
        loss_val=result.loss_val,
        environment={"foreign_load": 0.0},  # what else runs while the tests run is not what is asked here
        started_at=started_at.isoformat(),
        wall_s=time.perf_counter() - start,
        **measured,
    )


@contextmanager
def stalls() -> Iterator[None]:
    """Let two timed steps wait, as for a disk or a collection of garbage."""
    original = optim_step.learning_rate

    def waiting(index: int, config: Any) -> float:
        time.sleep(STALL_S if index in STALLED else 0.0)
        return original(index, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim_step, "learning_rate", waiting)
        yield


@contextmanager
def other_numerics() -> Iterator[None]:
    """Let the variant compute another loss, by one part in a million."""
    original = loss.cross_entropy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "cross_entropy", lambda *given: original(*given) * (1 + 1e-6))
        yield


def test_a_planted_stall_is_said_and_decides_nothing(spec: AblationSpec, tmp_path: Path) -> None:
    verdict = judged(spec, stalls, tmp_path)
    assert (verdict.verdict, verdict.cause, verdict.decision) == (
        VerdictWord.INCONCLUSIVE,
        Cause.STALLS,
        Decision.INCONCLUSIVE,
    )


def test_a_planted_change_of_numerics_is_caught_at_the_first_step(spec: AblationSpec, tmp_path: Path) -> None:
    verdict = judged(spec, other_numerics, tmp_path)
    assert verdict.verdict is VerdictWord.INVALID
    assert "step-1 loss" in verdict.reason
