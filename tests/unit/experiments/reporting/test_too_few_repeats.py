"""Too few repeats of an exact metric: what is missing is said with its cause; repeats differ only where they do."""

import io
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import AblationState, FailureClass, Outcome, VerdictWord
from ablate.experiments.records.circumstances import AttemptRecord, Circumstances
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting.pages import report
from ablate.experiments.reporting.pages.first_screen import headline
from ablate.experiments.reporting.pictures.forest import forest
from ablate.experiments.reporting.terminal.markdown import pull_request_markdown
from ablate.experiments.reporting.verdict_layout import lay_out, short_answer
from ablate.experiments.reporting.view import AblationView
from ablate.experiments.retries import budget_spent
from ablate.service.cli import verdict_tables
from tests.factories import GIB, make_plan, make_receipt, make_spec

VARIANT = "psiv-on"
ARMS = ("baseline", VARIANT)
SPENT = "the budget of 0.2 device minutes is used up (0.47)"
DIFFERS = re.compile(r"repeats differ|differs between repeats|not exact here|gave \d+ values")


def exact_spec(blocks: int, seeds: Sequence[int]) -> AblationSpec:
    return make_spec(
        verdict__primary={"metric": "peak_allocated_gib", "margin": "1%", "adopt_if": "5%"},
        design__blocks={"count": blocks},
        design__seeds=list(seeds),
        variants={VARIANT: {"gates": {"psiv_cache": True}}},
    )


def texts(verdict: Verdict) -> Iterator[str]:
    """Yield what terminal, explanation, Markdown, page and list say of a verdict on one variant."""
    console = Console(file=io.StringIO(), width=1000)
    console.print(verdict_tables.verdict(verdict))
    for line in verdict_tables.explanation(verdict):
        console.print(line)
    assert isinstance(console.file, io.StringIO)
    yield console.file.getvalue()
    yield pull_request_markdown(verdict)
    yield short_answer(verdict)
    yield lay_out(verdict).lead
    yield headline(verdict, verdict.variants[0])


def view_of(spec: AblationSpec, plan: Plan, verdict: Verdict) -> AblationView:
    return AblationView(
        ablation_id="abl_1",
        name=plan.ablation,
        question=spec.question,
        state=AblationState.COMPLETED,
        created_at="2026-11-23T12:00:00Z",
        spec_text="",
        content_type="application/yaml",
        spec_digest=plan.spec_digest,
        plan=plan,
        verdict=verdict,
        trials=(),
    )


def test_a_spent_budget_is_named_wherever_the_answer_is_shown() -> None:
    spec = exact_spec(8, (1, 2))
    plan = make_plan(spec)
    receipts = [make_receipt(plan, 0, arm, peak_bytes=GIB) for arm in ARMS]
    assert budget_spent(0.47, 0.2) == SPENT
    verdict = judge(plan, spec, receipts, Circumstances(not_run=SPENT))
    (variant,) = verdict.variants
    why = f"1 of 8 planned blocks counted: {SPENT}"
    assert (variant.verdict, variant.reason) == (VerdictWord.INCONCLUSIVE, f"blocks are missing: {why}")
    assert lay_out(verdict).variants[0].interval.text == "none"
    view = view_of(spec, plan, verdict)
    for text in (*texts(verdict), report.render(view)):
        assert why in text
        assert not DIFFERS.search(text)
    assert short_answer(verdict) == f"{VARIANT} inconclusive: {why}"
    assert forest(view) is None, "there is no value to draw, and no repeat to speak of"


def test_blocks_that_broke_are_named_as_what_is_missing() -> None:
    spec = exact_spec(4, (1, 2))
    plan = make_plan(spec)
    receipts = [make_receipt(plan, block, arm) for block in (0, 1, 2) for arm in ARMS]
    lost = AttemptRecord(
        block_index=3,
        number=4,
        failure_class=FailureClass.INFRA_NODE,
        arm=None,
        message="nobody has heard of its worker",
        node="cpu-1",
    )
    verdict = judge(plan, spec, receipts, Circumstances(attempts=(lost,)))
    why = "3 of 4 planned blocks counted: block 4 broke (infra_node: nobody has heard of its worker)"
    assert all(why in text and not DIFFERS.search(text) for text in texts(verdict))
    assert lay_out(verdict).variants[0].interval.text == "not of every seed"


@pytest.mark.parametrize("seed", range(4))
def test_repeats_are_said_to_differ_exactly_where_two_valid_ones_do(seed: int) -> None:
    """Histories over the whole range: any design, any blocks that ran, any outcome, values that differ or do not."""
    rng = random.Random(seed)  # noqa: S311
    seen: Counter[str] = Counter()
    for _ in range(60):
        seeds = range(1, rng.randint(1, 3) + 1)
        spec = exact_spec(rng.randint(2 * len(seeds), 8), seeds)
        plan = make_plan(spec)
        share, noise = rng.choice((0.3, 0.8, 1)), rng.choice((0, 0, 0.1))
        ran = [block for block in plan.blocks if rng.random() < share]
        receipts = [make_receipt(plan, block, arm, **_trial(rng, noise)) for block in ran for arm in ARMS]
        known = Circumstances(not_run=rng.choice((None, SPENT)))
        verdict = judge(plan, spec, receipts, known)
        (variant,) = verdict.variants
        really = _differing(plan, receipts)
        mentions = {bool(DIFFERS.search(text)) for text in texts(verdict)}
        assert mentions <= {False} or really, (variant.reason, mentions)
        cell = lay_out(verdict).variants[0].interval.text
        assert (cell == "differ") is (variant.exact is not None and really)
        if variant.exact is not None and really:
            assert "gave" in variant.reason
        if cell == "agree":
            assert min(Counter(block.seed for block in ran).values()) > 1
        complete = len(ran) == len(plan.blocks)
        assert complete or variant.verdict not in (VerdictWord.BETTER, VerdictWord.SAME, VerdictWord.WORSE)
        seen[f"{cell} {'all' if complete else 'some'}"] += 1
    assert {"none some", "differ some", "agree all"} <= set(seen), seen


def _trial(rng: random.Random, noise: float) -> Mapping[str, Any]:
    bad = rng.random() < 0.02
    outcome = rng.choice([Outcome.INVALID, Outcome.OOM, Outcome.TIMEOUT, Outcome.FAILED]) if bad else Outcome.MEASURED
    ending = {"outcome": outcome, "message": "it ended"} if bad else {}
    return {**ending, "peak_bytes": GIB + 2 * (rng.random() < noise)}


def _differing(plan: Plan, receipts: Sequence[Receipt]) -> bool:
    values: dict[tuple[str, int], set[int]] = {}
    for receipt in receipts:
        if receipt.outcome is Outcome.MEASURED and receipt.memory is not None:
            place = receipt.arm, plan.blocks[receipt.ids.block_index].seed
            values.setdefault(place, set()).add(receipt.memory.peak_allocated_bytes)
    return any(len(sizes) > 1 for sizes in values.values())
