import io
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.power import alpha_of
from ablate.experiments.outcomes import Decision, Required, VerdictWord
from ablate.experiments.records.calibration import ExpectedBlocks, Sizing
from ablate.experiments.reporting import wording
from ablate.service.cli import tables, verdict_tables
from ablate.service.cli.verdicts import exit_code
from ablate.service.schemas.submissions import BlockOrder, PlanPublic
from tests import views
from tests.public_rows import ablation_row, trial_row


def _text(shown: RenderableType, *, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _verdict(*, calibrated: bool) -> Verdict:
    verdict = (views.view() if calibrated else views.cpu_view()).verdict
    assert verdict is not None
    return verdict


def test_verdict_shows_the_change_of_peak_memory() -> None:
    verdict = _verdict(calibrated=True)
    arms = {name: own.model_copy(update={"peak_allocated_bytes": 2**30}) for name, own in verdict.arms.items()}
    fat = arms[verdict.variants[0].arm]
    arms[verdict.variants[0].arm] = fat.model_copy(update={"peak_allocated_bytes": 2**30 + 3 * 2**20})
    assert "+3\N{NO-BREAK SPACE}MiB" in _text(verdict_tables.verdict(verdict.model_copy(update={"arms": arms})))


@pytest.mark.parametrize(
    ("decisions", "require", "code"),
    [
        ([Decision.ADOPT], None, 0),
        ([Decision.REJECT], None, 1),
        ([Decision.SAME], None, 2),
        ([Decision.INCONCLUSIVE], None, 3),
        ([Decision.INVALID], None, 4),
        ([Decision.REJECT, Decision.ADOPT], None, 0),
        ([Decision.REJECT, Decision.INVALID, Decision.SAME], None, 4),
        ([], None, 5),
        ([Decision.ADOPT, Decision.ADOPT], Required.ADOPT, 0),
        ([Decision.ADOPT, Decision.INCONCLUSIVE], Required.ADOPT, 3),
        ([Decision.ADOPT], Required.SAME, 6),
        ([Decision.SAME], Required.SAME, 0),
    ],
)
def test_exit_code_follows_the_decisions(decisions: list[Decision], require: Required | None, code: int) -> None:
    variant = _verdict(calibrated=True).variants[0]
    variants = tuple(variant.model_copy(update={"decision": decision}) for decision in decisions)
    assert exit_code(variants, require) == code


@pytest.mark.parametrize("verdict", list(VerdictWord))
def test_not_worse_fails_for_every_verdict_without_its_proof(verdict: VerdictWord) -> None:
    decision = {"better": Decision.REJECT, "same": Decision.SAME, "inconclusive": Decision.INCONCLUSIVE}
    changed = {"verdict": verdict, "decision": decision.get(verdict, Decision.REJECT), "requirements": ()}
    variant = _verdict(calibrated=True).variants[0].model_copy(update=changed)
    code = exit_code([variant], Required.NOT_WORSE)
    assert code == (0 if verdict in ("better", "same") else 3 if verdict == "inconclusive" else 1)


def test_every_verdict_has_a_colour() -> None:
    verdict = _verdict(calibrated=True)
    for word in VerdictWord:
        variant = verdict.variants[0].model_copy(update={"verdict": word, "measured": word})
        assert word.value in _text(verdict_tables.verdict(verdict.model_copy(update={"variants": (variant,)})))


def test_a_trial_is_shown_with_its_node_and_what_broke_before_it_runs_again() -> None:
    rows = [trial_row(node="gpu-7"), trial_row(node="gpu-8", broke="the worker [went]")]
    text = " ".join(_text(tables.ablation(ablation_row(), rows), width=200).split())
    assert "queued gpu-7" in text
    assert "gpu-8 runs again: the worker [went]" in text


def plan_of(blocks: int, **changes: Any) -> PlanPublic:
    values: dict[str, Any] = {
        "ablation": "demo",
        "spec_digest": "s",
        "rule_digest": "r",
        "node_class": "cpu",
        "devices": 1,
        "arms": [],
        "blocks": [BlockOrder(index=index, seed=7, order=["baseline"]) for index in range(blocks)],
        "trials": blocks,
        "window_steps": 4,
        "expected_device_minutes": None,
        "device_minutes_allowed": 180,
        "warnings": [],
        "mde_pct_per_sd_pct": 1.4,
        "seeds": "to be drawn",
        "over_seeds": False,
        "sizing": None,
        "mended_by": None,
        "repeats": False,
        "control": None,
        "asking": None,
        "node_classes": [],
    }
    return PlanPublic.model_validate(values | changes)


def sizing_of(adopt_if_pct: float, **numbers: Any) -> Sizing:
    """Return the sizing of a design that proves just less than the gain from which the rule adopts."""
    return Sizing(adopt_if_pct=adopt_if_pct, aim_pct=adopt_if_pct, proved_pct=adopt_if_pct - 0.1, **numbers)


@pytest.mark.parametrize("width", [60, 200])
def test_a_plan_on_a_node_that_is_not_calibrated_names_the_command(width: int) -> None:
    text = " ".join(_text(tables.plan(plan_of(8, mended_by="ablate aa cpu --like SPEC")), width=width).split())
    assert "inconclusive, uncalibrated: no node of class cpu is calibrated for this workload" in text
    assert "; to calibrate: ablate aa cpu --like SPEC" in text
    assert "inconclusive" not in _text(tables.plan(plan_of(8)), width=width)
    own = plan_of(8, mended_by="ablate aa cpu --like SPEC", control="control-2")
    text = " ".join(_text(tables.plan(own), width=width).split())
    assert "by its own noise: no node of class cpu is calibrated for this workload, so arm 'control-2' repeats" in text
    assert "narrower intervals after: ablate aa cpu --like SPEC" in text
    assert "inconclusive" not in text


@given(st.integers(1, 30))
def test_a_plan_says_which_asking_it_is_and_what_the_next_one_costs(number: int) -> None:
    earlier = [f"ask-{one}" for one in range(1, number)]
    asking = {
        "number": number,
        "earlier": earlier,
        "level_pct": 100 * alpha_of(number),
        "next_level_pct": 100 * alpha_of(number + 1),
        "mde_pct_per_sd_pct": 1.99,
        "next_mde_factor": 1.5,
    }
    text = " ".join(_text(tables.plan(plan_of(8, asking=asking)), width=400).split())
    before = wording.listed([f"'{name}'" for name in earlier[-3:]])
    first = f"number {number} of this question (after {before})" if earlier else "the first of this question"
    level, later = (f"{100 * alpha_of(one):.3g} %" for one in (number, number + 1))
    assert f"asking {first}, tested at {level}; asking again is tested at {later} and detects effects from 1.50" in text
    assert "if neighbouring trials scatter by 1 %, effects from 1.99 % on" in text


def test_a_plan_of_very_many_blocks_says_what_they_cost_and_why_and_shows_the_first() -> None:
    noise = sizing_of(5.0, calibration="c", sd_upper_pct=37.0, mde_pct=3.9, adopted_pct=5.6, blocks_needed=1873)
    plan = plan_of(1873, sizing=noise, expected_device_minutes=196.04, warnings=["180 [are] not enough"])
    text = " ".join(_text(tables.plan(plan), width=200).split())
    assert "device minutes about 196.0" in text
    assert text.endswith("warning: 180 [are] not enough")
    assert "sd of at most 37.00 % between neighbouring trials, over windows of 4 timed steps" in text
    assert "1,873 blocks prove a gain of 5 % to be beyond the margin; a quieter machine, a longer window" in text
    assert "3.90 % at the measured noise" in text
    assert "a true gain of 5.60 % is adopted in 80 % of cases; 1,873 blocks" in text
    assert "... 1,865 more" in text
    assert len(_text(tables.plan(plan), width=200).splitlines()) < 25
    fitting = " ".join(_text(tables.plan(plan_of(8, sizing=noise, expected_device_minutes=3.0)), width=200).split())
    assert "about 3.0 detects" in fitting
    assert "more" not in fitting
    assert "warning" not in fitting
    assert "a quieter machine" not in fitting


WAITS = "a free node of class 'cpu' (1 live, 12 blocks ahead in the queue, about 40 min at the recent pace)"


def test_a_plan_of_a_loss_speaks_of_seeds_and_of_the_ablation_that_shows_their_spread() -> None:
    untried = plan_of(12, over_seeds=True, mde_pct_per_sd_pct=None)
    assert "unknown: no earlier ablation of this baseline" in " ".join(_text(tables.plan(untried), width=200).split())
    spread = {"calibration": None, "earlier": "rotary", "baseline": 3.25, "sd_upper_pct": 0.8}
    sizing = sizing_of(1.5, **spread, mde_pct=0.7, adopted_pct=1.7, blocks_needed=20)
    shown = plan_of(12, over_seeds=True, mde_pct_per_sd_pct=None, sizing=sizing)
    text = " ".join(_text(tables.plan(shown), width=200).split())
    assert "sd of at most 0.80 % between seeds in 'rotary', whose baseline had 3.25" in text
    assert "20 seeds prove a gain of 1.5 % to be beyond the margin" in text
    assert "neighbouring" not in text


LISTED = [
    ablation_row(
        id="abl_01", name="sweep", state="completed", answer="chunk-8 better, +12.30 % throughput, and 8 more"
    ),
    ablation_row(id="abl_02", name="runs", time_left_s=754.0),
    ablation_row(id="abl_03", name="waits", state="queued", waiting_for=WAITS, time_left_s=7200.0),
    ablation_row(id="abl_04", name="first-of-its-kind"),
]


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_list_says_the_answer_or_how_long_it_takes(width: int) -> None:
    lines = _text(tables.ablations(LISTED), width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    starts = [next(at for at, line in enumerate(lines) if line.startswith(row.name)) for row in LISTED]
    rows = [" ".join(lines[a:b]).replace("\N{NO-BREAK SPACE}", " ") for a, b in pairwise([*starts, len(lines)])]
    words = [set(re.findall(r"[^\s]+", row)) for row in rows]
    assert {"chunk-8", "better,", "+12.30", "throughput,", "more"} <= words[0]
    assert {"about", "13", "min", "left"} <= words[1]
    assert {"2", "h", "left", "12", "ahead"} <= words[2]
    assert "left" not in words[3], "nobody knows"
    if width >= 80:
        assert all("answer" not in line for line in lines[1:]), "it has a column"


def test_show_says_the_answer_or_how_long_it_takes() -> None:
    shown = [_text(tables.ablation(row, [])) for row in LISTED]
    facts = [dict(re.findall(r"^(answer|waits for|time left) +(.*?) *$", text, re.MULTILINE)) for text in shown]
    assert facts == [
        {"answer": "chunk-8 better, +12.30 % throughput, and 8 more"},
        {"time left": "about 13\N{NO-BREAK SPACE}min left"},
        {"waits for": WAITS, "time left": "about 2\N{NO-BREAK SPACE}h left"},
        {},
    ]


def test_blocks_and_places_count_from_one_wherever_they_are_shown() -> None:
    plan = plan_of(3)
    planned = [
        line.split()[0] for line in map(str.rstrip, _text(tables.plan(plan)).splitlines()) if line.endswith("baseline")
    ]
    assert planned == ["1", "2", "3"]
    trials = [trial_row(block_index=index, position=position) for index in range(3) for position in range(2)]
    lines = _text(tables.ablation(ablation_row(), trials)).splitlines()
    assert [line.split()[1:3] for line in lines if "trl_" in line] == [
        [number, place] for number in "123" for place in "12"
    ]


def test_show_says_of_every_trial_that_did_not_measure_why() -> None:
    why = "the trial died of SIGSEGV [boom] without a result, after 12 steps of the window that it was to measure"
    rows = [trial_row(arm="psiv-on", state="done", outcome="failed", reason=why), trial_row(arm="chunk-32")]
    for width in (80, 140, 200):
        console = Console(file=io.StringIO(), width=width)
        console.print(tables.ablation(ablation_row(), rows))
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        missing = [word for word in why.split() if word not in text.split()]
        assert (width, missing) == (width, [])


def test_a_plan_with_looks_says_what_it_takes_at_most_and_what_is_expected() -> None:
    sizing = sizing_of(1.5, calibration="sha256:0", sd_upper_pct=1.0, mde_pct=0.8, adopted_pct=1.4, blocks_needed=8)
    sizing = sizing.model_copy(update={"expected": (ExpectedBlocks(change_pct=2.0, blocks=4.0),)})
    plan = plan_of(8).model_copy(update={"sizing": sizing, "expected_device_minutes": 30.0})
    text = " ".join(_text(tables.plan(plan)).split())
    assert "at most about 30.0; expected: 15.0 (4 blocks) for a change of 2 %" in text
    plan = plan.model_copy(update={"expected_device_minutes": None})
    assert "no similar ablation has run yet; expected: 4 blocks for a change of 2 %" in " ".join(
        _text(tables.plan(plan)).split()
    )
