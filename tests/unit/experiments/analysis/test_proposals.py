"""Proposals of a session: the level in spec, rule and tests, what a proposal may change, and the next incumbent."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.looks import at_look
from ablate.experiments.analysis.noise.calibrate import calibrate
from ablate.experiments.analysis.proposals import (
    as_yaml,
    opening_problems,
    outcome_of,
    proposal_problems,
    proposed,
    refuse_session_key,
    since_the_first,
    small_margin,
    with_kept,
)
from ablate.experiments.design.aa_spec import calibration_spec
from ablate.experiments.design.load import load_values, parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.power import Look, alpha_of, detectable_per_sd, session_level
from ablate.experiments.design.rule import rule_of
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.workload import BY_ARM
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import PROPOSAL_EXIT_CODES, Decision, Outcome, ProposalOutcome, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED, Circumstances
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pages.circumstance_tables import rule_in_words
from ablate.experiments.reporting.verdict_layout import lay_out, short_answer
from tests.calibrations import KEY, noisy_blocks
from tests.factories import command_values, make_receipt, make_receipts, spec_values
from tests.unit.experiments.analysis.test_caps import asked

AGAIN = "'again' (cancelled)"
ONE = {"psiv-on": {"gates": {"psiv_cache": True}}}


def propose(values: dict[str, Any], session: str, number: int, kept: tuple[int, ...]) -> bytes:
    """Return the text of a proposal, which is the text of its spec."""
    body = json.dumps(values).encode()
    text, spec = proposed(
        body, "application/json", parse_spec(body, "application/json"), session, number=number, kept=kept
    )
    assert spec == parse_spec(text, "application/yaml")
    return text


def values_of(**changes: Any) -> dict[str, Any]:
    return spec_values(**{"variants": ONE, **changes})


def as_proposal(values: dict[str, Any], number: int = 3, kept: tuple[int, ...] = ()) -> AblationSpec:
    text = propose(values, "night", number, kept)
    return parse_spec(text, "application/yaml")


def judged(spec: AblationSpec, ratio: float, circumstances: Circumstances = CALIBRATED, **options: Any) -> Any:
    plan = make_plan(spec)
    receipts = make_receipts(plan, {"psiv-on": ratio}, **{"sd": 0.001, **options})
    return judge(plan, spec, receipts, circumstances)


@pytest.mark.parametrize("asking", [1, 5])
@pytest.mark.parametrize(("number", "kept"), [(1, ()), (3, ()), (3, (1, 2)), (100, (7,))])
def test_the_level_of_a_proposal_takes_the_place_of_that_of_an_asking(
    asking: int, number: int, kept: tuple[int, ...]
) -> None:
    spec = as_proposal(values_of(), number, kept)
    variant = judged(spec, 1.03, asked(asking)).variants[0]
    assert variant.primary is not None
    assert variant.primary.alpha == session_level(number, kept) == spec.verdict.level_of(asking)
    assert f"proposal {number} of session 'night', tested at {100 * session_level(number, kept):.2g} %" in variant.notes
    notes = [note for note in variant.notes if note.startswith("asking")]
    assert notes == [f"asking 5 of this question; before it: {', '.join([AGAIN] * 3)}"] * (asking == 5)


def test_the_level_is_part_of_the_rule_and_cannot_be_chosen_afterwards() -> None:
    spec, other = as_proposal(values_of()), as_proposal(values_of(), 4)
    assert rule_of(spec)["comparison"]["session"] == {
        "name": "night",
        "proposal": 3,
        "kept": [],
        "level": session_level(3),
    }
    assert "LORD++" in rule_of(spec)["comparison"]["askings"]
    plan = make_plan(spec)
    assert plan.rule_digest not in {make_plan(other).rule_digest, make_plan(parse(values_of())).rule_digest}
    receipts = make_receipts(plan, {"psiv-on": 1.03}, sd=0.001)
    assert judge(plan, spec, receipts, CALIBRATED).variants[0].verdict is VerdictWord.BETTER
    assert judge(plan, other, receipts, CALIBRATED).variants[0].verdict is VerdictWord.INVALID


def parse(values: dict[str, Any]) -> AblationSpec:
    return parse_spec(json.dumps(values).encode(), "application/json")


def test_plans_and_looks_use_the_level_of_the_proposal() -> None:
    spec = as_proposal(values_of(design__blocks={"looks": [6, 8, 12]}), 50)
    plan = make_plan(spec)
    assert plan.mde_pct_per_sd_pct == detectable_per_sd(12, level=Look((6, 8, 12), 2).level(session_level(50)))
    plain = parse(values_of(design__blocks={"looks": [6, 8, 12]}))
    late, early = (chance(one) for one in (spec, plain))
    assert late < 0.5 * early


def chance(spec: AblationSpec) -> float:
    """The chance of an answer at the first look, which its reason tells in percent."""
    plan = make_plan(spec)
    receipts = make_receipts(plan, {"psiv-on": 1.02}, sd=0.02, seed=2)
    return float(at_look(plan, spec, receipts, CALIBRATED, 0).reason.partition("blocks is ")[2].partition("%")[0])


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [(1.03, ProposalOutcome.KEEP), (0.97, ProposalOutcome.DISCARD), (1.004, ProposalOutcome.UNDECIDED)],
)
def test_a_decision_is_keep_discard_or_undecided(ratio: float, outcome: ProposalOutcome) -> None:
    assert outcome_of(judged(as_proposal(values_of()), ratio, sd=0.004)) is outcome


@pytest.mark.parametrize(("metric", "sign"), [("tokens_per_s", 1), ("step_s", -1)])
@pytest.mark.parametrize(("sd", "adopt_if"), [(0.002, "0.5%"), (0.006, "0.5%"), (0.006, "2.5%")])
def test_a_kept_effect_is_shown_without_the_mean_luck_of_kept_ones(
    metric: str, sign: int, sd: float, adopt_if: str
) -> None:
    primary = {"metric": metric, "margin": "0.5%", "adopt_if": adopt_if}
    spec = as_proposal(values_of(verdict__primary=primary, design__blocks={"count": 10}))
    verdict = judged(spec, 1.03, sd=sd)
    (variant,) = verdict.variants
    one = variant.primary
    assert (variant.decision, math.copysign(1, one.delta_pct)) == (Decision.ADOPT, sign)
    near, bound, threshold = (
        sign * math.log1p(pct / 100)
        for pct in (one.ci_low_pct if sign > 0 else one.ci_high_pct, sign * 0.5, sign * float(adopt_if[:-1]))
    )
    gain, se = abs(math.log1p(one.delta_pct / 100)), one.sd_pct / 100 * one.widened / math.sqrt(one.blocks)
    least = max(gain - near + bound, threshold)
    mean = stats.truncnorm.mean((least - gain) / se, np.inf, loc=gain, scale=se)
    assert sign * math.log1p(variant.shrunk_pct / 100) == pytest.approx(max(near, 2 * gain - mean), rel=1e-6)
    assert abs(variant.shrunk_pct) <= abs(one.delta_pct)
    shown = wording.percent(variant.shrunk_pct)
    differs = shown != wording.percent(one.delta_pct)
    assert differs == (adopt_if == "2.5%" and sign < 0), "the threshold is so near in one case only"
    assert (f" (shrunk {shown})" in short_answer(verdict)) == differs == ("shrunk" in short_answer(verdict))
    assert (f"without their mean luck it is {shown}" in lay_out(verdict).variants[0].sentence) == differs
    (plain,) = judged(parse(values_of(verdict__primary=primary, design__blocks={"count": 10})), 1.03, sd=sd).variants
    assert (plain.decision, plain.shrunk_pct) == (Decision.ADOPT, None)


def test_a_proven_null_and_a_broken_variant_are_discarded_and_an_invalid_one_is_undecided() -> None:
    assert outcome_of(judged(as_proposal(values_of()), 1.0, sd=0.0001)) is ProposalOutcome.DISCARD
    spec = as_proposal(values_of())
    plan = make_plan(spec)
    for outcome, expected in ((Outcome.OOM, ProposalOutcome.DISCARD), (Outcome.INVALID, ProposalOutcome.UNDECIDED)):
        ended = {"baseline": {}, "psiv-on": {"outcome": outcome, "message": "it ended"}}
        receipts = [make_receipt(plan, block, arm, **ended[arm]) for block in plan.blocks for arm in block.order]
        assert outcome_of(judge(plan, spec, receipts, CALIBRATED)) is expected


@pytest.mark.parametrize("seed", range(20))
def test_a_margin_below_three_quarters_of_the_noise_is_small(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  # draws numbers
    own = [calibrate(KEY, noisy_blocks(20, sd=rng.uniform(0.0005, 0.05), seed=number)) for number in range(1, 4)]
    noise, margin = max(one.sd_pct for one in own), round(rng.uniform(0.1, 6.0), 2)
    spec = parse(values_of(verdict__primary={"metric": "tokens_per_s", "margin": f"{margin}%"}))
    text = small_margin(spec, own)
    assert (text is not None) == (margin < 0.75 * noise)
    assert text is None or f"The margin of {margin:g} % is {margin / noise:.2g} standard deviations" in text
    assert small_margin(spec, []) is None
    amount = {"metric": "loss_val", "margin": "0.01 nats"}
    assert small_margin(parse(values_of(verdict__primary=amount)), own) is None, "an amount is no percent"


def test_every_decision_has_an_outcome() -> None:
    verdict = judged(as_proposal(values_of()), 1.03)
    variant = verdict.variants[0]
    made = {
        decision: outcome_of(
            verdict.model_copy(update={"variants": (variant.model_copy(update={"decision": decision}),)})
        )
        for decision in Decision
    }
    assert {decision for decision, outcome in made.items() if outcome is ProposalOutcome.KEEP} == {Decision.ADOPT}
    assert set(made.values()) == set(ProposalOutcome) == set(PROPOSAL_EXIT_CODES)


def test_a_late_proposal_needs_more_than_an_early_one() -> None:
    variants = [judged(as_proposal(values_of(), number), 1.02, sd=0.004, seed=5).variants[0] for number in (1, 150)]
    assert [variant.verdict for variant in variants] == [VerdictWord.BETTER, VerdictWord.INCONCLUSIVE]
    assert alpha_of(1) > session_level(1)


def test_a_submitted_spec_cannot_choose_its_level() -> None:
    refuse_session_key(parse(values_of()))
    with pytest.raises(SpecError) as refused:
        refuse_session_key(as_proposal(values_of()))
    (problem,) = refused.value.problems
    assert (problem.pointer, "ablate try --session night" in str(problem.hint)) == ("#/verdict/session", True)


def test_a_calibration_like_a_proposal_has_no_session() -> None:
    like = as_proposal(values_of())
    text = calibration_spec(like, node_class="cpu", blocks=20, order_seed=1)
    assert parse_spec(text, "application/yaml").verdict.session is None


LOSS = {"metric": "loss_val", "margin": "0%", "adopt_if": None}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"variants": {**ONE, "chunk-32": {"gates": {"chunk_size": 32}}}}, {"#/variants"}),
        ({"baseline": {}}, {"#/baseline/gates/chunk_size"}),
        ({"baseline": {"gates": {"chunk_size": 32}}}, {"#/baseline/gates/chunk_size"}),
        ({"workload__steps__timed": 5}, {"#/workload/steps/timed"}),
        ({"workload__recipe": "attention-tiny"}, {"#/workload/recipe"}),
        ({"workload__overrides": {"d_model": 64}}, {"#/workload/overrides/d_model"}),
        ({"placement__node_class": "h100"}, {"#/placement/node_class"}),
        ({"verdict__primary__metric": "step_s"}, {"#/verdict/primary/metric"}),
        ({"verdict__primary__margin": "0.1%"}, {"#/verdict/primary/margin"}),
        ({"verdict__require": [{"metric": "loss_val", "rule": "identical"}]}, {"#/verdict/require"}),
        ({"purpose": "calibration"}, {"#/purpose"}),
        ({"ablation": "other", "question": "Why?", "labels": {"a": "b"}, "limits": {"trial": "5m"}}, set()),
        ({"design__blocks": {"looks": [6, 8]}, "design__seeds": [3]}, set()),
        ({"variants": {"other": {"gates": {"chunk_size": 32}}}}, set()),
    ],
)
def test_a_proposal_changes_its_variant_and_nothing_that_must_stay(changes: dict[str, Any], where: set[str]) -> None:
    problems = list(proposal_problems(parse(values_of(**changes)), parse(values_of()), "night"))
    assert {problem.pointer for problem in problems} == where
    assert all("given: " in problem.detail or problem.pointer == "#/purpose" for problem in problems)
    assert all(problem.hint for problem in problems)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({}, []),
        ({"verdict__primary": LOSS}, ["#/verdict/primary/margin"]),
        ({"purpose": "calibration"}, ["#/purpose"]),
    ],
)
def test_what_cannot_open_a_session(changes: dict[str, Any], where: list[str]) -> None:
    assert [problem.pointer for problem in opening_problems(parse(values_of(**changes)))] == where


def random_recipe(rng: random.Random) -> dict[str, Any]:
    gates = {"psiv_cache": [True, False], "chunk_size": [16, 32], "dtype": ["float32", "bfloat16"]}
    draw = {name: rng.choice(allowed) for name, allowed in gates.items()}
    base = {name: rng.choice(gates[name]) for name in gates if rng.random() < 0.5}
    values = {"learning_rate": rng.choice([1e-3, 1e-4]), "rope_fraction": rng.choice([0.5, 1.0])}
    own = {"gates": draw, "overrides": values} if rng.random() < 0.5 else {"gates": draw}
    return spec_values(baseline=rng.choice([{}, {"gates": base}]), variants={"new": own})


def random_command(rng: random.Random) -> dict[str, Any]:
    git = {"git": "/srv/git/lab.git", "commit": "4f2a9c1"}
    archives = [{"archive": f"sha256:{number * 64}"} for number in "12"]
    code = rng.choice(["/srv/lab", git, archives[0]])
    changes: dict[str, Any] = {
        "args": ["--lr", rng.choice(["1e-3", "2E5", str(rng.random())])],
        "env": {"A": str(rng.random())},
        "code": rng.choice([archives[1], "/srv/other", *([{"commit": "9c1b77e"}] if code is git else [])]),
        "environment": {"lock": rng.choice(["a.lock", "b.lock"])},
    }
    own = rng.sample(sorted(changes), rng.randint(1, 4))
    base = {name: value for name, value in {"args": ["--old"], "env": {"B": "1"}}.items() if rng.random() < 0.5}
    values = command_values(baseline=base, variants={"new": {name: changes[name] for name in own}})
    values["workload"] |= {"code": code, "env": {"C": "2"}, **rng.choice([{}, {"environment": {"lock": "a.lock"}}])}
    evaluates = rng.choice([None, ["python", "judge.py"], {"command": ["a"]}, {"command": ["a"], "code": archives[1]}])
    if evaluates is not None:
        values["workload"] |= {"evaluate": evaluates, "metrics": {"val": {"better": "lower"}}}
    arms = rng.choice([[], ["new"], ["baseline"], ["baseline", "new"]])
    if arms:
        values["workload"]["require_kernels"] = {arm: f"kernel_of_{arm}" for arm in arms}
        values["workload"]["require_live"] = {arm: {"fused": arm == "new"} for arm in rng.choice([arms, ["new"]])}
    return values


@pytest.mark.parametrize("make", [random_recipe, random_command])
def test_the_next_incumbent_is_the_kept_arm(make: Any) -> None:
    """Against an independent reading: the arms that the two specs resolve to."""
    rng, compared = random.Random(29), 0  # noqa: S311  # draws specs
    while compared < 40:
        values = make(rng)
        try:
            kept = make_plan(as_proposal(values)).arm_by_name["new"]
        except SpecError:  # the drawn variant equals the baseline
            continue
        opened = values | {"design": {**values["design"], "blocks": {"looks": [6, 9]}}, "labels": {"of": "session"}}
        opened["workload"] = {key: value for key, value in values["workload"].items() if key not in BY_ARM}
        kept_text = propose(values, "s", 1, ())
        text = with_kept(as_yaml(json.dumps(opened).encode(), "application/json"), kept_text)
        following = parse_spec(text, "application/yaml")
        assert following.verdict.session is None
        assert (following.design.blocks.looks, following.labels) == ((6, 9), {"of": "session"})
        changed = {"args": ["--next"]} if make is random_command else {"gates": {"chunk_size": 8, "micro_batch": 2}}
        plain = following.model_dump(mode="json", exclude_none=True) | {"variants": {"next": changed}}
        config = make_plan(parse(plain)).baseline.config.values_with_seed
        assert config == kept.config.values_with_seed
        assert not list(proposal_problems(parse(plain), following, "s"))
        compared += 1


@pytest.mark.parametrize("make", [random_recipe, random_command])
def test_the_whole_gain_of_a_session_is_its_incumbent_against_its_first_baseline(make: Any) -> None:
    """Against an independent reading: the arms of all proposals on the way, each kept."""
    rng, compared = random.Random(30), 0  # noqa: S311  # draws specs
    while compared < 30:
        values = make(rng)
        opened = values | {"labels": {"of": "session"}}
        opened["workload"] = {key: value for key, value in values["workload"].items() if key not in BY_ARM}
        incumbent = as_yaml(json.dumps(opened).encode(), "application/json")
        first = b""
        try:
            for number in range(1, rng.randint(2, 4)):
                own = make(rng)["variants"] if number > 1 else values["variants"]
                now = load_values(incumbent, "application/yaml") | {"variants": own, "labels": {}}
                if number == 1:
                    now["workload"] = values["workload"]
                text = propose(now, "s", number, ())
                kept = make_plan(parse_spec(text, "application/yaml")).arm_by_name["new"]
                first = first or text
                incumbent = with_kept(incumbent, text)
            whole = parse_spec(since_the_first(first, incumbent), "application/yaml")
            plan = make_plan(whole)
        except SpecError:  # a drawn variant, or all of them together, equal the baseline, or do not fit it
            continue
        assert (whole.verdict.session, whole.labels) == (None, {"of": "session"})
        began = make_plan(parse_spec(first, "application/yaml")).baseline
        assert plan.baseline.config.values_with_seed == began.config.values_with_seed
        assert plan.arm_by_name["incumbent"].config.values_with_seed == kept.config.values_with_seed
        compared += 1


def test_the_page_says_the_session_in_place_of_the_askings() -> None:
    verdict = judged(as_proposal(values_of(), 7, (2,)), 1.03, asked(3))
    text = rule_in_words(verdict.rule)
    assert "It is proposal 7 of session 'night', with a level of 0.2" in text
    assert "which the session gave it before the first sample" in text
    plain = parse(values_of())
    assert "session" not in rule_in_words(rule_of(plain))


LOSS_OVER_SEEDS = {"metric": "loss_val", "margin": "0.01 nats", "adopt_if": "0.02 nats"}


def test_a_proposal_that_is_judged_over_seeds_cannot_choose_them() -> None:
    lab = command_values(
        workload__metrics={"val_bpb": {"better": "lower"}},
        verdict__primary={"metric": "val_bpb", "margin": "0.5%"},
        design__seeds=[7, 8, 9, 10, 11, 12],
    )
    loss = values_of(verdict__primary=LOSS_OVER_SEEDS, design__seeds=12, design__blocks={"count": 12})
    assert [as_proposal(values, 1).design.seeds for values in (lab, loss)] == [6, 12]
    assert as_proposal(values_of(), 1).design.seeds == (1, 2), "times have no seeds"


def evaluated(code: Any, evaluate: Any, **changes: Any) -> AblationSpec:
    workload = {"workload__code": code, "workload__evaluate": evaluate, "workload__metrics": {"v": {"better": "lower"}}}
    return parse(command_values(**workload, **changes))


ARCHIVE, COMMIT = {"archive": "sha256:" + 64 * "1"}, {"git": "/srv/git/lab.git", "commit": "4f2a9c1"}


@pytest.mark.parametrize(
    ("code", "evaluate", "opens"),
    [
        (ARCHIVE, ["judge"], True),
        (COMMIT, ["judge"], True),
        ("/srv/lab", ["judge"], False),
        ("/srv/lab", {"command": ["judge"], "code": ARCHIVE}, True),
        (ARCHIVE, {"command": ["judge"], "code": "/srv/lab"}, False),
    ],
)
def test_a_session_has_an_evaluation_whose_code_cannot_change(code: Any, evaluate: Any, opens: bool) -> None:
    found = [problem.pointer for problem in opening_problems(evaluated(code, evaluate))]
    assert found == ([] if opens else ["#/workload/evaluate"])


@pytest.mark.parametrize(
    "evaluate", [["other"], ["judge", "--kind"], {"command": ["judge"], "code": COMMIT}, {"command": ["other"]}, None]
)
def test_a_proposal_has_the_evaluation_of_its_session(evaluate: Any) -> None:
    session = evaluated(ARCHIVE, ["judge"])
    other = evaluated(ARCHIVE, evaluate)
    problems = list(proposal_problems(other, session, "night"))
    assert problems
    assert all(problem.pointer.startswith("#/workload/evaluate") for problem in problems)
    assert list(proposal_problems(evaluated(ARCHIVE, {"command": ["judge"]}), session, "night")) == []


@pytest.mark.parametrize(
    ("code", "proposal", "allowed"),
    [
        (ARCHIVE, {"archive": "sha256:" + "1" * 64}, True),
        (ARCHIVE, "/srv/lab", False),
        (ARCHIVE, COMMIT, False),
        (COMMIT, {"commit": "1234567"}, True),
        (COMMIT, {**COMMIT, "commit": "1234567"}, True),
        (COMMIT, {**COMMIT, "git": "/srv"}, False),
    ],
)
def test_a_proposal_takes_no_code_of_the_node_beside_an_evaluation(code: Any, proposal: Any, allowed: bool) -> None:
    evaluate = {"command": ["judge"], "code": ARCHIVE}
    session = evaluated(code, evaluate)
    spec = evaluated(code, evaluate, variants={"x": {"code": proposal}})
    problems = list(proposal_problems(spec, session, "night"))
    assert [one.pointer for one in problems] == ([] if allowed else ["#/variants/x/code"])
