"""Published tables: the article's table as it stands in the repository, and drawn tables against plain t intervals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from ablate.experiments.analysis.published import PublishedTable, assess, read_table
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import Decision, VerdictWord
from tests.architecture.pages import ROOT

SELECTIVE_P1 = ROOT / "docs/published/selective-p1.yaml"
PRINTED = Path(ROOT / "docs/published/README.md")


def values(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load(SELECTIVE_P1.read_text()), **changes}


def table(**changes: Any) -> PublishedTable:
    return read_table(yaml.safe_dump(values(**changes)).encode())


def test_selective_p1_is_one_process_of_each_arm_and_decides_nothing() -> None:
    assessment = assess(read_table(SELECTIVE_P1.read_bytes()))
    assert (assessment.word, assessment.decision, assessment.primary) == (
        VerdictWord.INCONCLUSIVE,
        Decision.INCONCLUSIVE,
        None,
    )
    assert assessment.change_pct == pytest.approx(100 * (183.005 / 183.016 - 1), abs=1e-9)
    assert "-0.006 % from one process of each arm (n = 1): the 19 steps" in assessment.reason
    step1, final, validation, memory = assessment.requirements
    assert (step1.passed, step1.detail) == (True, "identical in the 4 printed decimals; the bits are unknown")
    assert (memory.passed, memory.detail) == (True, "largest change +0.762 GiB")
    for loss, change in ((final, "-0.1478"), (validation, "-0.1592")):
        assert not loss.passed
        assert loss.detail.startswith(f"{change} nats from one run of each arm: a test needs 4 seeds")
    page = PRINTED.read_text()
    assert all(text in page for text in ("-0.006 %", "`inconclusive`", "-0.148 and -0.159", "0.762 GiB"))


def test_with_six_processes_the_numbers_decide_as_a_plain_t_interval_does() -> None:
    rng, seen = np.random.default_rng(5), set()
    for effect in (0.0, 0.0, 0.3, 0.5, 2.0, -2.0, 1.0) * 6:
        base = 180 * np.exp(rng.normal(0, 0.01, 8))
        own = base * np.exp(effect / 100 + rng.normal(0, 0.003, 8))
        both = {"baseline": [f"{x:.6f}" for x in base], "variant": [f"{x:.6f}" for x in own]}
        assessment = assess(table(values={"model_tflops_per_s": both}, require=[]))
        d = np.log(np.array(both["variant"], float) / np.array(both["baseline"], float))
        reach = stats.t.ppf(1 - 0.04 / 2, 7) * d.std(ddof=1) / np.sqrt(8)
        differs = d.mean() - reach > np.log1p(0.005) or d.mean() + reach < np.log1p(-0.005)
        inside = abs(d.mean()) + stats.t.ppf(1 - 0.04, 7) * d.std(ddof=1) / np.sqrt(8) < np.log1p(0.005)
        sides = {True: VerdictWord.BETTER, False: VerdictWord.WORSE}
        expected = sides[bool(d.mean() > 0)] if differs else VerdictWord.SAME if inside else VerdictWord.INCONCLUSIVE
        assert assessment.word is expected
        seen.add(expected)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("variant", "passed", "undecided"),
    [
        (["5.301", "5.339", "5.281", "5.310"], True, False),
        (["5.401", "5.439", "5.381", "5.410"], False, False),
        (["5.301", "5.539", "5.181", "5.310"], False, True),
    ],
)
def test_losses_of_four_runs_can_be_proved_no_worse(variant: list[str], passed: bool, undecided: bool) -> None:
    losses = {"baseline": ["5.300", "5.340", "5.280", "5.311"], "variant": variant}
    values = {"model_tflops_per_s": {"baseline": ["1"] * 4, "variant": ["1"] * 4}, "loss_final": losses}
    require = [{"metric": "loss_final", "not_worse_by": 0.05}]
    (result,) = assess(table(values=values, require=require)).requirements
    assert (result.passed, result.undecided) == (passed, undecided), result.detail


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": {"model_tflops_per_s": {"baseline": [183.016], "variant": ["1"]}}}, "must be a string"),
        ({"values": {"model_tflops_per_s": {"baseline": ["1"], "variant": ["fast"]}}}, "allowed: a number as printed"),
        (
            {"values": {**values()["values"], "model_tflops_per_s": {"baseline": ["0.0"], "variant": ["1"]}}},
            "is 0; allowed: above 0",
        ),
        *(
            ({"values": {"model_tflops_per_s": {"baseline": [bad], "variant": ["1"]}}}, "allowed: a number as printed")
            for bad in ("-1", "nan", "inf", "", " 1", "1" * 400, "0." + "0" * 400 + "1", "\u0661")
        ),
        ({"steps_per_process": 0}, "allowed: at least 1"),
        ({"values": {}}, "no values of 'loss_final'"),
        ({"values": {**values()["values"], "speed": {"baseline": ["1"], "variant": ["1"]}}}, "unknown metric 'speed'"),
        ({"primary": {"metric": "loss_val", "margin": "0%"}}, "must be one of tokens_per_s"),
        (
            {"values": {**values()["values"], "loss_val": {"baseline": ["1", "2"], "variant": ["1"]}}},
            "one number per process",
        ),
    ],
)
def test_a_table_that_cannot_be_judged_is_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        table(**changes)
    assert any(words in problem.detail for problem in caught.value.problems), caught.value.problems
