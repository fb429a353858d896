"""`ablate run --continue`: which variants and blocks the new spec has, and that no asking is spent unasked."""

import copy
import io
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.metrics import OTHER_PROGRAM
from ablate.experiments.design.power import alpha_of
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.service.cli.continuing import accept_price, price, with_open_variants, with_processor_time
from ablate.service.schemas.submissions import AskingPublic
from tests.factories import make_plan, make_receipts, make_spec, spec_values
from tests.unit.service.test_cli_show import plan_of

VERDICT = judge(make_plan(), make_spec(), make_receipts(make_plan(), {}), CALIBRATED)


def variant(arm: str, cause: Cause, needed: int | None = None) -> VariantVerdict:
    word = VerdictWord.INCONCLUSIVE
    numbers: dict[str, Any] = {"primary": None, "gates_live": "", "blocks_needed": needed}
    return VariantVerdict(
        arm=arm, verdict=word, measured=word, cause=cause, reason="", decision=Decision.INCONCLUSIVE, **numbers
    )


@given(
    st.sets(st.sampled_from(["psiv-on", "chunk-32"]), min_size=1),
    st.sampled_from([{"count": 6}, {"count": 20}, {"looks": [6, 12]}]),
    st.none() | st.integers(6, 64),
    st.sampled_from([1, 6]),
)
def test_a_continued_spec_has_the_open_variants_and_blocks_enough(
    arms: set[str], blocks: dict[str, Any], needed: int | None, seeds: int
) -> None:
    cause = Cause.MISSING if needed is None else Cause.NOT_PROVED
    values = spec_values(design__blocks=blocks, design__seeds=seeds)
    made = with_open_variants(values, [variant(arm, cause, needed) for arm in sorted(arms)])
    spec = parse_spec(spec_yaml(made), "application/yaml")
    assert set(spec.variants) == arms
    planned = blocks.get("count") or blocks["looks"][-1]
    assert spec.design.blocks.number == max(planned, needed or 0)
    assert spec_values(design__blocks=blocks, design__seeds=seeds) == values, "the given values stay as they are"
    assert spec.design.num_seeds == (max(planned, needed or 0) if seeds == planned else seeds)
    assert {**made, "variants": None, "design": None} == {**values, "variants": None, "design": None}


@pytest.mark.parametrize(("metric", "own"), [("process_s", "cpu_s"), ("tokens_per_s", "cpu_step_s")])
def test_a_question_about_time_becomes_one_about_processor_time_in_turns(metric: str, own: str) -> None:
    steps = {} if metric == "process_s" else {"steps": {"warmup": 3, "timed": 100}}
    values: dict[str, Any] = {
        "ablation": "ask-x",
        "question": "?",
        "workload": {"command": ["python", "train.py"], "code": {"archive": f"sha256:{64 * '0'}"}, **steps},
        "variants": {"x": {"args": ["--x"]}, "decided": {"args": ["--y"]}},
        "design": {"seeds": 6, "blocks": {"count": 6}},
        "placement": {"node_class": "cpu"},
        "verdict": {"primary": {"metric": metric, "margin": "1%"}},
    }
    before = copy.deepcopy(values)
    primary = {**VERDICT.rule["primary"], "metric": metric}
    rule = {**VERDICT.rule, "primary": primary, "comparison": {**VERDICT.rule["comparison"], **OTHER_PROGRAM}}
    arms = {**VERDICT.arms, VERDICT.baseline: VERDICT.arms[VERDICT.baseline].model_copy(update={"step_s": 0.1})}
    verdict = VERDICT.model_copy(
        update={"rule": rule, "arms": arms, "node_class": "cpu", "variants": (variant("x", Cause.NOT_PROVED),)}
    )
    made = with_processor_time(values, verdict)
    spec = parse_spec(spec_yaml(made), "application/yaml")
    assert (spec.verdict.primary.metric, set(spec.variants)) == (own, {"x"})
    assert spec.placement.max_foreign_load == 99
    assert (spec.workload.turns, made["workload"].get("steps", {}).get("slice")) == (
        (True, None) if metric == "process_s" else (False, 2)
    )
    assert values == before
    for wrong in (
        verdict.model_copy(update={"node_class": "h200"}),
        verdict.model_copy(update={"rule": VERDICT.rule}),
        verdict.model_copy(update={"rule": {**rule, "primary": {**primary, "metric": "cpu_s"}}}),
        verdict.model_copy(update={"variants": (variant("x", Cause.MISSING),)}),
    ):
        with pytest.raises(SpecError, match="--processor-time"):
            with_processor_time(values, wrong)


def asking(number: int) -> AskingPublic:
    levels = {"level_pct": 100 * alpha_of(number), "next_level_pct": 100 * alpha_of(number + 1)}
    earlier = [f"ask-{one}" for one in range(1, number)]
    return AskingPublic(number=number, earlier=earlier, mde_pct_per_sd_pct=2.0, next_mde_factor=1.5, **levels)


def test_an_asking_is_spent_only_when_somebody_accepts_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    accept_price(plan_of(6, asking=asking(1)), accepted=False)
    accept_price(plan_of(6), accepted=False)
    again = plan_of(6, asking=asking(3), expected_device_minutes=2.5)
    with pytest.raises(SpecError) as caught:
        accept_price(again, accepted=False)
    (problem,) = caught.value.problems
    assert (problem.pointer, problem.hint) == ("--continue", "to spend it: add --yes")
    accept_price(again, accepted=True)
    text = "\n".join(price(again)).replace("\N{NO-BREAK SPACE}", " ")
    assert "6 new blocks" in text
    assert "about 2.5 device minutes" in text
    assert "spends asking 3 of this question, tested at 0.167 %; the next one is tested at 0.0833 %" in text
    free = "\n".join(price(plan_of(6, asking=asking(1)))).replace("\N{NO-BREAK SPACE}", " ")
    assert "costs no further asking: the first one, tested at 4 %, is not spent yet" in free
