from typing import Any

import pytest

from ablate.experiments.analysis.arm_summary import gates_live
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict, Verdict
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.digest import digest
from ablate.experiments.errors import ReceiptError
from ablate.experiments.outcomes import Decision, FailureClass, Outcome, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED, UNCALIBRATED
from ablate.experiments.records.receipts import DeviceEvents, Receipt
from ablate.kernels.scan_switches import ScanFact
from ablate.model.facts import ModelFact
from tests.factories import GIB, make_plan, make_receipt, make_receipts, make_spec, observed_facts

SPEC = make_spec()
SOURCE, BINARY = ScanFact.SOURCE_HASH, ScanFact.BINARY_HASH
PLAN = make_plan(SPEC)
GOOD = {"psiv-on": 1.03}


def judged(spec: AblationSpec = SPEC, *, calibrated: bool = True, swap: dict[str, Any] | None = None,
            where: tuple[int, str] = (2, "psiv-on"), **receipts: Any) -> Verdict:  # fmt: skip
    """Judge good receipts, with the one at `where` made again with `swap`."""
    plan = make_plan(spec)
    made = make_receipts(plan, receipts.pop("speeds", GOOD), sd=receipts.pop("sd", 0.001), **receipts)
    if swap is not None:
        made = [r for r in made if (r.ids.block_index, r.arm) != where] + [make_receipt(plan, *where, **swap)]
    return judge(plan, spec, made, CALIBRATED if calibrated else UNCALIBRATED)


def psiv(verdict: Verdict) -> VariantVerdict:
    return next(variant for variant in verdict.variants if variant.arm == "psiv-on")


def requiring(**requirement: Any) -> AblationSpec:
    return make_spec(verdict__require=[requirement])


def test_judge_adopts_what_is_better_beyond_the_bound() -> None:
    variant = psiv(judged())
    assert (variant.verdict, variant.measured, variant.decision) == (
        VerdictWord.BETTER,
        VerdictWord.BETTER,
        Decision.ADOPT,
    )
    assert variant.primary is not None
    assert variant.primary.delta_pct == pytest.approx(3.0, abs=0.2)
    assert variant.primary.ci_low_pct < variant.primary.tost_low_pct < 3 < variant.primary.tost_high_pct
    assert variant.primary.p_sign_flip == 2 / 64
    assert variant.primary.blocks == len(variant.primary.differences_pct) == 6
    seen, _, rest = variant.gates_live.partition(", not observed here: ")
    assert seen == "/".join([str(6 * (len(GATES) - len(rest.split(", "))))] * 2)
    assert {"tma", "warp_specialize"} <= set(rest.split(", ")), "gates of kernels that no CPU has"
    assert variant.reason.startswith("tokens_per_s +")


def test_gates_that_are_not_live_are_named() -> None:
    receipt = make_receipt(make_plan(), 0, "baseline")
    name, other = sorted(receipt.gates)[:2]
    idle = {gate: receipt.gates[gate].model_copy(update={"live": False}) for gate in (other, name)}
    dark = receipt.model_copy(update={"gates": {**receipt.gates, **idle}})
    total = 2 * sum(gate in idle or reading.observed is not None for gate, reading in receipt.gates.items())
    counted, _, rest = gates_live([receipt, dark]).partition(", not observed here: ")
    assert counted == f"{total - 2}/{total}, not live: {name}, {other}"
    unseen = {gate for gate, reading in receipt.gates.items() if reading.observed is None and gate not in idle}
    assert set(rest.split(", ")) == unseen


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.OOM, Outcome.FAILED])
def test_gates_that_a_stopped_trial_had_not_shown_yet_are_not_called_dead(outcome: Outcome) -> None:
    receipt = make_receipt(make_plan(), 0, "baseline")
    idle = {gate: reading.model_copy(update={"live": False}) for gate, reading in receipt.gates.items()}
    stopped = receipt.model_copy(update={"gates": idle, "outcome": outcome})
    total = sum(reading.observed is not None for reading in receipt.gates.values())
    counted = gates_live([receipt, stopped]).partition(", not observed here: ")[0]
    assert counted == f"{total}/{total}, 1 trial stopped early and not counted"
    assert gates_live([stopped, stopped]) == "2 trials stopped early and not counted"


@pytest.mark.parametrize(
    ("speed", "verdict", "decision"),
    [
        (0.97, VerdictWord.WORSE, Decision.REJECT),
        (1.0, VerdictWord.SAME, Decision.SAME),
        (1.002, VerdictWord.SAME, Decision.SAME),
        (1.01, VerdictWord.BETTER, Decision.REJECT),
    ],
)
def test_judge_verdicts_and_decisions_follow_the_margin(speed: float, verdict: VerdictWord, decision: Decision) -> None:
    variant = psiv(judged(speeds={"psiv-on": speed}))
    assert (variant.verdict, variant.decision) == (verdict, decision)


def test_judge_says_why_better_is_not_enough() -> None:
    assert "below the 1.5 % from which the rule adopts" in psiv(judged(speeds={"psiv-on": 1.01})).notes[0]


def test_judge_knows_that_a_shorter_step_is_better() -> None:
    variant = psiv(judged(make_spec(verdict__primary__metric="step_s")))
    assert variant.primary is not None
    assert variant.primary.delta_pct == pytest.approx(-2.9, abs=0.2)
    assert (variant.verdict, variant.decision) == (VerdictWord.BETTER, Decision.ADOPT)
    assert [other.metric for other in variant.secondary] == ["tokens_per_s", "model_tflops_per_s"]


def test_judge_gives_the_chances_that_more_blocks_answer() -> None:
    variant = psiv(judged(speeds={"psiv-on": 1.01}, sd=0.03))
    assert (variant.verdict, variant.decision) == (VerdictWord.INCONCLUSIVE, Decision.INCONCLUSIVE)
    assert variant.cause is Cause.NOT_PROVED
    *less, enough = variant.chances.items()
    assert enough[0] == variant.blocks_needed
    assert enough[1] >= 0.8 > max(chance for _, chance in less)
    assert variant.blocks_needed is not None
    assert variant.blocks_needed > 6
    assert variant.device_minutes_needed == pytest.approx(variant.blocks_needed * 3 * 3.0 / 60, abs=0.01)


def test_judge_caps_an_uncalibrated_node_class_and_keeps_what_was_measured() -> None:
    variant = psiv(judged(calibrated=False))
    assert (variant.verdict, variant.measured) == (VerdictWord.INCONCLUSIVE, VerdictWord.BETTER)
    assert variant.decision is Decision.INCONCLUSIVE
    assert variant.cause is Cause.UNCALIBRATED
    assert variant.reason.startswith("uncalibrated: no A/A blocks are known for this device; the samples say 'bett")
    assert variant.primary is not None


@pytest.mark.parametrize(
    ("outcome", "expected", "decision"),
    [
        (Outcome.OOM, VerdictWord.OOM, Decision.REJECT),
        (Outcome.TIMEOUT, VerdictWord.TIMEOUT, Decision.REJECT),
        (Outcome.FAILED, VerdictWord.FAILED, Decision.REJECT),
        (Outcome.REFUSED, VerdictWord.REFUSED, Decision.INVALID),
        (Outcome.INVALID, VerdictWord.INVALID, Decision.INVALID),
    ],
)
@pytest.mark.parametrize("calibrated", [True, False])
def test_judge_gives_no_statistics_to_an_arm_that_did_not_measure(
    outcome: Outcome, expected: VerdictWord, decision: Decision, calibrated: bool
) -> None:
    verdict = judged(swap={"outcome": outcome, "message": "it broke"}, calibrated=calibrated)
    assert (psiv(verdict).verdict, psiv(verdict).decision) == (expected, decision)
    assert psiv(verdict).primary is None
    assert "1 of 6 trials" in psiv(verdict).reason
    assert "it broke" in psiv(verdict).reason
    assert verdict.arms["psiv-on"].outcomes == {str(outcome): 1, "measured": 5}
    assert verdict.variants[1].primary is not None


def test_judge_compares_nothing_with_a_broken_baseline() -> None:
    verdict = judged(swap={"outcome": Outcome.OOM, "message": "no memory"}, where=(1, "baseline"))
    assert {variant.verdict for variant in verdict.variants} == {VerdictWord.INVALID}
    assert "1 of 6 baseline trials ran out of memory" in verdict.variants[0].reason


@pytest.mark.parametrize(("blocks", "broken", "kept"), [(8, 1, 7), (12, 2, 10), (8, 2, None), (6, 1, None)])
def test_few_blocks_are_lost_with_a_baseline_that_fails(blocks: int, broken: int, kept: int | None) -> None:
    spec = make_spec(design__blocks={"count": blocks})
    plan = make_plan(spec)
    ended = {"outcome": Outcome.FAILED, "failure_class": FailureClass.NO_RECEIPT, "summary": None, "message": "gone"}
    receipts = [
        one.model_copy(update=ended) if one.arm == "baseline" and one.ids.block_index < broken else one
        for one in make_receipts(plan, GOOD, sd=0.001)
    ]
    variant = psiv(judge(plan, spec, receipts, CALIBRATED))
    if kept is None:
        assert variant.verdict is VerdictWord.INVALID
        return
    assert variant.verdict is VerdictWord.BETTER
    assert variant.primary is not None
    assert variant.primary.blocks == kept
    assert any("not count: the baseline did not measure (failed: gone)" in note for note in variant.notes)


def test_judge_fails_missing_blocks() -> None:
    receipts = [r for r in make_receipts(PLAN, GOOD, sd=0.001) if (r.ids.block_index, r.arm) != (3, "baseline")]
    verdict = judge(PLAN, SPEC, receipts, CALIBRATED)
    assert (verdict.blocks_planned, verdict.blocks_counted) == (6, 5)
    assert {variant.decision for variant in verdict.variants} == {Decision.INCONCLUSIVE}
    assert "5 of 6 planned blocks counted; missing data fails" in verdict.variants[0].reason


def test_judge_without_receipts_is_inconclusive() -> None:
    verdict = judge(PLAN, SPEC, [], CALIBRATED)
    assert {variant.verdict for variant in verdict.variants} == {VerdictWord.INCONCLUSIVE}
    assert verdict.arms["baseline"].tokens_per_s is None


def test_judge_counts_no_trial_twice() -> None:
    receipts = make_receipts(PLAN)
    with pytest.raises(ReceiptError, match="each trial counts once"):
        judge(PLAN, SPEC, [*receipts, receipts[0]], CALIBRATED)


def test_judge_refuses_receipts_of_another_plan() -> None:
    stranger = make_plan(make_spec(variants={"other": {"gates": {"loss": "chunked"}}}))
    with pytest.raises(ReceiptError, match="'other' in block 1 is not in the plan"):
        judge(PLAN, SPEC, [make_receipt(stranger, 0, "other")], CALIBRATED)


def test_judge_refuses_a_rule_that_was_changed_after_planning() -> None:
    easier = make_spec(verdict__primary__adopt_if="0.6%")
    verdict = judge(PLAN, easier, make_receipts(PLAN, GOOD), CALIBRATED)
    assert {variant.decision for variant in verdict.variants} == {Decision.INVALID}
    assert "a changed rule is a new ablation" in verdict.variants[0].reason


@pytest.mark.parametrize(
    ("swap", "words"),
    [
        ({"loss_step1": 8.31 + 1e-9}, "step-1 loss"),
        ({"environment": {"versions": {"torch": "2.12"}}}, "software versions differs inside the block"),
        ({"environment": {"node_class": "h200"}}, "environment/node_class is 'h200'; expected 'cpu'"),
        ({"environment": {"throttle": {"ecc_uncorrected": 1}}}, "uncorrected ECC error"),
        ({"ids": {"position": 9}}, "ids/position is 9; expected"),
        ({"seed": 99}, "seed is 99; expected"),
        ({"summary": None}, "samples are missing"),
        ({"facts": {ScanFact.PSIV_RECOMPUTES: 1, ModelFact.ROWS: 2}}, "gate 'psiv_cache' was requested and not live"),
        ({"digests": {"spec": PLAN.spec_digest, "rule": PLAN.rule_digest, "arm": "sha256:x", "code": "sha256:code",
                      "data": "sha256:data"}}, "digests/arm is 'sha256:x'; expected"),
    ],
)  # fmt: skip
def test_judge_invalidates_a_variant_by_its_guard(swap: dict[str, Any], words: str) -> None:
    verdict = judged(swap=swap)
    assert (psiv(verdict).verdict, psiv(verdict).decision) == (VerdictWord.INVALID, Decision.INVALID)
    assert psiv(verdict).reason.startswith("block 3: ")
    assert words in psiv(verdict).reason
    assert verdict.variants[1].verdict is VerdictWord.SAME


def with_clock(receipt: Receipt, clock_mhz: float) -> list[Any]:
    return [step.model_copy(update={"clock_mhz": clock_mhz}) for step in receipt.steps]


@pytest.mark.parametrize(
    ("speed", "clock", "verdict"),
    [
        (1.03, 1700.0, VerdictWord.BETTER),
        (1.009, 1712.0, VerdictWord.BETTER),
        (1.03, 1760.0, VerdictWord.INVALID),
        (1.06, 1750.0, VerdictWord.BETTER),
    ],
)
def test_judge_confirms_a_difference_in_cycles_when_clocks_differ(
    speed: float, clock: float, verdict: VerdictWord
) -> None:
    clocks = {"baseline": 1700.0, "chunk-32": 1700.0, "psiv-on": clock}
    receipts = [
        make_receipt(PLAN, r.ids.block_index, r.arm, steps=with_clock(r, clocks[r.arm]))
        for r in make_receipts(PLAN, {"psiv-on": speed}, sd=0.0005)
    ]
    assert psiv(judge(PLAN, SPEC, receipts, CALIBRATED)).verdict is verdict


@pytest.mark.parametrize(("clock", "slower"), [(1760.0, "baseline"), (1600.0, "psiv-on")])
@pytest.mark.parametrize(("share", "capped"), [(0.0, False), (0.49, False), (0.51, True), (3.0, True)])
def test_a_clock_that_the_power_limit_lowered_is_a_result_of_the_arm(
    clock: float, slower: str, share: float, capped: bool
) -> None:
    clocks = {"baseline": 1700.0, "chunk-32": 1700.0, "psiv-on": clock}
    speed = 1 + (0.03 if clock > 1700 else -0.05)
    receipts = []
    for one in make_receipts(PLAN, {"psiv-on": speed}, sd=0.0005):
        window = sum(step.seconds for step in one.steps if step.phase == "timed")
        events = DeviceEvents(sw_power_cap=share * window if one.arm == slower else 0.0)
        steps = with_clock(one, clocks[one.arm])
        receipts.append(
            make_receipt(PLAN, one.ids.block_index, one.arm, steps=steps, environment={"throttle": events.model_dump()})
        )
    verdict = psiv(judge(PLAN, SPEC, receipts, CALIBRATED))
    if not capped:
        assert verdict.verdict is VerdictWord.INVALID
        return
    assert verdict.verdict is (VerdictWord.BETTER if speed > 1 else VerdictWord.WORSE)
    (note,) = [one for one in verdict.notes if "power limit" in one]
    assert f"at {clock:.0f} MHz, the baseline's at 1700 MHz" in note
    remains = float(note.rpartition("would differ by ")[2].removesuffix(" %"))
    assert remains == pytest.approx(100 * (speed * 1700 / clock - 1), abs=0.1)


@pytest.mark.parametrize("own_clock", [1600.0, 1650.0])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_speeds_at_equal_clocks_are_of_tokens_and_not_of_steps(rows: int, own_clock: float) -> None:
    spec = make_spec(variants={"psiv-on": {"gates": {"psiv_cache": True, "micro_batch": rows}}})
    plan = make_plan(spec)
    receipts = []
    for one in make_receipts(plan, {"psiv-on": 1.04}, sd=0.0005):
        steps = with_clock(one, own_clock if one.arm == "psiv-on" else 1700.0)
        window = {"throttle": DeviceEvents(sw_power_cap=100.0).model_dump()}
        receipts.append(make_receipt(plan, one.ids.block_index, one.arm, steps=steps, environment=window))
    (note,) = [one for one in psiv(judge(plan, spec, receipts, CALIBRATED)).notes if "power limit" in one]
    remains = float(note.rpartition("would differ by ")[2].removesuffix(" %"))
    assert remains == pytest.approx(100 * (1.04 * 1700 / own_clock - 1), abs=0.1)


@pytest.mark.parametrize(
    ("own", "other", "same"),
    [
        ({f"{SOURCE}.forward": "f", f"{SOURCE}.backward": "b"}, {}, True),
        ({f"{SOURCE}.forward": "f", f"{SOURCE}.backward": "b"}, {f"{SOURCE}.backward": "c"}, False),
        ({f"{SOURCE}.forward": "f", f"{BINARY}.forward": "x"}, {f"{BINARY}.forward": "y"}, False),
        ({f"{SOURCE}.forward": "f", f"{BINARY}.forward": "x"}, {f"{SOURCE}.forward": "g"}, True),
        ({}, {}, False),
    ],
)
def test_judge_says_when_a_gate_left_the_kernels_as_they_were(
    own: dict[str, str], other: dict[str, str], same: bool
) -> None:
    def hashes(arm: str) -> dict[str, str]:
        return own | (other if arm == "baseline" else {})

    receipts = [
        make_receipt(PLAN, block, arm, facts=observed_facts(known.gates) | hashes(arm))
        for block in PLAN.blocks
        for arm in block.order
        for known in PLAN.arms
        if known.name == arm
    ]
    variant = psiv(judge(PLAN, SPEC, receipts, CALIBRATED))
    reason = "block 1: kernel source is identical to the baseline's: gate 'psiv_cache' changed nothing"
    assert (variant.verdict is VerdictWord.INVALID and variant.reason == reason) is same


def test_judge_lets_another_order_of_sums_differ_in_loss() -> None:
    verdict = judged(swap={"loss_step1": 8.3100001}, where=(2, "chunk-32"))
    assert verdict.variants[1].verdict is VerdictWord.SAME


@pytest.mark.parametrize(
    ("requirement", "swap", "passed"),
    [
        ({"metric": "peak_allocated_gib", "max_delta": 0.25}, {"peak_bytes": int(1.4 * GIB)}, True),
        ({"metric": "peak_allocated_gib", "max_delta": 0.25}, {"peak_bytes": int(1.6 * GIB)}, False),
        ({"metric": "peak_reserved_gib", "max_value": 1.5}, {"peak_bytes": int(1.6 * GIB)}, False),
        ({"metric": "peak_allocated_gib", "max_value": 1.5}, {"peak_bytes": int(1.6 * GIB)}, True),
        ({"metric": "peak_allocated_gib", "max_delta": 0.25}, {"memory": None}, False),
        ({"metric": "compile_s", "max_delta": 10}, {"compile_s": 11.0}, False),
        ({"metric": "loss_val", "max_delta": 0.1}, {"loss_val": 7.55}, True),
        ({"metric": "loss_val", "max_delta": 0.1}, {"loss_val": 7.65}, False),
        ({"metric": "loss_val", "max_delta": 0.1}, {"loss_val": None}, False),
        ({"metric": "loss_val", "rule": "identical"}, {"loss_val": 7.5000001}, False),
        ({"metric": "loss_step1", "rule": "identical"}, {}, True),
    ],
)
def test_judge_adopts_only_when_the_requirement_holds(
    requirement: dict[str, Any], swap: dict[str, Any], passed: bool
) -> None:
    variant = psiv(judged(requiring(**requirement), swap={"tokens_per_s": 5150.0, **swap}))
    assert variant.verdict is VerdictWord.BETTER
    assert [result.passed for result in variant.requirements] == [passed]
    without_data = None in swap.values()
    assert variant.requirements[0].undecided is without_data
    reject = Decision.INCONCLUSIVE if without_data else Decision.REJECT
    assert variant.decision is (Decision.ADOPT if passed else reject)
    assert bool(variant.notes) is not passed


def test_a_verdict_is_sealed_and_survives_json() -> None:
    verdict = judged()
    assert verdict.digest == digest(verdict.model_dump(mode="json", exclude={"digest"}))
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_verdict_rule_is_what_was_hashed() -> None:
    verdict = judged()
    assert digest(dict(verdict.rule)) == PLAN.rule_digest == verdict.rule_digest
    assert verdict.rule["primary"] == {"metric": "tokens_per_s", "margin_pct": 0.5, "adopt_if_pct": 1.5}
