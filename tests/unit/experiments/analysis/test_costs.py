"""The costs of training beside a loss: against a count of their own, and where they are said."""

import random
from typing import Any

import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import Costs, Verdict
from ablate.experiments.design.plan import make_plan
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.reporting.verdict_layout import lay_out
from tests.factories import make_receipt, make_spec
from tests.unit.experiments.design.flop_oracle import step_flops, step_tokens

LOSS = {"metric": "loss_val", "margin": "1%"}


def judged(
    values: dict[str, Any], *, equal: str = "steps", timed: int = 119, **changes: Any
) -> tuple[Verdict, list[dict[str, Any]]]:
    """Return a verdict on a variant with these values, and both configurations, the variant's first."""
    spec = make_spec(
        workload__steps={"warmup": 0, "warmup_s": 0, "timed": timed, "val_rows": 2, "equal": equal},
        baseline={},
        variants={"other": {"overrides": values}},
        design={"seeds": 6, "blocks": {"count": 6}},
        **{"verdict__primary": LOSS, **changes},
    )
    plan = make_plan(spec)
    speeds, parameters = {"baseline": 5000.0, "other": 4000.0}, {"baseline": 1_000_000, "other": 1_500_000}
    receipts = [
        make_receipt(plan, block, arm, tokens_per_s=speeds[arm], parameters=parameters[arm])
        for block in plan.blocks
        for arm in block.order
    ]
    return judge(plan, spec, receipts, CALIBRATED), [plan.arm_by_name[name].config for name in ("other", "baseline")]


@pytest.mark.parametrize("seed", range(8))
def test_costs_are_those_of_an_own_count(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    equal = chance.choice(("tokens", "flops"))
    values: dict[str, Any] = {
        "d_model": 64 * chance.randint(1, 4),
        "pattern": "".join(chance.choices("MAF", k=3)),
        "micro_batch": chance.choice((1, 3, 4, 6)),
    }
    verdict, configs = judged(values, equal=equal, timed=119 if equal == "tokens" else 599)
    steps = [config.steps.total for config in configs]
    tokens, flops = ([count(c) * n for c, n in zip(configs, steps, strict=True)] for count in (step_tokens, step_flops))
    costs = verdict.variants[0].costs
    assert costs is not None
    assert costs.tokens == pytest.approx(tokens[0] / tokens[1])
    assert costs.flops == pytest.approx(flops[0] / flops[1])
    assert costs.parameters == 1.5
    assert costs.seconds == pytest.approx(tokens[0] / 4000 / (tokens[1] / 5000), rel=1e-9)
    assert (costs.tokens == 1.0) == (tokens[0] == tokens[1])
    (remark,) = (one for one in lay_out(verdict).variants[0].remarks if "training took" in one)
    assert ("equal tokens" in remark) == (tokens[0] == tokens[1])


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({}, True),
        ({"verdict__primary": {"metric": "model_tflops_per_s", "margin": "1%"}}, False),
        (
            {
                "verdict__primary": {"metric": "model_tflops_per_s", "margin": "1%"},
                "verdict__require": [{"metric": "loss_val", "not_worse_by": 0.1}],
            },
            True,
        ),
    ],
)
def test_costs_stand_beside_losses(changes: dict[str, Any], there: bool) -> None:
    verdict, _ = judged({"learning_rate": 1e-4}, timed=20, **changes)
    assert (verdict.variants[0].costs is not None) == there


def test_equal_costs_are_called_equal_and_unknown_ones_are_left_out() -> None:
    costs = Costs(tokens=1.0, flops=0.99812, parameters=None, seconds=0.8893)
    assert list(costs.in_words()) == [
        "equal tokens",
        "0.9981 times the model FLOPs",
        "0.889 times the seconds, as measured",
    ]
