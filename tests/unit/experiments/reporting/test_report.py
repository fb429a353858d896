"""The report in every state: complete, deterministic, self-contained, and safe with hostile text."""

import dataclasses
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from ablate.experiments.outcomes import AblationState, FailureClass, VerdictWord
from ablate.experiments.records.calibration import Calibration, CalibrationKey, Ledger
from ablate.experiments.records.circumstances import (
    Admission,
    AttemptRecord,
    BlockSigner,
    Circumstances,
    EarlierAblation,
    Family,
)
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pages import evidence_tables, report
from ablate.experiments.reporting.pictures import registry
from ablate.experiments.reporting.view import AblationView
from tests import views

EVERY_STATE: dict[str, Callable[[], AblationView]] = {
    "completed-h200": views.view,
    "completed-cpu": views.cpu_view,
    "hostile": views.hostile,
    **{
        f"{state}": lambda state=state: views.unfinished(state, done_blocks=2 if state == AblationState.RUNNING else 0)  # type: ignore[misc]
        for state in AblationState
    },
}
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Collects what a page holds, and fails where tags do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, *names: str) -> list[str]:
        return [value for _, attrs in self.tags for name in names if (value := attrs.get(name)) is not None]


@pytest.fixture(scope="module", params=EVERY_STATE)
def page(request: pytest.FixtureRequest) -> str:
    return report.render(EVERY_STATE[request.param]())


def test_render_nests_and_has_one_title(page: str) -> None:
    tags = [tag for tag, _ in Reader(page).tags]
    assert tags.count("h1") == 1
    assert {"title", "main", "header", "footer"} <= set(tags)


def test_render_needs_nothing_external_and_no_script(page: str) -> None:
    reader = Reader(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "img", "iframe", "object", "embed", "base", "form"}
    references = reader.values("src", "href", "srcset", "data", "action", "xlink:href")
    assert [ref for ref in references if not ref.startswith("#") and ref != "data:,"] == []
    styles = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    assert re.findall(r"@import|url\((?!#)", "".join(styles)) == []
    assert not [name for _, attrs in reader.tags for name in attrs if name.startswith("on")]


def test_render_has_unique_ids_and_no_dangling_reference(page: str) -> None:
    reader = Reader(page)
    ids = reader.values("id")
    assert len(ids) == len(set(ids))
    pointed = {ref[1:] for ref in reader.values("href") if ref.startswith("#")}
    pointed |= set(re.findall(r"url\(#([^)]*)\)", page))
    pointed |= {one for value in reader.values("aria-labelledby") for one in value.split()}
    assert pointed <= set(ids)


def test_render_gives_tables_scopes_and_pictures_names(page: str) -> None:
    reader = Reader(page)
    assert all(attrs.get("scope") in {"row", "col"} for tag, attrs in reader.tags if tag == "th")
    pictures = [attrs for tag, attrs in reader.tags if tag == "svg"]
    assert all(attrs["role"] == "img" and attrs["aria-labelledby"] for attrs in pictures)
    assert page.count("<figcaption>") == len(pictures)


def test_render_is_deterministic() -> None:
    assert report.render(views.hostile()) == report.render(views.hostile())


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out, which take longer than the rest of a page."""
    monkeypatch.setattr(registry, "DRAWN", ())


def test_render_answers_first_and_shows_every_number() -> None:
    view = views.view()
    assert view.verdict is not None
    text = Reader(report.render(view)).text
    text = text[text.index("Ablation report") :].replace("\N{NO-BREAK SPACE}", " ")
    assert "Adopt psiv-on; do not adopt chunk-32 and psiv-chunk-64; no valid comparison of tma." in text
    primary = view.verdict.variants[0].primary
    assert primary is not None
    assert f"+{primary.delta_pct:.2f} %" in text
    assert f"+{primary.ci_low_pct:.2f} to +{primary.ci_high_pct:.2f} %" in text
    assert view.answer is not None
    assert all(
        variant.sentence.replace(wording.SPACE, " ") in text.replace(wording.SPACE, " ")
        for variant in view.answer.variants
    )
    assert all(variant.why in text for variant in view.answer.variants)
    assert text.index("The answer") < text.index("Pictures") < text.index("Measurements")
    for words in ("Out of memory at step 0", "true, observed false", "mimo_bwd_dqkv", "h200-03", "580.82.07"):
        assert words in text
    for needed in (view.spec_digest, view.plan.rule_digest, view.verdict.digest, view.spec_text):
        assert needed in text
    assert all(trial.receipt is not None and trial.receipt.digest in text for trial in view.trials)


def test_exchanges_are_shown_by_arm_where_several_processes_share_a_step() -> None:
    whole = views.cpu_view()
    assert evidence_tables.exchanges_table(whole).rows == ()
    variant, exchanged = whole.plan.arms[1].name, (0.25, 0.125, 3 * 2**20)
    names = ("communication_s", "exposed_communication_s", "communication_bytes")
    trials = tuple(
        dataclasses.replace(one, receipt=one.receipt.model_copy(update=dict(zip(names, exchanged, strict=True))))
        if one.receipt is not None and one.arm == variant
        else one
        for one in whole.trials
    )
    rows = evidence_tables.exchanges_table(dataclasses.replace(whole, trials=trials)).rows
    assert [tuple(map(str, row)) for row in rows] == [(variant, "250", "125", "3")]


def test_kernels_table_leaves_out_what_has_the_machine_code_of_the_baseline() -> None:
    view = views.view()
    rows = [tuple(map(str, row)) for row in evidence_tables.kernels_table(view).rows]
    names = [arm.name for arm in view.plan.arms if any(row[0] == arm.name for row in rows)]
    assert [row[1] for row in rows if row[0] == view.plan.baseline.name] == ["mimo_fwd_inter", "mimo_bwd_dqkv"]
    assert len(names) > 1
    assert all([row[1] for row in rows if row[0] == name] == ["mimo_fwd_inter"] for name in names[1:])


@pytest.mark.parametrize("verdict", VerdictWord)
def test_render_says_every_verdict_with_a_sign(undrawn: None, verdict: VerdictWord) -> None:
    view = views.cpu_view()
    assert view.verdict is not None
    variant = view.verdict.variants[0].model_copy(update={"verdict": verdict, "measured": verdict})
    judged = view.verdict.model_copy(update={"variants": (variant,)})
    text = Reader(report.render(dataclasses.replace(view, verdict=judged))).text
    assert re.search(rf"\S\s*{verdict.value}\b", text)


def test_render_explains_a_capped_verdict() -> None:
    text = Reader(report.render(views.cpu_view())).text
    assert "Not decided: no A/A blocks are known for this device. The samples say 'better'" in text
    assert "load average just before the trial" in text
    assert "Kernels" not in text


def test_render_says_how_many_blocks_would_resolve_the_margin(undrawn: None) -> None:
    view = views.cpu_view(
        noise=0.004, arms={"baseline": views.Effect(), "cache": views.Effect(gates={"psiv_cache": True})}
    )
    assert view.verdict is not None
    needed = view.verdict.variants[0].blocks_needed
    assert needed is not None
    text = Reader(report.render(view)).text
    assert f"Once the device is calibrated, another ablation of {needed:,} blocks would answer with a chance of" in text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (AblationState.QUEUED, "Nothing has run yet"),
        (AblationState.RUNNING, "Still running"),
        (AblationState.CANCELLED, "Cancelled"),
        (AblationState.FAILED, "Failed"),
    ],
)
def test_render_says_where_an_unfinished_ablation_stands(state: AblationState, words: str) -> None:
    text = Reader(report.render(views.unfinished(state))).text
    assert words in text
    assert "no receipts yet" in text
    assert "Peak memory" not in text


def test_render_escapes_hostile_text() -> None:
    page = report.render(views.hostile())
    assert "<script" not in page
    assert "<img" not in page
    assert "{{ 7 }}" in page
    assert Reader(page).text.count(views.HOSTILE) > 5


def test_render_caps_thousands_of_trials_and_says_so() -> None:
    arms = {name: views.EFFECTS[name] for name in ("baseline", "psiv-on", "chunk-32")}
    view = views.view(arms=arms, num_blocks=240, timed=2)
    started = time.process_time()
    page = report.render(view)
    assert time.process_time() - started < 10
    assert len(page) < 1_000_000
    assert "120 of 720 trials are drawn" in page
    assert "The first 200 of 720 rows" in page
    assert "The first 200 of 240 rows" in page


def _with(known: Circumstances) -> AblationView:
    view = views.view()
    assert view.verdict is not None
    return dataclasses.replace(view, verdict=view.verdict.model_copy(update={"circumstances": known}))


KEY = CalibrationKey(
    device_serial="1652923041577", node_class="h200", recipe="hybrid-ref-h200", shape_digest="sha256:shape",
    estimator_digest="sha256:estimator", software_digest="sha256:software",
)  # fmt: skip
NOISE = Calibration(
    key=KEY, metric="tokens_per_s", blocks=24, sd_pct=0.21, sd_upper_pct=0.29, autocorrelation=-0.12,
    position_effect_pct=0.03, drift_pct_per_hour=-0.4, largest_z=2.1, ablations=("abl_AA",), mean_pct=0.01,
    clock_mhz=1980.0, variance_p=None, samples=(),
    measured_at="2026-11-22T17:20:00Z", digest="sha256:calibration",
)  # fmt: skip
KEY_OF_NODE = "ed25519:" + 43 * "A"
BROKEN = AttemptRecord(
    block_index=3, number=1, failure_class=FailureClass.TIMEOUT, arm="psiv-on", message="stopped", node="h200-03"
)
EARLIER = EarlierAblation(
    ablation="abl_EARLIER",
    name="psiv",
    state=AblationState.CANCELLED,
    created_at="2026-11-01T00:00:00Z",
    words={},
    asked=("psiv-on",),
)


def test_render_links_the_glance_to_evidence_attempts_and_earlier_askings(undrawn: None) -> None:
    known = Circumstances(
        attempts=(BROKEN,),
        signers=(
            BlockSigner(node="nod_1", name="h200-03", key=KEY_OF_NODE, blocks=(0, 1, 2)),
            BlockSigner(node="nod_2", name="h200-04", key=None, blocks=(3,)),
        ),
        family=Family(question_digest="sha256:question", earlier=(EARLIER,)),
        admission=Admission(
            calibrations=(NOISE,),
            refused_because=None,
            ledger=Ledger(ablations=59, false_words=0, differing=1, upper_bound=0.0495),
        ),
    )
    reader = Reader(report.render(_with(known)))
    links = [attrs["href"] for tag, attrs in reader.tags if tag == "a"]
    assert {"#calibrations", "#attempts", "#family"} <= set(links)
    text = reader.text.replace("\N{NO-BREAK SPACE}", " ")
    foot = "0 false verdicts in 59 A/A ablations, so the rate of false verdicts is at most 4.95 % (95 % confidence"
    for words in ("yes, 24 A/A blocks", "1 broken attempt", "2 of this question", foot):
        assert words in text
    assert text.count("1 broken attempt") == 1
    assert "blocks 1-3 of h200-03, signed by" in text
    assert KEY_OF_NODE in text
    assert "nobody: anyone with access" in text
    for cell in ("1652923041577 (h200)", "0.21 %", "0.29 %", "sha256:calibration", "timeout", "psiv-on", "abl_EARLIER"):
        assert cell in text


def test_render_says_what_is_lacking_and_what_mends_it(undrawn: None) -> None:
    known = Circumstances(
        admission=Admission(refused_because="the A/A blocks are 40 days old", mended_by="ablate aa h200")
    )
    text = Reader(report.render(_with(known))).text
    assert "Uncalibrated: the A/A blocks are 40 days old. To calibrate: ablate aa h200." in text
    assert "No attempt at a block broke." in text
    assert "rate of false verdicts of this service is unknown" in text
    assert "Only a service counts" in text
