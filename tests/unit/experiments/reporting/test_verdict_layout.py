"""One layout of a verdict: what it says, and that terminal, Markdown, page and MLflow say exactly that."""

import dataclasses
import html
import io
import math
import random
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from ablate.experiments.analysis.answer import gain_pct
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.metrics import PRIMARY_METRICS
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED, Admission
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.between import between_variants
from ablate.experiments.reporting.mlflow.parent import parent
from ablate.experiments.reporting.mlflow.runs import arm_runs
from ablate.experiments.reporting.pages import report
from ablate.experiments.reporting.pages.first_screen import first_screen, headline
from ablate.experiments.reporting.pictures import registry
from ablate.experiments.reporting.sentences import lead
from ablate.experiments.reporting.table import Table, Tone
from ablate.experiments.reporting.terminal.markdown import pull_request_markdown, verdict_markdown
from ablate.experiments.reporting.verdict_cells import WORDS
from ablate.experiments.reporting.verdict_layout import (
    VerdictLayout,
    by_importance,
    improvement_pct,
    lay_out,
    short_answer,
)
from ablate.experiments.reporting.view import AblationView
from ablate.service.cli import verdict_tables
from ablate.service.web.answers import read_answer
from tests import views
from tests.factories import make_plan, make_receipt, make_receipts, make_spec

SPACE = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"


def noisy(seed: int, *, fastest_pct: float = 30) -> AblationView:
    """Return a view of two variants with effects, noise, node class and calibration drawn from `seed`."""
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    arms = {"baseline": views.Effect()} | {
        name: views.Effect(
            gates=gates,
            speed_pct=chance.uniform(-30, fastest_pct),
            memory_gib=chance.uniform(-3, 8),
            loss=chance.choice((0, 1e-3)),
        )
        for name, gates in (("psiv-on", {"psiv_cache": True}), ("chunk-32", {"chunk_size": 32}))
    }
    return views.view(
        arms=arms,
        node_class=chance.choice(("cpu", "h200")),
        calibrated=chance.choice((True, False)),
        num_blocks=chance.randint(6, 12),
        timed=4,
        noise=chance.choice((0.001, 0.01, 0.1)),
        primary=chance.choice(("tokens_per_s", "step_s")),
    )


VIEWS: dict[str, Callable[[], AblationView]] = {
    "h200": views.view,
    "cpu": views.cpu_view,
    **{f"drawn-{seed}": lambda seed=seed: noisy(seed) for seed in range(6)},  # type: ignore[misc]
    **{f"huge-{seed}": lambda seed=seed: noisy(seed, fastest_pct=9000) for seed in range(3)},  # type: ignore[misc]
}


@pytest.fixture(scope="module", params=VIEWS)
def view(request: pytest.FixtureRequest) -> AblationView:
    return VIEWS[request.param]()


@pytest.fixture
def verdict(view: AblationView) -> Verdict:
    assert view.verdict is not None
    return view.verdict


@pytest.fixture
def layout(verdict: Verdict) -> VerdictLayout:
    return lay_out(verdict)


def terminal(verdict: Verdict) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(verdict_tables.verdict(verdict))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of(table: Table) -> list[list[str]]:
    return [[column.heading for column in table.columns], *([str(cell) for cell in cells] for cells in table.rows)]


def plain(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", markup)).replace(SPACE, " ").split())


def test_terminal_shows_the_answers_table_cell_by_cell(verdict: Verdict, layout: VerdictLayout) -> None:
    lines = [re.split(r" {2,}", line.strip()) for line in terminal(verdict).splitlines()]
    assert [cells for cells in lines if len(cells) == len(layout.answers.columns)] == lines_of(layout.answers)
    assert layout.heading in terminal(verdict)
    assert layout.caveat in terminal(verdict)


def test_markdown_shows_the_answers_table_cell_by_cell(verdict: Verdict, layout: VerdictLayout) -> None:
    text = verdict_markdown(verdict)
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    shown = [[cells[0].strip("`"), *cells[1:]] for cells in (lines[0], *lines[2:])]
    assert shown == lines_of(layout.answers)
    assert layout.heading in text
    assert layout.caveat in text


def test_page_shows_every_table_of_the_verdict_cell_by_cell(
    view: AblationView, layout: VerdictLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "DRAWN", ())
    page = report.render(view)
    tables = re.findall(r"<h3 id=\"verdict-table-\d+\">(.*?)</h3>.*?<table>(.*?)</table>", page, flags=re.DOTALL)
    shown = {
        title: [[plain(cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", line, re.DOTALL)]
                for line in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
        for title, table in tables
    }  # fmt: skip
    expected = {
        table.title: [[cell.replace(SPACE, " ") for cell in line] for line in lines_of(table)]
        for table in layout.tables
    }
    assert view.verdict is not None
    between = between_variants(view.verdict)
    if between.rows:
        expected[between.title] = [[cell.replace(SPACE, " ") for cell in line] for line in lines_of(between)]
    assert shown == expected
    text = plain(page)
    for variant in layout.variants:
        for sentence in (variant.sentence, variant.why, *variant.remarks):
            assert " ".join(sentence.replace(SPACE, " ").split()) in text


def test_mlflow_gets_the_lead_the_table_and_the_unrounded_numbers(view: AblationView, layout: VerdictLayout) -> None:
    note = parent(view, "").tags["mlflow.note.content"]
    assert f"\n\n**{layout.lead}**" in note
    assert view.verdict is not None
    assert verdict_markdown(view.verdict) in note
    for variant in layout.variants:
        assert f"- `{variant.arm}`: {variant.sentence}" in note, "in the words of terminal and page"
        assert variant.why in note
    sent = {run.identity: {point.key: point.value for point in run.points} for run in arm_runs(view)}
    for variant in layout.variants:
        numbers = sent[f"arm/{variant.arm}"]
        assert {name: numbers[name] for name in variant.numbers} == variant.numbers


def test_explanation_says_every_sentence_and_requirement(verdict: Verdict, layout: VerdictLayout) -> None:
    text = "\n".join(verdict_tables.explanation(verdict))
    for variant in layout.variants:
        for cells in variant.requirements:
            assert all(cell.text.replace("[", r"\[") in text for cell in cells)
        assert variant.sentence in text
        assert f"gates live {variant.gates_live}" in text


def test_texts_round_the_numbers_behind_them(layout: VerdictLayout) -> None:
    for variant in layout.variants:
        for cell in (variant.effect, variant.interval, variant.mde):
            read = [
                float(number.replace("\N{MINUS SIGN}", "-").replace(",", ""))
                for number in re.findall(r"[+\N{MINUS SIGN}]?[\d,]+\.\d+", cell.text)
            ]
            assert read == pytest.approx(list(cell.numbers.values()), abs=0.005001)


def test_the_short_answer_is_the_most_important_variants_verdict_and_effect(
    verdict: Verdict, layout: VerdictLayout
) -> None:
    judged = {variant.arm: variant for variant in verdict.variants}
    groups: dict[int, list[str]] = {}
    for arm, variant in judged.items():
        size = abs(improvement_pct(variant))
        decided = {"adopt": 0, "reject": 1 if size < math.inf else 4, "same": 2}.get(variant.decision.value)
        open_place = 3 if variant.measured in ("better", "worse") else 4
        groups.setdefault(open_place if decided in (None, 4) else decided, []).append(arm)
    first_group = groups[min(groups)]
    sizes = {arm: abs(improvement_pct(judged[arm])) for arm in first_group}
    largest = max((size for size in sizes.values() if size < math.inf), default=None)
    ordered = by_importance(verdict, layout)
    first = ordered[0]
    assert first.arm in first_group
    assert largest is None or sizes[first.arm] == largest
    assert {one.arm for one in ordered} == set(judged)
    answer = short_answer(verdict)
    assert answer.startswith(f"{first.arm} {first.word.text}")
    metric = wording.metric(verdict.rule["primary"]["metric"])
    has_effect = first.effect.text != wording.NOTHING
    assert (f", {first.effect.text} {metric}" in answer) == has_effect
    alone = verdict.model_copy(update={"variants": tuple(v for v in verdict.variants if v.arm == first.arm)})
    others = len(layout.variants) - 1
    assert answer == short_answer(alone) + (f", and {others} more" if others else "")


def percents(text: str) -> set[str]:
    """Return the numbers of a text that have decimals, without their signs."""
    return set(re.findall(r"\d[\d,]*\.\d+", text))


def test_an_effect_is_written_alike_wherever_it_is_shown(view: AblationView, layout: VerdictLayout) -> None:
    assert view.verdict is not None
    judged = {variant.arm: variant for variant in view.verdict.variants}
    short = {line.arm: line.headline for line in read_answer(view.verdict.model_dump_json()).variants}
    runs = {run.identity: run for run in arm_runs(view)}
    for variant in (one for one in layout.variants if judged[one.arm].primary):
        shown = percents(f"{variant.effect} {variant.interval}")
        text = headline(view.verdict, judged[variant.arm])
        assert percents(text) == shown, "the report's first screen"
        assert short[variant.arm] == text, "the service's pages"
        assert runs[f"arm/{variant.arm}"].name.endswith(f" {variant.effect}"), "MLflow"
        assert shown <= percents(terminal(view.verdict)) & percents(verdict_markdown(view.verdict))
        assert shown <= percents(variant.sentence) or judged[variant.arm].cause is not None


def test_every_medium_has_the_largest_improvement_first(verdict: Verdict, layout: VerdictLayout) -> None:
    known = {variant.arm: variant for variant in verdict.variants}
    gains = [gain_pct(primary) for one in layout.variants if (primary := known[one.arm].primary) is not None]
    assert gains == sorted(gains, reverse=True)
    arms = [one.arm for one in layout.variants]
    assert sorted(arms) == sorted(known)
    for table in layout.tables:
        assert [*dict.fromkeys(str(cells[0]) for cells in table.rows)] == [
            arm for arm in arms if any(str(cells[0]) == arm for cells in table.rows)
        ]
    lines = [line.partition("[/]")[0] for line in verdict_tables.explanation(verdict) if line.startswith("[bold]")]
    assert lines == [f"[bold]{arm}" for arm in arms]


def test_every_verdict_has_its_sign_and_tone() -> None:
    assert set(WORDS) == set(VerdictWord)
    assert len({sign for sign, _ in WORDS.values()}) == len(VerdictWord)
    assert {tone for _, tone in WORDS.values()} == set(Tone)


def test_lead_says_the_decision_on_every_variant() -> None:
    verdict = views.view().verdict
    assert verdict is not None
    variants = verdict.variants
    for decision in Decision:
        changed = tuple(v.model_copy(update={"decision": decision, "verdict": VerdictWord.SAME}) for v in variants)
        lead = lay_out(verdict.model_copy(update={"variants": changed})).lead
        assert "psiv-on, chunk-32, tma and psiv-chunk-64" in lead
        assert lead[0].isupper()


def test_lead_does_not_read_as_if_a_stopped_arm_had_been_measured_as_bad() -> None:
    verdict = views.cpu_view().verdict
    assert verdict is not None
    for word in (VerdictWord.TIMEOUT, VerdictWord.FAILED):
        stopped = verdict.variants[0].model_copy(
            update={"arm": "rows-64", "verdict": word, "measured": word, "decision": Decision.REJECT}
        )
        good = verdict.variants[0].model_copy(update={"verdict": VerdictWord.BETTER, "decision": Decision.ADOPT})
        text = lead([stopped, good], 0.0)
        assert text == f"Adopt psiv-on; rows-64: no answer ({word})."


def test_invalid_arms_are_not_told_that_their_verdicts_are_capped_for_want_of_a_baseline() -> None:
    verdict = views.cpu_view().verdict
    assert verdict is not None
    admission = Admission(refused_because="no baseline was measured", mended_by="ablate aa cpu")
    known = verdict.circumstances.model_copy(update={"admission": admission})
    for word, is_said in ((VerdictWord.INVALID, False), (VerdictWord.INCONCLUSIVE, True)):
        variants = tuple(v.model_copy(update={"verdict": word, "measured": word}) for v in verdict.variants)
        judged = verdict.model_copy(update={"variants": variants, "circumstances": known})
        view = dataclasses.replace(views.cpu_view(), verdict=judged)
        screen = first_screen(view)
        assert screen is not None
        for text in (terminal(judged), pull_request_markdown(judged), " ".join(screen.warnings)):
            assert ("no baseline was measured" in text) == is_said


def test_loss_of_a_variant_without_statistics_is_neither_passed_nor_not_asked() -> None:
    verdict = views.view().verdict
    assert verdict is not None
    losses = {variant.arm: str(variant.loss) for variant in lay_out(verdict).variants}
    assert losses == {"psiv-on": "ok", "chunk-32": "ok", "tma": "\N{EN DASH}", "psiv-chunk-64": "\N{EN DASH}"}
    free = judge(make_plan(), make_spec(), make_receipts(make_plan()), CALIBRATED)
    assert {str(variant.loss) for variant in lay_out(free).variants} == {"not asked"}


@pytest.mark.parametrize("metric", PRIMARY_METRICS)
def test_the_loss_is_a_column_where_something_else_decides_or_the_rule_asks_for_it(metric: str) -> None:
    verdict = judge(make_plan(), make_spec(), make_receipts(make_plan()), CALIBRATED)
    is_of_learning = metric.startswith("loss") or metric.endswith("_to_loss")
    for asked in ([], [{"metric": "loss_val", "max_delta": 0.1}]):
        rule = {**verdict.rule, "primary": {**verdict.rule["primary"], "metric": metric}, "require": asked}
        table = lay_out(verdict.model_copy(update={"rule": rule})).answers
        headings = [column.heading for column in table.columns]
        assert ("loss" in headings) == (bool(asked) or not is_of_learning)
        assert "not asked" not in str(table) if is_of_learning else True
        assert ("Loss: its requirements" in table.note) == ("loss" in headings)
        assert {len(cells) for cells in table.rows} == {len(headings)}


def test_a_failed_requirement_is_said_in_the_table_and_in_the_explanation() -> None:
    spec = make_spec(verdict__require=[{"metric": "loss_val", "max_delta": 0.1}])
    plan = make_plan(spec)
    receipts = [
        make_receipt(plan, block, arm, loss_val=9.0 if arm == "psiv-on" else 7.5)
        for block in plan.blocks
        for arm in block.order
    ]
    verdict = judge(plan, spec, receipts, CALIBRATED)
    first = lay_out(verdict).variants[0]
    assert (str(first.loss), first.loss.tone) == ("FAILED: loss_val", Tone.BAD)
    assert [str(cell) for cell in first.requirements[0][:3]] == ["loss_val", "max_delta 0.1 nats", "FAILED"]


def test_markdown_is_a_table_that_a_message_cannot_break() -> None:
    plan = make_plan()
    receipts = [r for r in make_receipts(plan) if (r.ids.block_index, r.arm) != (2, "psiv-on")]
    broken = make_receipt(plan, 2, "psiv-on", outcome="failed", message="a | b\n<script>")
    text = verdict_markdown(judge(plan, make_spec(), [*receipts, broken], CALIBRATED))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert "<script>" not in text
    assert r"a \| b" in text
    assert "| `psiv-on` |" in text


def _laid_out(view: AblationView) -> VerdictLayout:
    assert view.answer is not None
    return view.answer


def exact_view(primary: str = "peak_allocated_gib", memory_gib: float = -1.4) -> AblationView:
    arms = {"baseline": views.Effect(), "chunk-32": views.Effect(gates={"chunk_size": 32}, memory_gib=memory_gib)}
    return views.view(arms=arms, calibrated=False, num_blocks=6, timed=4, primary=primary)


def test_an_exact_metric_is_shown_as_values_without_an_interval_and_speeds_are_not_judged() -> None:
    layout = _laid_out(exact_view())
    (variant,) = layout.variants
    assert (variant.word.text, variant.word.note, layout.caveat) == ("better", "", "speeds are not judged")
    assert [str(cell) for cell in layout.answers.rows[0]] == [
        "chunk-32", "\N{BLACK UP-POINTING TRIANGLE} better", f"{MINUS}1.34{SPACE}%",
        f"104.10{SPACE}GiB", f"102.70{SPACE}GiB", "agree", "ok", "reject",
    ]  # fmt: skip
    assert variant.sentence == (
        f"Peak allocated memory is 1.34{SPACE}% lower: 102.70{SPACE}GiB instead of 104.10{SPACE}GiB, "
        f"the same in every repeat over 6 blocks; that is more than the margin of 0.5{SPACE}%."
    )
    assert variant.why == ""
    assert layout.statistics.rows == ()
    assert [column.heading for column in layout.other_metrics.columns][3] == f"96{SPACE}% interval"
    assert variant.effect.numbers["effect_pct"] == pytest.approx(-1.3449, abs=1e-3)


@pytest.mark.parametrize("load", [0.02, 0.856])
def test_speeds_beside_an_answer_on_memory_are_marked_and_say_what_others_took(load: float) -> None:
    view = exact_view()
    busy = view.receipts[3]
    busy = busy.model_copy(update={"environment": busy.environment.model_copy(update={"foreign_load": load})})
    trials = tuple(
        dataclasses.replace(trial, receipt=busy) if trial.trial_id == busy.ids.trial else trial for trial in view.trials
    )
    view = dataclasses.replace(view, trials=trials)
    screen, verdict = first_screen(view), view.verdict
    assert screen is not None
    assert verdict is not None
    for message in (screen.baseline, *(line.absolute for line in screen.lines)):
        assert re.match(r"[\d,.]+ tokens/s \(not judged\), ", message)
    (note,) = [warning for warning in screen.warnings if "judged" in warning]
    assert note.startswith("Speeds are not judged: peak allocated memory decides")
    assert (f"took up to 85.6{SPACE}% of the CPU time" in note) == (load > 0.5)
    for text in (terminal(verdict), verdict_markdown(verdict), report.render(view)):
        assert "peeds are not judged" in text
    timed = first_screen(views.view())
    assert timed is not None
    assert "not judged" not in " ".join((timed.baseline, *timed.warnings))


def test_an_exact_metric_that_does_not_move_is_said_to_be_the_same_bit_for_bit() -> None:
    (variant,) = _laid_out(exact_view(memory_gib=0.0)).variants
    assert (variant.word.text, str(variant.effect)) == ("same", f"0.00{SPACE}%")
    assert variant.sentence == "Peak allocated memory is the same, bit for bit, over 6 blocks."


def test_values_that_differ_are_never_shown_as_the_same_text() -> None:
    (variant,) = _laid_out(exact_view(memory_gib=2.0**-28)).variants
    assert [cell.text for cell in variant.values] == [f"111,776,523,878{SPACE}bytes", f"111,776,523,882{SPACE}bytes"]
    assert "111,776,523,882" in variant.sentence


def test_an_arm_that_equals_the_baseline_in_every_block_is_called_out_and_no_other_is() -> None:
    whole = views.cpu_view()
    verdict = whole.verdict
    assert verdict is not None
    (variant, *_), base = verdict.variants, verdict.arms[verdict.baseline]
    assert variant.primary is not None
    equal = variant.primary.model_copy(update={"differences_pct": (0.0,) * variant.primary.blocks})
    near = variant.primary.model_copy(update={"differences_pct": (0.0,) * (variant.primary.blocks - 1) + (1e-9,)})
    other_loss = base.model_copy(update={"loss_final": (base.loss_final or 0) + 1e-12})
    cases = ((equal, base, True), (near, base, False), (equal, other_loss, False))
    for primary, summary, identical in cases:
        one = variant.model_copy(update={"primary": primary})
        arms = {**verdict.arms, variant.arm: summary}
        layout = lay_out(verdict.model_copy(update={"variants": (one,), "arms": arms}))
        text = f"{variant.arm}: throughput is identical to the baseline's in every block"
        assert (f"{text}; perhaps the change has no effect" in layout.caveat) == identical
