"""`blocks: auto`: the number that a spec gets, from noise, seeds and requirements; and what is refused."""

import json

import numpy as np
import pytest
import yaml
from scipy import stats

from ablate.experiments.analysis.noise.calibrate import calibrate, key_of
from ablate.experiments.analysis.proposals import proposed
from ablate.experiments.analysis.sizing import PlannedSpec, plan_spec, size_of, sizing_problems
from ablate.experiments.analysis.statistics import dependence_of, strength_of, widening
from ablate.experiments.design.aa_spec import CONTENT_TYPE, calibration_spec
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.power import Look, alpha_of
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import SpecError
from ablate.experiments.records.calibration import Calibration
from tests.calibrations import noisy_blocks
from tests.factories import make_receipt, make_spec, spec_values

SPEC = make_spec()
OWN = key_of(SPEC, make_receipt(make_plan(SPEC), 0, "baseline"))


def calibration(sd: float):
    return calibrate(OWN, noisy_blocks(sd=sd))


def numbered(*known, **changes) -> AblationSpec:
    body = json.dumps(spec_values(design__blocks="auto", **changes)).encode()
    return planned(body, "application/json", *known).spec


def planned(body: bytes, content_type: str, *known: Calibration) -> PlannedSpec:
    """Return the planned spec, whose text and plan are those of a spec with that number."""
    text, kind, spec, plan = plan_spec(body, content_type, parse_spec(body, content_type), lambda: known)
    assert spec == parse_spec(text, kind)
    assert spec.digest == parse_spec(text, kind).digest
    assert plan == make_plan(spec)
    return PlannedSpec(text, kind, spec, plan)


@pytest.mark.parametrize("sd", [0.002, 0.005, 0.02])
def test_the_number_is_the_one_that_the_noise_asks_for_and_the_design_sees_its_threshold(sd: float) -> None:
    spec = numbered(calibration(sd))
    sizing = size_of(spec, make_plan(spec), [calibration(sd)])
    assert sizing is not None
    most, looks = spec.design.blocks.number, spec.design.blocks.schedule
    assert most == sizing.blocks_needed
    assert sizing_problems(spec, sizing) == []
    assert looks[0] >= 6
    assert len(looks) == min(4, 1 + most - 6)


def test_a_plan_with_looks_expects_the_blocks_that_its_t_tests_take() -> None:
    noise = calibration(0.02)
    spec = numbered(noise, variants={"psiv-on": {"gates": {"psiv_cache": True}}})
    sizing = size_of(spec, make_plan(spec), [noise])
    assert sizing is not None
    looks = spec.design.blocks.schedule
    rng = np.random.default_rng(3)
    for one in sizing.expected:
        ends = []
        for _ in range(400):
            d = rng.normal(np.log1p(one.change_pct / 100), noise.sd_pct / 100, looks[-1])
            ends.append(next((n for i, n in enumerate(looks) if answers(d[:n], Look(looks, i), noise)), looks[-1]))
        assert one.blocks == pytest.approx(np.mean(ends), rel=0.1)
    assert sizing.expected[-1].blocks < sizing.expected[0].blocks <= looks[-1]
    fixed = make_spec(design__blocks={"count": looks[-1]})
    alone = size_of(fixed, make_plan(fixed), [noise])
    assert alone is not None
    assert alone.expected == ()


def answers(d: np.ndarray, look: Look, noise: Calibration) -> bool:
    """Return whether the t interval of `d` lies beyond the margin of 0.5 %, or within it."""
    error = d.std(ddof=1) / len(d) ** 0.5 * widening(strength_of(dependence_of([noise])), len(d))
    reach = stats.t.isf(look.level(alpha_of(1)) / 2, len(d) - 2) * error
    return bool(abs(d.mean()) - reach > np.log1p(0.005) or abs(d.mean()) + reach < np.log1p(0.005))


def test_noisier_nodes_and_more_variants_get_more_blocks() -> None:
    numbers = [numbered(calibration(sd)).design.blocks.number for sd in (0.002, 0.008, 0.02)]
    assert numbers == sorted(set(numbers))
    one = {"psiv-on": {"gates": {"psiv_cache": True}}}
    assert numbered(calibration(0.02), variants=one).design.blocks.number < numbers[-1]


def test_later_proposals_of_a_session_get_more_blocks() -> None:
    body = json.dumps(spec_values(design__blocks="auto", variants={"on": {"gates": {"psiv_cache": True}}})).encode()
    made = [
        proposed(body, "application/json", parse_spec(body, "application/json"), "night", number=number, kept=())[0]
        for number in (1, 10, 100)
    ]
    specs = [planned(text, CONTENT_TYPE, calibration(0.008)).spec for text in made]
    numbers = [spec.design.blocks.number for spec in specs]
    assert numbers == sorted(set(numbers))
    plain = planned(body, "application/json", calibration(0.008)).spec.design.blocks.number
    assert plain < numbers[0], "a first asking has a larger level"
    assert [spec.verdict.session is not None for spec in specs] == [True] * 3


def test_the_text_says_where_the_number_comes_from() -> None:
    body = yaml.safe_dump(spec_values(design__blocks="auto")).encode()
    text, kind, *_ = planned(body, CONTENT_TYPE, calibration(0.008))
    first = text.decode().splitlines()[0]
    assert first.startswith(f"# blocks: auto gave {parse_spec(text, kind).design.blocks.number}: sd of d at most ")
    assert calibration(0.008).digest in first
    assert first.endswith("to prove a gain of 1.5 % beyond the margin of 0.5 %")


def test_exact_metrics_and_calibrations_need_no_noise() -> None:
    exact = {"metric": "peak_allocated_gib", "margin": "0%"}
    assert numbered(verdict__primary=exact, design__seeds=[1, 2, 3]).design.blocks.number == 6
    assert numbered(verdict__primary=exact, design__seeds=[1]).design.blocks.number == 2
    repeat = {"repeat": {"gates": {"chunk_size": 16}}}
    assert numbered(purpose="calibration", variants=repeat).design.blocks.number == 20


def test_every_seed_of_a_tested_loss_gets_a_block() -> None:
    tested = [{"metric": "loss_final", "not_worse_by": 0.05}]
    assert numbered(calibration(0.002), design__seeds=14, verdict__require=tested).design.blocks.schedule[-1] == 14
    assert numbered(calibration(0.002), design__seeds=14).design.blocks.number < 14


def test_auto_does_not_size_a_loss_over_seeds() -> None:
    with pytest.raises(SpecError, match="how 'loss_val' differs between seeds"):
        numbered(calibration(0.002), verdict__primary={"metric": "loss_val", "margin": "0.01 nats"}, design__seeds=12)


@pytest.mark.parametrize(
    ("known", "message", "hint"),
    [
        ((), "was not measured", "ablate aa cpu --like SPEC"),
        ((calibrate(OWN, noisy_blocks(19)),), "was not measured", "ablate aa cpu"),
        (
            (calibration(3.0),),
            "no allowed number of blocks proves a gain of 1.5 % beyond the margin of 0.5 %",
            "a larger effect (verdict.primary.adopt_if)",
        ),
    ],
)
def test_what_cannot_be_sized_is_refused_with_what_mends_it(known: tuple, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        numbered(*known)
    (problem,) = caught.value.problems
    assert (problem.pointer, message in problem.detail, hint in str(problem.hint)) == ("#/design/blocks", True, True)


def test_a_spec_without_its_number_is_planned_by_nobody_and_calibrated_all_the_same() -> None:
    spec = make_spec(design__blocks="auto")
    with pytest.raises(SpecError, match="was not measured"):
        make_plan(spec)
    with pytest.raises(ValueError, match="has no number"):
        _ = spec.design.blocks.schedule
    text = calibration_spec(spec, node_class="cpu", blocks=20, order_seed=1)
    assert parse_spec(text, CONTENT_TYPE).design.blocks.number == 20


@pytest.mark.parametrize("blocks", ["automatic", "", True, {"auto": True}, {}, {"count": "auto"}, ["auto"]])
def test_nothing_else_means_auto(blocks: object) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(json.dumps(spec_values(design__blocks=blocks)).encode(), "application/json")
    assert all(problem.pointer.startswith("#/design/blocks") for problem in caught.value.problems)
