"""An arm that times out or crashes is named with its reason wherever people look, and costs no other arm a trial."""

import random
import re
from collections.abc import Mapping

import pytest

from ablate.experiments.outcomes import BASELINE, Decision, Outcome, VerdictWord
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.mlflow.content import NOTE_TAG, RunContent
from ablate.experiments.reporting.mlflow.runs import children
from ablate.experiments.reporting.pages import evidence_tables
from ablate.experiments.reporting.pages.first_screen import trial_values
from ablate.experiments.reporting.sentences import sentence
from ablate.experiments.reporting.terminal.markdown import verdict_markdown
from ablate.experiments.reporting.verdict_layout import short_answer
from ablate.experiments.reporting.view import AblationView
from ablate.service.cli import verdict_tables
from tests import views

ENDS = (Outcome.REFUSED, Outcome.OOM, Outcome.TIMEOUT, Outcome.FAILED, Outcome.INVALID)
"""The most telling one first: it is the word of a variant that has several."""
BLOCKS = 6
Ended = Mapping[tuple[str, int], Outcome | None]


@pytest.fixture(scope="module")
def sound() -> AblationView:
    return views.view(arms=views.many(4), num_blocks=BLOCKS, timed=4, node_class="cpu")


def drawn(chance: random.Random, arms: list[str]) -> Ended:
    """Draw which variants end how in which blocks: one at least is spared."""
    hit = chance.sample(arms, chance.randint(1, len(arms) - 1))
    blocks = {arm: chance.sample(range(BLOCKS), chance.randint(1, BLOCKS)) for arm in hit}
    return {(arm, index): chance.choice((*ENDS, None)) for arm in hit for index in blocks[arm]}


@pytest.mark.parametrize("seed", range(25))
def test_every_end_is_named_and_costs_nobody_else_anything(sound: AblationView, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    ended = drawn(chance, [arm.name for arm in sound.plan.variants])
    view = views.with_outcomes(sound, ended)
    assert view.verdict is not None
    assert sound.verdict is not None
    before = {variant.arm: variant for variant in sound.verdict.variants}
    runs = list(children(view))
    for variant in view.verdict.variants:
        outcomes = {end for (arm, _), end in ended.items() if arm == variant.arm}
        if not outcomes:
            kept, known = variant.primary, before[variant.arm].primary
            assert kept is not None
            assert known is not None
            assert kept.differences_pct == known.differences_pct, "every finished trial counts"
            assert kept.blocks == BLOCKS
        elif outcomes != {None}:
            outcome = next(end for end in ENDS if end in outcomes)
            assert variant.verdict == outcome.value
            _named_everywhere(view, runs, variant.arm, variant.reason)
            assert re.search(rf"{variant.arm} in block \d is {outcome}", variant.reason)
    _every_trial_says_why(view, runs, ended)
    shown = _values(view)
    assert shown.keys() == {(str(index + 1), arm.name) for index in range(BLOCKS) for arm in view.plan.arms}
    for (block, arm), text in shown.items():
        end = ended.get((arm, int(block) - 1), Outcome.MEASURED)
        is_number = re.fullmatch(r"[\d,.]+", text) is not None
        assert is_number if end is Outcome.MEASURED else text == (end or wording.NOTHING)


def _values(view: AblationView) -> dict[tuple[str, str], str]:
    """Return the cells of the table of all trials by block and arm."""
    table = trial_values(view)
    assert table is not None
    arms = [column.heading for column in table.columns[1:]]
    return {(str(cells[0]), arm): str(cell) for cells in table.rows for arm, cell in zip(arms, cells[1:], strict=True)}


def test_a_trial_without_a_baseline_beside_it_is_shown_and_does_not_count(sound: AblationView) -> None:
    shown = _values(views.with_outcomes(sound, {(BASELINE, 2): None}))
    assert {block for (block, _arm), text in shown.items() if text.endswith("(does not count)")} == {"3"}
    assert shown["3", BASELINE] == wording.NOTHING


def _named_everywhere(view: AblationView, runs: list[RunContent], arm: str, reason: str) -> None:
    assert view.verdict is not None
    explained = "\n".join(verdict_tables.explanation(view.verdict))
    (run,) = [run for run in runs if run.identity == f"arm/{arm}"]
    assert run.status == "FAILED"
    for where in (explained, verdict_markdown(view.verdict), run.tags[NOTE_TAG]):
        assert reason in where


def _every_trial_says_why(view: AblationView, runs: list[RunContent], ended: Ended) -> None:
    rows = [[str(cell) for cell in row] for row in evidence_tables.unmeasured_table(view).rows]
    assert {(row[0], row[3]) for row in rows} == {
        (arm, views.why(arm, index, end)) for (arm, index), end in ended.items()
    }
    noted = {run.tags[NOTE_TAG] for run in runs if run.tags["ablation.kind"] == "trial" and NOTE_TAG in run.tags}
    assert noted == {views.why(arm, index, end) for (arm, index), end in ended.items()}


def test_a_baseline_that_fails_is_named_for_every_variant(sound: AblationView) -> None:
    view = views.with_outcomes(sound, {(BASELINE, 2): Outcome.TIMEOUT})
    assert view.verdict is not None
    for variant in view.verdict.variants:
        assert f"baseline trials took too long: {views.why(BASELINE, 2, Outcome.TIMEOUT)}" in variant.reason


WORDS = {Outcome.REFUSED: "was refused", Outcome.OOM: "ran out of memory", Outcome.TIMEOUT: "took too long",
         Outcome.FAILED: "failed", Outcome.INVALID: "was invalid"}  # fmt: skip


@pytest.mark.parametrize("seed", range(15))
def test_without_a_baseline_nothing_is_rejected_and_what_ran_is_said_to_have_run(
    sound: AblationView, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    end = chance.choice(ENDS)
    ended: dict[tuple[str, int], Outcome] = {(BASELINE, index): end for index in range(BLOCKS)}
    names = [arm.name for arm in sound.plan.variants]
    broken = chance.sample(names, chance.randint(0, len(names)))
    ended |= {(arm, index): chance.choice(ENDS) for arm in broken for index in range(BLOCKS)}
    view = views.with_outcomes(sound, ended)
    assert view.verdict is not None
    assert view.lead.startswith(
        f"The baseline {WORDS[end]} in {BLOCKS} of {BLOCKS} trials, so there is nothing to compare; "
    )
    assert f": the baseline {WORDS[end]} in {BLOCKS} of {BLOCKS} trials" in short_answer(view.verdict)
    for variant in view.verdict.variants:
        assert variant.decision is Decision.INVALID
        text = sentence(view.verdict, variant)
        assert text.endswith(f"; {variant.arm} ran.") == (variant.arm not in broken)
        assert text.startswith(
            f"The baseline {WORDS[end]} in {BLOCKS} of {BLOCKS} trials, so there is nothing to compare; "
        )
        assert ("no valid measurement" in text) == (variant.arm in broken and variant.verdict is VerdictWord.INVALID)


def test_a_variant_out_of_memory_is_rejected_beside_a_baseline_that_measured_once(sound: AblationView) -> None:
    (first, *_) = sound.plan.variants
    ended = {(first.name, index): Outcome.OOM for index in range(BLOCKS)} | {(BASELINE, 2): Outcome.OOM}
    view = views.with_outcomes(sound, ended)
    assert view.verdict is not None
    decisions = {variant.arm: variant.decision for variant in view.verdict.variants}
    assert decisions.pop(first.name) is Decision.REJECT
    assert set(decisions.values()) == {Decision.INVALID}
    assert f"do not adopt {first.name}; no valid comparison of" in view.lead.lower()
